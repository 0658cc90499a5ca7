"""An engine process: takes orders from its front, runs the engine, and reports.

`Replica` starts it with the folder of the sockets, its end of the lifeline, and the file of shared rows. It
ends by order, or as soon as its front is gone; a terminal's signals are for the front to answer.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from logprobe.config import EngineConfig
    from logprobe.engine.backends.process.orders import (
        LoadLora,
        LoadWeights,
        Order,
        Report,
        Start,
        TakeWeights,
    )
    from logprobe.engine.backends.start import NativeParts
    from logprobe.engine.protocol import ForwardBackend, Layout
    from logprobe.errors import LogprobeError
    from logprobe.transport.channel import Channel
    from logprobe.transport.messages import Admitted, News

PULSE_S: Final = 0.2
CHECK_FRONT_S: Final = 1.0

logger = logging.getLogger("logprobe")


def main() -> None:
    """Run until the front says stop, or is gone."""
    folder, lifeline, rows = Path(sys.argv[1]), socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # Before anything heavy is imported: a front that dies meanwhile leaves nothing behind.
    passing = {folder}
    threading.Thread(target=_end_with_front, args=(passing, lifeline, os.getppid()), daemon=True).start()
    import zmq

    from logprobe.engine.backends.process.orders import Order
    from logprobe.transport.channel import Channel
    from logprobe.transport.codec import Codec
    from logprobe.transport.shm import PageWriter

    codec: Codec[Order] = Codec(Order, writer=PageWriter(rows))
    channel = Channel.connect(zmq.Context(), folder, codec, lifeline)
    Child(channel, passing).run()
    os._exit(0)  # what C++ code still does when the interpreter ends is of no use


def _end_with_front(passing: set[Path], lifeline: socket.socket, front: int) -> None:
    """End this process with its front, when that lets the lifeline go or, where a fork holds it, is gone.

    The folders that are `passing` go with it.
    """
    lifeline.settimeout(CHECK_FRONT_S)
    while os.getppid() == front:
        try:
            if not lifeline.recv(1):
                break
        except TimeoutError:
            continue
    for folder in list(passing):
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


class Child:
    """One engine behind a channel."""

    _config: EngineConfig
    _parts: NativeParts

    def __init__(self, channel: Channel[Order], passing: set[Path]) -> None:
        self._channel = channel
        self._passing = passing
        self._pulsing = threading.Lock()  # from the figures of a pulse until it is sent
        self._loras: dict[int, Any] = {}  # weights by the number that the front gave them
        # The model with other weights and its LoRA weights, by the number that the front gave them.
        self._ready: dict[int, tuple[Any, dict[int, Any]]] = {}

    def run(self) -> None:
        """Start the engine, and serve until the order to stop."""
        from logprobe.engine.backends.process.orders import Ready, Start, Stop, Stopped
        from logprobe.engine.backends.thread import EngineThread

        start = self._channel.receive()
        assert isinstance(start, Start)
        try:
            self._load(start)
        except BaseException as error:  # noqa: BLE001 - the front tells whoever started it
            self._channel.send([Stopped(_as_ours(error, "cannot start"))])
            while not isinstance(self._channel.receive(), Stop):
                pass
            return
        engine, capabilities = self._parts.engine, self._parts.capabilities
        self._thread = EngineThread(engine, capabilities, overlap=engine.config.overlap)
        self._thread.start(self._publish, self._end)
        eos = sorted(self._parts.eos_token_ids)
        self._send_pulse(beside=[Ready(capabilities, eos)])
        self._serve()
        self._thread.close()

    def _load(self, start: Start) -> None:
        from logprobe.config import EngineConfig
        from logprobe.engine.backends.start import build_native_engine
        from logprobe.kernels.threads.parallel import release_threads
        from logprobe.transport.messages import ReplaceForward

        self._config = EngineConfig(**start.settings)
        self._parts = build_native_engine(self._config)
        engine = self._parts.engine
        if start.weights is not None:
            self._make_ready(start.weights)
            number = start.weights.number
            forward, _ = self._ready.pop(number)
            engine.handle(ReplaceForward(forward, finishes=False, number=number, on_done=lambda: None))
        release_threads()  # from here on the engine's own thread computes
        for order in start.loras:
            self._loras[order.number] = _loaded(engine.forward, order)

    def _serve(self) -> None:
        from logprobe.engine.backends.process.orders import Stop

        pulsed_at = time.monotonic()
        while not isinstance(order := self._receive(), Stop):
            if order is not None:
                self._take(order)
            if time.monotonic() - pulsed_at >= PULSE_S:
                self._send_pulse()
                pulsed_at = time.monotonic()

    def _receive(self) -> Order | None:
        """The next order, if any; requests that cannot be read are told of, and no others.

        Raises:
            UnreadableError: nothing that can be read as requests either.
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
        """Send figures, and other reports that they count; the front reads the figures first.

        Two threads send them: none may be overtaken by older ones.
        """
        from logprobe.engine.backends.process.orders import Pulse

        with self._pulsing:
            pulse = Pulse(self._parts.engine.stats(), self._thread.stalled_s())
            self._channel.send([pulse, *beside])

    def _take(self, order: Order) -> None:
        from logprobe.engine.backends.process.orders import (
            DropLora,
            DropWeights,
            LoadLora,
            LoadWeights,
            TakeWeights,
        )
        from logprobe.transport.messages import Submit

        match order:
            case Submit(requests):
                self._thread.send(Submit(tuple(self._taken_in(requests))))
            case LoadLora() | LoadWeights():
                # Nobody names them before the answer, so requests need not wait for the disk.
                threading.Thread(target=self._answer, args=(order,), daemon=True).start()
            case TakeWeights():
                self._take_weights(order)
            case DropLora(number):
                self._loras.pop(number, None)
            case DropWeights(number):
                self._ready.pop(number, None)
            case _:
                self._thread.send(order)  # type: ignore[arg-type]  # `Start` and `Stop` never come here

    def _taken_in(self, requests: Iterable[Admitted]) -> list[Admitted]:
        """Requests that the front admitted, with this side's own objects; those that cannot run are told."""
        from logprobe.transport.messages import Admitted, Failure

        ready = []
        for one in requests:
            try:
                args = self._parts.engine.processing.pipeline.take_in(one.processor_args)
                ready.append(Admitted(one.request, args, self._lora_of(one)))
            except Exception as error:  # noqa: BLE001 - whatever it is, it ends this request and no other
                told = _as_ours(error, "cannot take a request in")
                self._channel.send([Failure(one.request.request_id, told)])
        return ready

    def _lora_of(self, admitted: Admitted) -> Any:
        from logprobe.errors import EngineError

        if admitted.lora is None:
            return None
        if admitted.lora.number not in self._loras:
            raise EngineError(f"LoRA weights {admitted.request.lora!r} ended with an engine process")
        return self._loras[admitted.lora.number]

    def _answer(self, order: LoadLora | LoadWeights) -> None:
        from logprobe.engine.backends.process.orders import Answer, LoadLora

        try:
            if isinstance(order, LoadLora):
                self._loras[order.number] = lora = _loaded(self._parts.engine.forward, order)
                answer = Answer(order.number, lora.path)
            else:
                answer = Answer(order.number, layout=self._make_ready(order))
        except BaseException as error:  # noqa: BLE001 - whoever waits for the answer must hear of it
            answer = Answer(order.number, error=_as_ours(error, "cannot load weights"))
        self._channel.send([answer])

    def _make_ready(self, order: LoadWeights) -> Layout:
        from logprobe.engine.forward.native import NativeForward
        from logprobe.kernels.threads.parallel import release_threads
        from logprobe.models.loading import read_state
        from logprobe.models.quiet import quiet_transformers

        if order.is_passing:
            self._passing.add(Path(order.path))
        before = self._parts.engine.forward
        assert isinstance(before, NativeForward)
        with quiet_transformers():
            forward = before.with_weights(self._config, read_state(order.path))
        release_threads()
        for lora in list(self._loras.values()):  # requests may have named them before
            forward.loras.make_room(lora)
        self._ready[order.number] = forward, {one.number: _loaded(forward, one) for one in order.loras}
        return forward.layout

    def _take_weights(self, order: TakeWeights) -> None:
        from logprobe.engine.backends.process.orders import Answer
        from logprobe.errors import EngineError
        from logprobe.transport.messages import ReplaceForward

        if order.of not in self._ready:  # it was started while they were read; it is started again with them
            self._end(EngineError("an engine process lacks the weights that the others have"))
            return
        forward, loras = self._ready.pop(order.of)

        def take_over() -> None:
            self._loras |= loras
            self._channel.send([Answer(order.number)])

        self._thread.send(ReplaceForward(forward, order.finishes, order.of, take_over))

    def _publish(self, news: Iterable[News]) -> None:
        from logprobe.errors import EngineError, ParameterError
        from logprobe.transport.messages import Abort, Delta, Failure

        if not (found := list(news)):
            return
        # Whoever reads the end of a request reads figures that count it.
        has_ends = any(isinstance(one, Delta) and one.finish is not None for one in found)
        try:
            if has_ends:
                self._send_pulse(beside=found)
            else:
                self._channel.send(found)
        except ParameterError as error:
            if len(found) > 1:  # together they are too large
                for one in found:
                    self._publish([one])
                return
            request_id = found[0].request_id
            self._thread.send(Abort(request_id))
            self._channel.send([Failure(request_id, EngineError(str(error)))])

    def _end(self, reason: LogprobeError) -> None:
        from logprobe.engine.backends.process.orders import Stopped

        self._channel.send([Stopped(reason)])


def _loaded(forward: ForwardBackend, order: LoadLora) -> Any:
    """The weights of a folder, known by their number alone: the names are the front's."""
    loras = forward.loras
    loras.add(order.name, order.path)
    lora = loras.get(order.name)
    loras.remove(order.name)
    return lora


def _as_ours(error: BaseException, what: str) -> LogprobeError:
    from logprobe.errors import EngineError, LogprobeError

    if isinstance(error, LogprobeError):
        return error
    logger.error("the engine process %s", what, exc_info=error)
    return EngineError(f"the engine process {what}: {error!r}")
