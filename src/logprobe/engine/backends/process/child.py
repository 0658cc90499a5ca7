"""Main program of an engine process: receives commands from its parent, runs the engine, and reports.

`Replica` starts the process with three arguments: the folder of the sockets, the file descriptor of a socket
whose other end closes when the parent exits (the lifeline), and the file descriptor of the file for shared
rows. The process exits on `Stop` or when its parent is gone. It ignores terminal signals, which the parent
handles.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import sys
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Final

from logprobe import runtime

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from concurrent.futures import Future

    from logprobe.engine.backends.process.orders import Order, Report, Start
    from logprobe.engine.backends.start import NativeParts
    from logprobe.engine.backends.thread import EngineThread
    from logprobe.engine.protocol import Layout
    from logprobe.errors import LogprobeError
    from logprobe.transport.channel import Channel
    from logprobe.transport.messages import Admitted, Event, LoadLora, LoadWeights, TakeWeights

PULSE_S: Final = 0.2
CHECK_FRONT_S: Final = 1.0

logger = logging.getLogger("logprobe")


def main() -> None:
    """Run until the parent sends `Stop` or exits."""
    folder, lifeline, rows = Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # Before heavy imports, so that this process also exits if the parent dies during them.
    passing = {folder}
    runtime.Thread(target=_end_with_front, args=(passing, lifeline, os.getppid()), daemon=True).start()
    import zmq

    from logprobe.engine.backends.process.orders import Order
    from logprobe.transport.channel import Channel
    from logprobe.transport.codec import Codec
    from logprobe.transport.shm import PageWriter

    codec: Codec[Order] = Codec(Order, writer=PageWriter(rows))
    channel = Channel.connect(zmq.Context(), folder, codec, lifeline)
    Child(channel, passing).run()
    os._exit(0)  # skip the teardown of C++ libraries


def _end_with_front(passing: set[Path], lifeline: socket.socket, front: int) -> None:
    """Wait until the parent exits, then delete the temporary folders in `passing` and end this process.

    The parent, process `front`, has exited if its end of the lifeline is closed, or if this process has
    another parent; the second test is needed because a fork of the parent may keep the lifeline open.
    """
    while os.getppid() == front:
        if wait([lifeline], CHECK_FRONT_S) and not lifeline.recv(1):
            break
    for folder in list(passing):
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


class Child:
    """An engine in this process that receives commands and sends reports through a channel."""

    _parts: NativeParts
    _thread: EngineThread

    def __init__(self, channel: Channel[Order], passing: set[Path]) -> None:
        self._channel = channel
        self._passing = passing
        self._pulsing = runtime.Lock()  # held while a heartbeat's statistics are read and sent

    def run(self) -> None:
        """Start the engine, and serve until a `Stop` message arrives."""
        from logprobe.engine.backends.process.orders import Ready, Start, Stop, Stopped

        start = self._channel.receive()
        assert isinstance(start, Start)
        try:
            self._load(start)
        except BaseException as error:  # noqa: BLE001 - the front reports the error
            self._channel.send([Stopped(_as_ours(error, "cannot start"))])
            while not isinstance(self._channel.receive(), Stop):
                pass
            return
        self._thread.start(self._publish, self._end)
        eos = sorted(self._parts.eos_token_ids)
        self._send_pulse(beside=[Ready(self._parts.capabilities, eos, self._parts.kv_bytes)])
        self._serve()
        self._thread.close()

    def _load(self, start: Start) -> None:
        from logprobe.config import EngineConfig
        from logprobe.engine.backends.start import build_native_engine
        from logprobe.engine.backends.thread import EngineThread
        from logprobe.transport.messages import LoadWeights, TakeWeights

        config = EngineConfig(**start.settings)
        if start.weight_version is not None:
            _check_model(config.model, start.weight_version)
        self._parts = build_native_engine(config)
        engine = self._parts.engine
        overlap = config.scheduler_config.async_scheduling
        self._thread = EngineThread(engine, self._parts.capabilities, overlap=overlap)
        for order in start.loads:
            self._ask(order)
            if isinstance(order, LoadWeights):
                engine.handle(TakeWeights(order.number, finishes=False))

    def _serve(self) -> None:
        from logprobe.engine.backends.process.orders import Stop

        pulsed_at = runtime.monotonic()
        while not isinstance(order := self._receive(), Stop):
            if order is not None:
                self._take(order)
            if runtime.monotonic() - pulsed_at >= PULSE_S:
                self._send_pulse()
                pulsed_at = runtime.monotonic()

    def _receive(self) -> Order | None:
        """Wait for the next command; return None if none arrives in `PULSE_S` seconds.

        If the command is a `Submit` that cannot be decoded, fail its requests and return None.

        Raises:
            UnreadableError: a message other than `Submit` cannot be decoded.
        """
        from logprobe.engine.backends.process.orders import request_ids
        from logprobe.transport.codec import UnreadableError
        from logprobe.transport.messages import Failure

        try:
            return self._channel.receive(PULSE_S)
        except UnreadableError as error:
            if not (names := request_ids(error.value)):
                raise
            logger.warning("%s", error)
            self._channel.send([Failure(name, error) for name in names])
            return None

    def _send_pulse(self, beside: Sequence[Report] = ()) -> None:
        """Send a heartbeat with statistics, followed by the reports in `beside`, as one message.

        Called on two threads; the lock prevents older statistics from being sent after newer ones.
        """
        from logprobe.engine.backends.process.orders import Pulse

        with self._pulsing:
            pulse = Pulse(self._parts.engine.stats(), self._thread.stalled_s())
            self._channel.send([pulse, *beside])

    def _take(self, order: Order) -> None:
        from logprobe.transport.messages import LoadLora, LoadWeights, Submit, TakeWeights

        match order:
            case Submit(requests):
                self._thread.send(Submit(tuple(self._taken_in(requests))))
            case LoadLora() | LoadWeights():
                # No request uses them before the answer, so requests need not wait for the disk.
                runtime.Thread(target=self._answer, args=(order,), daemon=True).start()
            case TakeWeights():
                self._take_weights(order)
            case _:
                self._thread.send(order)  # type: ignore[arg-type]  # never `Start` or `Stop`

    def _taken_in(self, requests: Iterable[Admitted]) -> list[Admitted]:
        """Parse the processor arguments of requests, and return the requests with the parsed arguments.

        Requests for which this fails end with an error.
        """
        from msgspec.structs import replace

        from logprobe.transport.messages import Failure

        ready = []
        for admitted in requests:
            try:
                args = self._parts.engine.sampling.pipeline.take_in(admitted.processor_args)
                ready.append(replace(admitted, processor_args=args))
            except Exception as error:  # noqa: BLE001 - fails this request only
                reason = _as_ours(error, "cannot accept a request")
                self._channel.send([Failure(admitted.request.request_id, reason)])
        return ready

    def _ask(self, order: LoadLora | LoadWeights) -> Layout | None:
        from logprobe.transport.messages import LoadWeights

        if order.is_passing:
            self._passing.add(Path(order.weights if isinstance(order, LoadWeights) else order.path))
        return self._thread.ask(order)

    def _answer(self, order: LoadLora | LoadWeights) -> None:
        from logprobe.engine.backends.process.orders import Answer

        try:
            answer = Answer(order.number, self._ask(order))
        except BaseException as error:  # noqa: BLE001 - the error is reported in the answer
            answer = Answer(order.number, error=_as_ours(error, "cannot load weights"))
        self._channel.send([answer])

    def _take_weights(self, order: TakeWeights) -> None:
        """Queue the switch to prepared weights behind the requests that arrived before the command."""
        from logprobe.engine.backends.process.orders import Answer
        from logprobe.errors import EngineError

        def answer(taking: Future[None]) -> None:
            if taking.exception() is None:  # otherwise the process ends, which also fails the waiting front
                self._channel.send([Answer(order.number)])

        engine = self._parts.engine
        if engine.weights_number == order.number:  # the process was started with them
            self._channel.send([Answer(order.number)])
        elif engine.has_ready(order.number):
            self._thread.take(order).add_done_callback(answer)
        else:  # the process was started while they were loaded; the restarted one loads them
            self._end(EngineError("an engine process does not have the weights of the others"))

    def _publish(self, batch: Iterable[Event]) -> None:
        from logprobe.errors import EngineError, ParameterError
        from logprobe.transport.messages import Abort, Delta, Failure

        if not (events := list(batch)):
            return
        # Readers that see the end of a request must also see statistics that count it.
        has_ends = any(isinstance(event, Delta) and event.finish is not None for event in events)
        try:
            if has_ends:
                self._send_pulse(beside=events)
            else:
                self._channel.send(events)
        except ParameterError as error:
            if len(events) > 1:  # too large for one message
                for event in events:
                    self._publish([event])
                return
            request_id = events[0].request_id
            self._thread.send(Abort(request_id))
            self._channel.send([Failure(request_id, EngineError(str(error)))])

    def _end(self, reason: LogprobeError) -> None:
        from logprobe.engine.backends.process.orders import Stopped

        self._channel.send([Stopped(reason)])


def _check_model(model: str, expected: str) -> None:
    """Check that the checkpoint has the expected version, before its weights are loaded and cached.

    Raises:
        EngineUnavailableError: the weights differ from those that the engine was started with.
        ModelError: the model cannot be found.
    """
    from logprobe.engine.backends.process.orders import changed_model
    from logprobe.errors import EngineUnavailableError
    from logprobe.models import resolve, weight_version

    if (found := weight_version(resolve(model))) != expected:
        raise EngineUnavailableError(changed_model(model, expected, found))


def _as_ours(error: BaseException, what: str) -> LogprobeError:
    from logprobe.errors import EngineError, LogprobeError

    if isinstance(error, LogprobeError):
        return error
    logger.error("the engine process %s", what, exc_info=error)
    return EngineError(f"the engine process {what}: {error!r}")
