"""`Replica`: one engine process as its front sees it: started, followed, and started again when it dies.

`ProcessEngine` calls it on any thread; a thread of its own follows the process from start to end.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from logprobe.engine.backends.process.orders import Answer, Pulse, Ready, Report, Start, Stop, Stopped
from logprobe.engine.protocol import EngineStats
from logprobe.errors import (
    EngineClosedError,
    EngineError,
    EngineUnavailableError,
    LogprobeError,
    ParameterError,
)
from logprobe.transport.channel import Channel, PeerGoneError
from logprobe.transport.codec import Codec
from logprobe.transport.messages import Delta, Failure, Submit
from logprobe.transport.shm import PageReader, unnamed_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from logprobe.engine.backends.process.orders import Order
    from logprobe.transport.messages import Admitted, Asked, Event

THREAD_NUMBERS: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
MAIN: Final = "from logprobe.engine.backends.process.child import main; main()"
CLOSE_S: Final = 5.0  # for the step in progress when it is stopped
FIRST_DELAY_S, LONGEST_DELAY_S, STEADY_S = (
    0.5,
    30.0,
    60.0,
)  # of starting again; after which the delay is short
STDERR: Final = 2
LATE_S: Final = 2.0  # without a pulse: the process is held up
LOOK_S: Final = 1.0  # between two looks at whether it still sends its pulse
SILENT_S: Final = 60.0  # without a pulse: it hangs
STUCK_S: Final = 600.0  # of one step: so does its engine

NOTHING: Final = EngineStats.of_replicas({})

logger = logging.getLogger("logprobe")


class Backlog:
    """Estimated remaining work of a request, by which the router chooses a process."""

    __slots__ = ("num_samples", "num_tokens")

    def __init__(self, admitted: Admitted) -> None:
        params = admitted.request.params
        self.num_samples = params.num_samples
        self.num_tokens = len(admitted.request.prompt_token_ids) + self.num_samples * params.max_tokens


class Replica:
    """A named series of engine processes: when one exits, the next is started.

    `starting` gives the first message to a process that starts; `accept` raises where one that has loaded may
    not serve; `publish` takes the events of its requests.
    """

    def __init__(
        self,
        name: str,
        context: Any,
        threads: int,
        starting: Callable[[Replica], Start],
        accept: Callable[[Ready], None],
        publish: Callable[[Iterable[Event]], None],
    ) -> None:
        self.name = name
        self.ready: Future[Ready] = Future()  # of the first start
        self.num_restarts = 0
        self._context = context
        self._threads = threads
        self._starting = starting
        self._accept = accept
        self._publish = publish
        self._lock = threading.Lock()
        # All below is guarded by `_lock`.
        self._channel: Channel[Any] | None = None  # while the engine takes requests
        self._waiting: list[Order] = []  # for the engine to take requests
        self._backlogs: dict[str, Backlog] = {}  # of the requests that have not ended
        self._asked: dict[int, Future[Answer]] = {}  # orders that are answered, by their numbers
        self._ended: LogprobeError | None = None  # why no process will come any more
        self._unavailable: EngineUnavailableError | None = None  # why the latest start failed
        self.num_queued_tokens = 0  # of all of them; may be read at any time
        self._why_down: LogprobeError | None = None  # why the latest process ended; read at any time
        self._is_closed = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._pulse: tuple[float, Pulse] | None = None  # the latest, and when it came; read at any time
        self._down_since = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"logprobe-{name}", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """Process id of the present process; None without one."""
        process = self._process
        return None if process is None else process.pid

    @property
    def is_up(self) -> bool:
        """Whether its engine takes requests now; else they wait for it."""
        return self._channel is not None

    def submit(self, requests: Sequence[Admitted]) -> None:
        """Accept requests; each ends, also when the process dies. They fail at once after a failed start."""
        with self._lock:
            unavailable = self._unavailable
            if unavailable is None:
                for admitted in requests:
                    backlog = self._backlogs[admitted.request.request_id] = Backlog(admitted)
                    self.num_queued_tokens += backlog.num_tokens
                self._send(Submit(tuple(requests)))
        if unavailable is not None:
            self._publish([Failure(admitted.request.request_id, unavailable) for admitted in requests])

    def has(self, request_id: str) -> bool:
        """Return True if a request runs or waits here."""
        return request_id in self._backlogs

    def send(self, order: Order) -> None:
        """Send a command to the engine, or queue it until the engine is up."""
        with self._lock:
            self._send(order)

    def ask(self, order: Asked) -> Future[Answer]:
        """Send a command that is answered; if the engine cannot serve it, the answer holds an error."""
        answer: Future[Answer] = Future()
        with self._lock:
            if (error := self._ended or self._unavailable) is not None:
                answer.set_result(Answer(order.number, error=error))
                return answer
            self._asked[order.number] = answer
            self._send(order)
        return answer

    def stats(self) -> EngineStats:
        """Return the statistics of the latest heartbeat; all zero without one."""
        pulse = self._pulse
        stats = NOTHING if pulse is None else pulse[1].stats
        why_down = "" if self.is_up else str(self._ended or self._why_down or "its process is starting")
        if self.is_up and (silent_s := self.silent_s()):
            why_down = f"{self.name} has not answered for {silent_s:.0f} s"
        return replace(stats, restarts=self.num_restarts, is_up=self.is_up, why_down=why_down)

    def down_s(self) -> float:
        """Return how long it has not accepted requests, s."""
        return 0.0 if self.is_up else time.monotonic() - self._down_since

    def stalled_s(self) -> float:
        """Return the duration of the present step plus the time without a heartbeat, s."""
        pulse = self._pulse
        return 0.0 if pulse is None else pulse[1].stalled_s + self.silent_s()

    def silent_s(self) -> float:
        """Return for how long its process has sent no pulse, s; 0 up to `LATE_S`."""
        pulse = self._pulse
        silent_s = 0.0 if pulse is None else time.monotonic() - pulse[0]
        return silent_s if silent_s > LATE_S else 0.0

    def stop(self) -> None:
        """Let the process end after its present step; `close` must follow."""
        with self._lock:
            self._is_closed.set()
            process = self._process
            if self._channel is None and process is not None:
                process.kill()  # it holds nothing yet
            self._send(Stop())

    def close(self) -> None:
        """End the process, by force where it does not end by itself; a second call does nothing."""
        self.stop()
        while self._thread.is_alive():
            self._thread.join(CLOSE_S)
            process = self._process
            if self._thread.is_alive() and process is not None:
                process.kill()

    def _send(self, order: Order) -> None:
        if self._channel is None:
            self._waiting.append(order)
            return
        try:
            self._channel.send(order)
        except PeerGoneError as error:  # whoever follows the process ends what it was to do
            logger.debug("%s: %s", self.name, error)
        except ParameterError:
            if not isinstance(order, Submit) or len(order.requests) == 1:
                raise
            for admitted in order.requests:  # together they are too large for a message
                self._send(Submit((admitted,)))

    def _run(self) -> None:
        delay_s = FIRST_DELAY_S
        while True:
            began = time.monotonic()
            reason, was_up = self._live()
            if self._is_closed.is_set() or not self.ready.done():
                break
            if not was_up:
                reason = EngineUnavailableError(f"{reason}; the next attempt follows within {delay_s:g} s")
                with self._lock:
                    self._unavailable = reason
            self._why_down = reason
            self._end_all(reason)
            delay_s = FIRST_DELAY_S if time.monotonic() - began > STEADY_S else delay_s
            logger.error("%s; it is started again in %.1f s", reason, delay_s)
            if self._is_closed.wait(delay_s):
                break
            delay_s = min(2 * delay_s, LONGEST_DELAY_S)
            self.num_restarts += 1
        if self._is_closed.is_set():
            reason = EngineClosedError("the engine was closed before this request ended")
        if not self.ready.done():
            self.ready.set_exception(reason)
        with self._lock:
            self._ended = reason
        self._end_all(reason)

    def _live(self) -> tuple[LogprobeError, bool]:
        """Start a process and follow it to its end; return why it ended, and whether it took requests."""
        self._process = None
        reason: LogprobeError | None = None
        was_up = False
        with ExitStack() as resources:
            try:
                folder = Path(tempfile.mkdtemp(prefix="logprobe-"))
                resources.callback(shutil.rmtree, folder, ignore_errors=True)
                rows = unnamed_file()
                resources.callback(os.close, rows)
                own, others = socket.socketpair()
                resources.callback(own.close)
                resources.enter_context(others)
                codec: Codec[list[Report]] = Codec(list[Report], reader=PageReader(rows))
                channel = Channel.bind(self._context, folder, codec, own)
                resources.callback(channel.close)
                resources.callback(self._end_process)
                process = self._process = self._spawn(folder, others, rows)
                others.close()
                channel.wait_for_peer()
                channel.send(self._starting(self))
                reason = self._follow(channel, folder)
                channel.send(Stop())
                process.wait(CLOSE_S)
            except (PeerGoneError, subprocess.TimeoutExpired) as error:
                logger.debug("%s: %s", self.name, error)
            except OSError as error:  # no folder, descriptor, process or memory
                reason = EngineError(f"{self.name} cannot be started: {error}")
            except LogprobeError as error:
                reason = error
            except Exception as error:  # noqa: BLE001 - whatever it is, those who wait must hear of it
                reason = EngineError(f"{self.name} cannot be followed: {error!r}")
            finally:
                with self._lock:
                    was_up = self._channel is not None
                    self._channel, self._pulse = None, None
                    if was_up:
                        self._down_since = time.monotonic()
        return self._why(reason), was_up

    def _follow(self, channel: Channel[Any], folder: Path) -> LogprobeError:
        """Act on what the process reports until it must end; why it must.

        Raises:
            PeerGoneError: it has ended.
        """
        num_silent, reason = 0, None
        while reason is None:
            reports = channel.receive(LOOK_S)
            if reports is not None:
                if not self.is_up:
                    shutil.rmtree(folder, ignore_errors=True)  # both sockets are connected
                num_silent, reason = 0, self._take(channel, reports)
            elif self.is_up:
                # Looks are counted and no clock is read: this process may have been stopped itself.
                num_silent += 1
                if num_silent * LOOK_S >= SILENT_S:
                    reason = self._kill(f"has not answered for {SILENT_S:.0f} s")
        return reason

    def _kill(self, why: str) -> EngineError:
        """Kill a process that hangs; return the error for its requests."""
        assert self._process is not None
        self._process.kill()
        return EngineError(f"{self.name} (pid {self._process.pid}) {why} and was killed")

    def _spawn(self, folder: Path, lifeline: socket.socket, rows: int) -> subprocess.Popen[bytes]:
        arguments = [str(folder), str(lifeline.fileno()), str(rows)]
        path = os.pathsep.join(filter(None, sys.path))  # what can be imported here can be imported there
        return subprocess.Popen(  # noqa: S603 - this interpreter
            [sys.executable, "-P", "-c", MAIN, *arguments],
            pass_fds=(lifeline.fileno(), rows),
            # torch takes MKL's number where one is set, and replicas with more threads than cores spin.
            env=os.environ
            | {"PYTHONPATH": path}
            | dict.fromkeys(THREAD_NUMBERS, str(self._threads))
            # A later start reads the revision of the first, which a model hub may have replaced since.
            | ({"HF_HUB_OFFLINE": "1"} if self.ready.done() else {}),
            stdin=subprocess.DEVNULL,
            stdout=STDERR,  # what comes on standard output is the front's
        )

    def _take(self, channel: Channel[Any], reports: list[Report]) -> LogprobeError | None:
        """Act on one message; why the process must end, where it must."""
        events = [report for report in reports if isinstance(report, Delta | Failure)]
        self._account(events)  # before figures that count them are seen
        for report in reports:
            match report:
                case Ready():
                    self._go_up(channel, report)
                case Stopped(error):
                    return error
                case Pulse():
                    self._pulse = time.monotonic(), report
                    if report.stalled_s > STUCK_S:
                        return self._kill(f"has not ended a step for {report.stalled_s:.0f} s")
                case Answer(number):
                    with self._lock:
                        answer = self._asked.pop(number)
                    answer.set_result(report)
        if events:
            self._publish(events)
        return None

    def _go_up(self, channel: Channel[Any], ready: Ready) -> None:
        self._accept(ready)
        with self._lock:
            self._channel, self._unavailable = channel, None
            waiting, self._waiting = self._waiting, []
            for order in waiting:
                self._send(order)
        if not self.ready.done():
            self.ready.set_result(ready)

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _why(self, reason: LogprobeError | None) -> LogprobeError:
        """What the requests of a process that has ended fail with."""
        if reason is not None:
            return reason
        if self._process is None:
            return EngineError(f"{self.name} could not be started")
        code = self._process.returncode
        how = f"ended with exit code {code}"
        if code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            how += " (out of memory?)" if -code == signal.SIGKILL else ""
        return EngineError(f"{self.name} (pid {self._process.pid}) {how}")

    def _account(self, events: Iterable[Event]) -> None:
        """Subtract finished work from the backlogs."""
        with self._lock:
            for event in events:
                backlog = self._backlogs.get(event.request_id)
                if backlog is None:
                    continue
                num_done = 0
                if isinstance(event, Delta):
                    num_done = len(event.token_ids)
                    backlog.num_samples -= event.finish is not None
                if isinstance(event, Failure) or backlog.num_samples == 0:
                    num_done = backlog.num_tokens
                    del self._backlogs[event.request_id]
                backlog.num_tokens -= num_done
                self.num_queued_tokens -= num_done

    def _end_all(self, reason: LogprobeError) -> None:
        """Fail every request of the process and every pending answer."""
        with self._lock:
            request_ids, self._backlogs = list(self._backlogs), {}
            asked, self._asked = self._asked, {}
            self._waiting, self.num_queued_tokens = [], 0
        for number, answer in asked.items():
            answer.set_result(Answer(number, error=reason))
        if request_ids:
            self._publish([Failure(request_id, reason) for request_id in request_ids])
