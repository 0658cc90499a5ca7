"""`Front`: what the front doors call of an engine, written once over every `Core`.

Before it: `Client`, the desk, a server. After it: a core, which takes commands and publishes what is new of
requests, on whatever thread. Whoever follows a request, in whatever event loop that runs, folds what comes,
so that nothing grows under two threads; each loop is woken once a batch of messages.
"""

from __future__ import annotations

import threading
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING

from logprobe.engine.fold import Describer, Fold
from logprobe.errors import EngineClosedError, require
from logprobe.transport import StreamingLogprobsCollector
from logprobe.transport.collector import Parcel
from logprobe.transport.messages import Abort, Delta, Failure, ForgetPrefixes, Pause, Resume, Submit

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
    from pathlib import Path

    from logprobe.engine.protocol import Capabilities, Core, EngineStats
    from logprobe.engine.request import RequestOutput
    from logprobe.errors import LogprobeError
    from logprobe.records import LogprobsInfo, TokenTable
    from logprobe.transport.messages import Admitted, News, Request

BUFFER_ROWS = 1024  # that may wait for one reader before its request is paused
WAKE_ROWS = 64  # that wait for a reader of whole results before it folds them
WIDE = 1024  # alternatives from which each row is folded at once


class Front:
    """Accepts requests and ends each in exactly one result or one error; any thread may ask.

    It has the folds of all requests whose output was not taken yet.
    """

    def __init__(self, core: Core, table: TokenTable) -> None:
        """Start the core; `table` gives the texts of ids."""
        self.core = core
        own = core.capabilities()
        self._describer = Describer(own.source(), own.vocab_size, table)
        self._collector: StreamingLogprobsCollector[News] = StreamingLogprobsCollector(
            BUFFER_ROWS,
            pause=lambda request_id: core.send(Pause(request_id, "reader")),
            resume=lambda request_id: core.send(Resume(request_id, "reader")),
        )
        self._lock = threading.Lock()
        # All below is guarded by `_lock`.
        self._folds: dict[str, Fold] = {}
        self._read: set[str] = set()  # those of them that somebody follows
        self._is_closed = False
        core.start(self._publish, self._end)

    def admit(self, request: Request) -> Admitted:
        """Say yes to a request.

        Raises:
            ParameterError: it can never be served.
        """
        return self.core.admit(request)

    def submit(self, admitted: Sequence[Admitted]) -> None:
        """Accept requests that enter the same step where they fit; `result` or `stream` follows, once each.

        Raises:
            ParameterError: an id that is in use; none was accepted then.
            EngineClosedError: the engine was closed.
        """
        self._open(admitted)
        self.core.send(Submit(tuple(admitted)))

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

    def abort(self, request_id: str) -> None:
        """Give a request up; its output ends with finish reason `abort` and keeps what there is."""
        self.core.send(Abort(request_id))

    def pause(self, request_id: str) -> None:
        """Let a request take no step until `resume`; it keeps what is computed."""
        self.core.send(Pause(request_id))

    def resume(self, request_id: str) -> None:
        """Let a paused request go on."""
        self.core.send(Resume(request_id))

    def forget_prefixes(self) -> None:
        """Let go of every cached prefix that no request stands on."""
        self.core.send(ForgetPrefixes())

    @property
    def is_busy(self) -> bool:
        """Whether requests run or wait; a new one then joins the next step without delay."""
        return self.core.is_busy

    def add_lora(self, name: str, path: str | Path) -> None:
        """Load LoRA weights from a folder, in place of any of that name, for `SamplingParams(lora=name)`.

        Raises:
            ModelError: the folder cannot be read, or does not fit the model.
            ParameterError: the engine takes none.
            EngineError: a process of the engine ended meanwhile.
        """
        self.core.add_lora(name, path)

    def remove_lora(self, name: str) -> None:
        """Refuse new requests for LoRA weights; they go once none runs on them.

        Raises:
            ParameterError: no such weights.
        """
        self.core.remove_lora(name)

    def list_loras(self) -> dict[str, str]:
        """The loaded LoRA weights: name → path."""
        return self.core.list_loras()

    def lora_number(self, name: str | None) -> int:
        """Which load of a name answers now, or for None which of the model's own weights.

        Raises:
            ParameterError: no such weights.
        """
        return self.core.lora_number(name)

    def capabilities(self) -> Capabilities:
        """What this engine can do; slots and rows are each process's, where it has several."""
        return self.core.capabilities()

    def stats(self) -> EngineStats:
        """What it is doing and has done; read while it runs, so each figure is of its own moment."""
        return self.core.stats()

    def stalled_s(self) -> float:
        """How long its present step has taken, s: 0 while it waits for work, infinite once it has stopped."""
        return self.core.stalled_s()

    def expect(self, number: int, source: LogprobsInfo) -> None:
        """Learn what records of the weights of a load say, before these may take over."""
        with self._lock:
            now = self._describer.weights_number
            oldest = min((fold.output.weights_number for fold in self._folds.values()), default=now)
            self._describer.expect(number, source, min(oldest, now))

    def took_over(self, number: int) -> None:
        """Open what comes from now on as of the weights of this load."""
        self._describer.weights_number = number

    def close(self) -> None:
        """End all requests with `EngineClosedError` and let the model go; a second call does nothing."""
        with self._lock:
            self._is_closed = True
        self.core.close()

    def _open(self, admitted: Sequence[Admitted]) -> None:
        folds = {one.request.request_id: Fold(one.request, self._describer) for one in admitted}
        with self._lock:
            if self._is_closed:
                raise EngineClosedError("the engine is closed; make a new one")
            require(len(folds) == len(admitted), "request_id", "one stands twice; give each request its own")
            for request_id in folds:
                is_new = request_id not in self._folds
                require(is_new, "request_id", f"{request_id!r} is in use; give each request its own")
            for request_id in folds:
                self._collector.open(request_id)
            self._folds |= folds

    def _publish(self, news: Iterable[News]) -> None:
        """Hand on what the core tells; what comes for a request that nobody opened is dropped."""
        for request_id in self._collector.add_many(map(_parcel, news)):
            # Its reader's event loop was closed: nobody can come back.
            self._collector.unregister(request_id)
            self._forget(request_id)
            self.core.send(Abort(request_id))

    def _end(self, error: LogprobeError) -> None:
        """Take no more requests, and end all that there are with `error`."""
        with self._lock:
            self._is_closed = True
            request_ids = list(self._folds)
        self._publish(Failure(request_id, error) for request_id in request_ids)

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
        with self._lock:
            is_known = request_id in self._folds and request_id not in self._read
            require(is_known, "request_id", f"{request_id!r} is unknown, or its output was taken already")
            fold = self._folds[request_id]
            self._read.add(request_id)
        try:
            yield fold
        finally:
            self._forget(request_id)
            if not fold.output.is_finished:
                self.core.send(Abort(request_id))

    def _forget(self, request_id: str) -> None:
        with self._lock:
            self._folds.pop(request_id, None)
            self._read.discard(request_id)


def _parcel(news: News) -> Parcel[News]:
    # A prompt's rows are bounded by the prompt, and a reader must not hold up the chunks that follow.
    num_rows = len(news.token_ids) if isinstance(news, Delta) else 0
    is_urgent = isinstance(news, Failure) or news.finish is not None or news.prompt is not None
    return Parcel(news.request_id, news, num_rows, is_urgent)
