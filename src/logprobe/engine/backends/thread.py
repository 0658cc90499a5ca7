"""`ThreadEngine`: the native engine on a thread of this process.

The thread alone touches the engine. Messages go to it through a queue; what is new of a request goes through
a collector to whoever follows it, in whatever event loop that runs, each loop woken once a step. The reader
folds it, so that nothing grows under two threads.
"""

from __future__ import annotations

import atexit
import math
import threading
import time
from collections import deque
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING

from logprobe.engine.fold import Fold
from logprobe.errors import EngineClosedError, EngineError, require
from logprobe.transport import StreamingLogprobsCollector
from logprobe.transport.collector import Parcel
from logprobe.transport.messages import (
    Abort,
    AddLora,
    Delta,
    Failure,
    ForgetPrefixes,
    Pause,
    RemoveLora,
    Resume,
    Submit,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
    from pathlib import Path

    from logprobe.engine.engine import Engine
    from logprobe.engine.fold import Describer
    from logprobe.engine.protocol import Capabilities, EngineStats
    from logprobe.engine.request import RequestOutput
    from logprobe.errors import LogprobeError
    from logprobe.transport.messages import Admitted, Command, News, Request

CHECK_AFTER_IDLE_S = 1.0
EXIT_WAIT_S = 5.0  # for the step in progress when the interpreter ends
BUFFER_ROWS = 1024  # that may wait for one reader before its request is paused
WAKE_ROWS = 64  # that wait for a reader of whole results before it folds them
WIDE = 1024  # alternatives from which each row is folded at once


class ThreadEngine:
    """Implements `EngineBackend` on an `Engine` of this process."""

    def __init__(self, engine: Engine, capabilities: Capabilities, describer: Describer) -> None:
        self._engine = engine
        self._capabilities = capabilities
        self._describer = describer
        self._collector: StreamingLogprobsCollector[News] = StreamingLogprobsCollector(
            BUFFER_ROWS, pause=self.pause, resume=self.resume
        )
        self._wake = threading.Condition()
        # All below is guarded by `_wake`.
        self._commands: deque[Command] = deque()
        self._folds: dict[str, Fold] = {}  # of every request whose output was not taken yet
        self._read: set[str] = set()  # those of them that somebody follows
        self._is_closed = False
        self._turn_began: float | None = None  # by the monotonic clock; None while it waits for work
        self._thread = threading.Thread(target=self._run, name="logprobe-engine", daemon=True)
        self._thread.start()
        # A thread that still runs when the interpreter ends is unwound, which C++ code may not survive.
        atexit.register(self._close_at_exit)

    def admit(self, request: Request) -> Admitted:
        """Say yes to a request.

        Raises:
            ParameterError: it can never be served.
        """
        return self._engine.admit(request)

    def submit(self, admitted: Sequence[Admitted]) -> None:
        """Accept requests that enter the same step where they fit; `result` or `stream` follows, once each.

        Raises:
            ParameterError: an id that is in use; none was accepted then.
            EngineClosedError: the engine was closed.
        """
        folds = {one.request.request_id: Fold(one.request, self._describer) for one in admitted}
        with self._wake:
            if self._is_closed:
                raise EngineClosedError("the engine is closed; make a new one")
            require(len(folds) == len(admitted), "request_id", "one stands twice; give each request its own")
            for request_id in folds:
                is_new = request_id not in self._folds
                require(is_new, "request_id", f"{request_id!r} is in use; give each request its own")
            for request_id in folds:
                self._collector.open(request_id)
            self._folds |= folds
            self._commands.append(Submit(tuple(admitted)))
            self._wake.notify()

    @property
    def is_busy(self) -> bool:
        """Whether requests run or wait; a new one then joins the next step without delay."""
        return bool(self._commands) or self._engine.has_work

    async def result(self, request_id: str) -> RequestOutput:
        """The request's output once it has ended; giving up the wait aborts the request."""
        async with aclosing(self._grow(request_id, every_step=False, buffer_rows=BUFFER_ROWS)) as outputs:
            async for output in outputs:
                if output.is_finished:
                    return output
        raise AssertionError("a stream ends with a finished output")

    def stream(self, request_id: str, *, buffer_rows: int = BUFFER_ROWS) -> AsyncGenerator[RequestOutput]:
        """The request's one output, each time it has grown; leaving the stream early aborts the request.

        The request is paused while `buffer_rows` rows wait for the reader.
        """
        return self._grow(request_id, every_step=True, buffer_rows=buffer_rows)

    async def _grow(
        self, request_id: str, *, every_step: bool, buffer_rows: int
    ) -> AsyncGenerator[RequestOutput]:
        with self._follow(request_id) as fold:
            min_rows = 1 if every_step or fold.is_wide(WIDE) else WAKE_ROWS
            messages = self._collector.stream(request_id, buffer_size=buffer_rows, min_rows=min_rows)
            async with aclosing(messages) as batches:
                async for news in batches:
                    for one in news:
                        fold.add(one)
                    is_finished = fold.output.is_finished
                    yield fold.output
                    if is_finished:
                        return

    @contextmanager
    def _follow(self, request_id: str) -> Iterator[Fold]:
        with self._wake:
            is_known = request_id in self._folds and request_id not in self._read
            require(is_known, "request_id", f"{request_id!r} is unknown, or its output was taken already")
            fold = self._folds[request_id]
            self._read.add(request_id)
        try:
            yield fold
        finally:
            self._forget(request_id)
            if not fold.output.is_finished:
                self.abort(request_id)

    def _forget(self, request_id: str) -> None:
        with self._wake:
            self._folds.pop(request_id, None)
            self._read.discard(request_id)

    def abort(self, request_id: str) -> None:
        """Give a request up; its output ends with finish reason `abort` and keeps what there is."""
        self._send(Abort(request_id))

    def pause(self, request_id: str) -> None:
        """Let a request take no step until `resume`; it keeps what is computed."""
        self._send(Pause(request_id))

    def resume(self, request_id: str) -> None:
        """Let a paused request go on."""
        self._send(Resume(request_id))

    def forget_prefixes(self) -> None:
        """Let go of every cached prefix that no request stands on."""
        self._send(ForgetPrefixes())

    def add_lora(self, name: str, path: str | Path) -> None:
        """Load LoRA weights from a folder, in place of any of that name, for `SamplingParams(lora=name)`.

        Raises:
            ModelError: the folder cannot be read, or does not fit the model.
        """
        self._engine.handle(AddLora(name, str(path)))  # here, so that no step waits for the disk

    def remove_lora(self, name: str) -> None:
        """Refuse new requests for LoRA weights; they go once none runs on them.

        Raises:
            ParameterError: no such weights.
        """
        self._engine.handle(RemoveLora(name))

    def list_loras(self) -> dict[str, str]:
        """The loaded LoRA weights: name → path."""
        return self._engine.list_loras()

    def lora_number(self, name: str) -> int:
        """Which load of a name answers now.

        Raises:
            ParameterError: no such weights.
        """
        return self._engine.lora_number(name)

    def capabilities(self) -> Capabilities:
        """What this engine can do."""
        return self._capabilities

    def stats(self) -> EngineStats:
        """What it is doing and has done; read while it runs, so each figure is of its own moment."""
        return self._engine.stats()

    def stalled_s(self) -> float:
        """How long its present step has taken, s: 0 while it waits for work, infinite once it has stopped."""
        if not self._thread.is_alive():
            return math.inf
        began = self._turn_began
        return 0.0 if began is None else time.monotonic() - began

    def close(self) -> None:
        """End all requests with `EngineClosedError` and let the thread go; a second call does nothing."""
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        atexit.unregister(self._close_at_exit)

    def _close_at_exit(self) -> None:
        """Let the thread end before the interpreter does; a step that hangs must not keep the process."""
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        self._thread.join(EXIT_WAIT_S)

    def _send(self, command: Command) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def _run(self) -> None:
        reason: LogprobeError = EngineClosedError("the engine was closed before this request ended")
        try:
            while self._take_commands():
                self._publish(self._engine.step())
                self._turn_began = None
        except BaseException as error:  # noqa: BLE001 - a bug of ours must end every request, not hang it
            reason = EngineError(f"the engine stopped: {error!r}; please report this")
            reason.__cause__ = error
        with self._wake:
            self._is_closed = True
            request_ids = list(self._folds)
        self._publish(Failure(request_id, reason) for request_id in request_ids)

    def _take_commands(self) -> bool:
        """Wait for work and do what the messages ask; False once closed."""
        with self._wake:
            if not self._wake.wait_for(self._has_news, timeout=CHECK_AFTER_IDLE_S):
                self._engine.check_integrity()
                self._wake.wait_for(self._has_news)
            if self._is_closed:
                return False
            commands, self._commands = self._commands, deque()
        self._turn_began = time.monotonic()
        self._publish([news for command in commands for news in self._engine.handle(command)])
        return True

    def _has_news(self) -> bool:
        return bool(self._commands) or self._is_closed or self._engine.has_work

    def _publish(self, news: Iterable[News]) -> None:
        for request_id in self._collector.add_many(map(_parcel, news)):
            # Its reader's event loop was closed: nobody can come back.
            self._collector.unregister(request_id)
            self._forget(request_id)
            self._send(Abort(request_id))


def _parcel(news: News) -> Parcel[News]:
    # A prompt's rows are bounded by the prompt, and a reader must not hold up the chunks that follow.
    num_rows = len(news.token_ids) if isinstance(news, Delta) else 0
    is_urgent = isinstance(news, Failure) or news.finish is not None or news.prompt is not None
    return Parcel(news.request_id, news, num_rows, is_urgent)
