"""`Replica`: starts and monitors an engine process, and restarts it when it exits.

`ProcessEngine` may call a replica from any thread. Each replica has a thread that monitors its process.
"""

from __future__ import annotations

import logging
import shutil
import signal
import subprocess
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from logprobe import runtime
from logprobe.engine.backends.process.orders import Answer, Pulse, Ready, Start, Stop, Stopped
from logprobe.engine.protocol import EngineStats
from logprobe.errors import (
    EngineClosedError,
    EngineError,
    EngineUnavailableError,
    LogprobeError,
    ParameterError,
)
from logprobe.transport.channel import PeerGoneError
from logprobe.transport.messages import Delta, Failure, Submit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from concurrent.futures import Future
    from pathlib import Path

    from logprobe.engine.backends.process.launcher import Launcher
    from logprobe.engine.backends.process.orders import Order, Report
    from logprobe.transport.channel import Channel
    from logprobe.transport.messages import Admitted, Asked, Event

CLOSE_S: Final = 5.0  # maximum wait for the step in progress when the process is stopped
# Delay in seconds before the first restart, the longest delay, and the run time that resets the delay.
FIRST_DELAY_S, LONGEST_DELAY_S, STEADY_S = (
    0.5,
    30.0,
    60.0,
)
LATE_S: Final = 2.0  # time without a heartbeat after which the process counts as silent
LOOK_S: Final = 1.0  # interval of the checks for heartbeats
SILENT_S: Final = 60.0  # time without a heartbeat after which the process is killed
STUCK_S: Final = 600.0  # duration of a step after which the process is killed

NOTHING: Final = EngineStats.of_replicas({})

logger = logging.getLogger("logprobe")


class Backlog:
    """Estimated remaining work of a request, used by the router to choose a process."""

    __slots__ = ("num_samples", "num_tokens")

    def __init__(self, admitted: Admitted) -> None:
        params = admitted.request.params
        self.num_samples = params.num_samples
        self.num_tokens = len(admitted.request.prompt_token_ids) + self.num_samples * params.max_tokens


class Replica:
    """An engine process that is restarted when it exits.

    Args:
        name: name for messages and metrics.
        launcher: starts the process.
        starting: returns the first message for a process that starts.
        accept: called with the properties of a process that has loaded; raises an error if the process must
            not serve.
        publish: called with the events of the process's requests.
    """

    def __init__(
        self,
        name: str,
        launcher: Launcher,
        starting: Callable[[Replica], Start],
        accept: Callable[[Ready], None],
        publish: Callable[[Iterable[Event]], None],
    ) -> None:
        self.name = name
        self.ready: Future[Ready] = runtime.Future()  # result of the first start
        self.num_restarts = 0
        self._launcher = launcher
        self._starting = starting
        self._accept = accept
        self._publish = publish
        self._lock = runtime.Lock()
        # Everything below is guarded by `_lock`; some may be read without it.
        self._channel: Channel[Any] | None = None  # None while the engine does not accept requests
        self._waiting: list[Order] = []  # commands queued until the engine is up
        self._backlogs: dict[str, Backlog] = {}  # unfinished requests, by id
        self._asked: dict[int, Future[Answer]] = {}  # commands that wait for their answer, by number
        self._ended: LogprobeError | None = None  # why no process will be started any more
        self._unavailable: EngineUnavailableError | None = None  # why the last start failed
        self.num_queued_tokens = 0  # sum over the backlogs; may be read without the lock
        self._why_down: LogprobeError | None = (
            None  # why the last process ended; may be read without the lock
        )
        self._is_closed = runtime.Event()
        self._process: subprocess.Popen[bytes] | None = None
        # Last heartbeat and when it arrived (monotonic, s); may be read without the lock.
        self._pulse: tuple[float, Pulse] | None = None
        self._down_since = runtime.monotonic()
        self._thread = runtime.Thread(target=self._run, name=f"logprobe-{name}", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """Id of the current process; None if there is none."""
        process = self._process
        return None if process is None else process.pid

    @property
    def is_up(self) -> bool:
        """True if the engine accepts requests; while it does not, requests are queued."""
        return self._channel is not None

    def submit(self, requests: Sequence[Admitted]) -> None:
        """Accept requests; each of them ends with an event, even if the process dies.

        If the last start of the process failed, the requests fail immediately.
        """
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
        """Return True if the request runs or waits in this process."""
        return request_id in self._backlogs

    def send(self, order: Order) -> None:
        """Send a command to the engine, or queue it until the engine is up."""
        with self._lock:
            self._send(order)

    def ask(self, order: Asked) -> Future[Answer]:
        """Send a command and return a future of its answer, which holds an error if the command fails."""
        answer: Future[Answer] = runtime.Future()
        with self._lock:
            if (error := self._ended or self._unavailable) is not None:
                answer.set_result(Answer(order.number, error=error))
                return answer
            self._asked[order.number] = answer
            self._send(order)
        return answer

    def stats(self) -> EngineStats:
        """Return the statistics in the last heartbeat; all zero if there is none."""
        pulse = self._pulse
        stats = NOTHING if pulse is None else pulse[1].stats
        why_down = "" if self.is_up else str(self._ended or self._why_down or "its process is starting")
        if self.is_up and (silent_s := self.silent_s()):
            why_down = f"{self.name} has not answered for {silent_s:.0f} s"
        return replace(stats, restarts=self.num_restarts, is_up=self.is_up, why_down=why_down)

    def down_s(self) -> float:
        """Return for how many seconds the engine has not accepted requests; 0 if it does."""
        return 0.0 if self.is_up else runtime.monotonic() - self._down_since

    def stalled_s(self) -> float:
        """Return the step's duration at the last heartbeat plus the time since then, in seconds."""
        pulse = self._pulse
        return 0.0 if pulse is None else pulse[1].stalled_s + self.silent_s()

    def silent_s(self) -> float:
        """Return for how many seconds there has been no heartbeat; 0 up to `LATE_S`."""
        pulse = self._pulse
        silent_s = 0.0 if pulse is None else runtime.monotonic() - pulse[0]
        return silent_s if silent_s > LATE_S else 0.0

    def stop(self) -> None:
        """Tell the process to exit after its current step; call `close` afterwards."""
        with self._lock:
            self._is_closed.set()
            process = self._process
            if self._channel is None and process is not None:
                process.kill()  # it is still loading and has no requests
            self._send(Stop())

    def close(self) -> None:
        """Stop the process, and kill it if it does not exit in time; idempotent."""
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
        except PeerGoneError as error:  # the monitor thread fails its requests
            logger.debug("%s: %s", self.name, error)
        except ParameterError:
            if not isinstance(order, Submit) or len(order.requests) == 1:
                raise
            for admitted in order.requests:  # too large for one message
                self._send(Submit((admitted,)))

    def _run(self) -> None:
        delay_s = FIRST_DELAY_S
        while True:
            began = runtime.monotonic()
            reason, was_up = self._run_process()
            if self._is_closed.is_set() or not self.ready.done():
                break
            if not was_up:
                reason = EngineUnavailableError(f"{reason}; the next attempt follows within {delay_s:g} s")
                with self._lock:
                    self._unavailable = reason
            self._why_down = reason
            self._end_all(reason)
            delay_s = FIRST_DELAY_S if runtime.monotonic() - began > STEADY_S else delay_s
            logger.error("%s; restarting it in %.1f s", reason, delay_s)
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

    def _run_process(self) -> tuple[LogprobeError, bool]:
        """Start a process and monitor it until it ends.

        Returns:
            The reason why the process ended, and True if the process had accepted requests.
        """
        self._process = None
        reason: LogprobeError | None = None
        was_up = False
        with ExitStack() as resources:
            try:
                launched = self._launcher.launch(resources, is_restart=self.ready.done())
                process = self._process = launched.process
                channel = launched.channel
                resources.callback(self._end_process)
                channel.wait_for_peer()
                channel.send(self._starting(self))
                reason = self._follow(channel, launched.folder)
                channel.send(Stop())
                process.wait(CLOSE_S)
            except (PeerGoneError, subprocess.TimeoutExpired) as error:
                logger.debug("%s: %s", self.name, error)
            except OSError as error:  # cannot create the folder, a descriptor, the process, or memory
                reason = EngineError(f"{self.name} cannot be started: {error}")
            except LogprobeError as error:
                reason = error
            except Exception as error:  # noqa: BLE001 - the waiting requests get the error, whatever it is
                reason = EngineError(f"{self.name} cannot be monitored: {error!r}")
            finally:
                with self._lock:
                    was_up = self._channel is not None
                    self._channel, self._pulse = None, None
                    if was_up:
                        self._down_since = runtime.monotonic()
        return self._why(reason), was_up

    def _follow(self, channel: Channel[Any], folder: Path) -> LogprobeError:
        """Handle reports from the process until it must be stopped; return the reason for stopping it.

        Raises:
            PeerGoneError: the process has ended.
        """
        num_silent, reason = 0, None
        while reason is None:
            reports = channel.receive(LOOK_S)
            if reports is not None:
                if not self.is_up:
                    shutil.rmtree(folder, ignore_errors=True)  # both sockets are connected
                num_silent, reason = 0, self._take(channel, reports)
            elif self.is_up:
                # Count the checks instead of reading a clock: this process may have been suspended itself.
                num_silent += 1
                if num_silent * LOOK_S >= SILENT_S:
                    reason = self._kill(f"has not answered for {SILENT_S:.0f} s")
        return reason

    def _kill(self, why: str) -> EngineError:
        """Kill a process that hangs; return the error with which its requests end."""
        assert self._process is not None
        self._process.kill()
        return EngineError(f"{self.name} (pid {self._process.pid}) {why} and was killed")

    def _take(self, channel: Channel[Any], reports: list[Report]) -> LogprobeError | None:
        """Handle the reports in one message; return the reason if the process must be stopped, else None."""
        events = [report for report in reports if isinstance(report, Delta | Failure)]
        self._account(events)  # before readers see statistics that count them
        for report in reports:
            match report:
                case Ready():
                    self._go_up(channel, report)
                case Stopped(error):
                    return error
                case Pulse():
                    self._pulse = runtime.monotonic(), report
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
        """Return the error for the requests of an ended process: `reason`, or one from the exit code."""
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
        """Subtract the work that `events` report as done from the backlogs."""
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
        """Fail every request of the process and every command that waits for an answer."""
        with self._lock:
            request_ids, self._backlogs = list(self._backlogs), {}
            asked, self._asked = self._asked, {}
            self._waiting, self.num_queued_tokens = [], 0
        for number, answer in asked.items():
            answer.set_result(Answer(number, error=reason))
        if request_ids:
            self._publish([Failure(request_id, reason) for request_id in request_ids])
