"""`Front`: the engine API that `Client`, `Batcher` and the server call; one implementation for every `Core`.

The core accepts commands and publishes events on any thread. The reader of a request applies the request's
events to the output in the reader's own event loop, so only one thread modifies an output. Each loop is woken
once per batch of events.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from contextlib import aclosing, contextmanager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from msgspec.structs import replace

from logprobe import runtime
from logprobe.engine.creator import Creator
from logprobe.engine.loras import LoraTable
from logprobe.engine.output_builder import Describer, OutputBuilder
from logprobe.errors import EngineClosedError, require
from logprobe.models.loading import as_state, digest_of, read_state
from logprobe.transport.messages import (
    Abort,
    Delta,
    DropLora,
    DropWeights,
    Failure,
    ForgetPrefixes,
    LoadLora,
    LoadWeights,
    Pause,
    Resume,
    Submit,
    TakeWeights,
)
from logprobe.transport.streams import Parcel, RequestStreams

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Collection, Iterable, Iterator, Sequence

    from logprobe.engine.protocol import Capabilities, Core, EngineStats
    from logprobe.engine.request import RequestOutput
    from logprobe.errors import LogprobeError
    from logprobe.models.loading import State
    from logprobe.records import LogprobsInfo, TokenTable
    from logprobe.transport.messages import Admitted, Event, Request

OnRunning: TypeAlias = Literal["finish", "end"]
"""What running requests do when weights are replaced: `finish` with the old weights, or `end` early."""
MAX_VERSION_CHARS = 256  # of a weight version; every record stores it
BUFFER_ROWS = 1024  # rows buffered for one reader before its request is paused
WAKE_ROWS = 64  # rows buffered before a reader that waits for the whole result is woken
WIDE = 1024  # alternatives per row from which every row wakes the reader


class Front:
    """Accepts requests and ends each with exactly one result or one error; thread-safe.

    Holds the output builder of every request until its output has been read.
    """

    def __init__(self, core: Core, table: TokenTable) -> None:
        """Start the core; `table` maps token ids to text."""
        self.core = core
        self._creator = Creator()
        self._capabilities = own = core.capabilities()
        self._describer = Describer(own.source(), own.vocab_size, table)
        self._numbers = itertools.count(1)  # load numbers, shared by LoRA weights and model weights
        self._loading = runtime.Lock()  # serializes loads of model weights
        self._streams: RequestStreams[Event] = RequestStreams(
            BUFFER_ROWS,
            pause=lambda request_id: core.send(Pause(request_id, "reader")),
            resume=lambda request_id: core.send(Resume(request_id, "reader")),
        )
        self._lock = runtime.Lock()
        # `_lock` guards everything below.
        self._builders: dict[str, OutputBuilder] = {}
        self._read: set[str] = set()  # ids that have a reader
        self._loras = LoraTable()
        self._held: dict[str, int] = {}  # request id → load number of its LoRA weights, if any
        self._is_closed = False
        core.start(self._publish, self._end)

    def admit(self, request: Request) -> Admitted:
        """Validate a request.

        Raises:
            ParameterError: the request can never be served.
            EngineClosedError: this process is a fork of the one that started the engine.
        """
        self._creator.check()
        name = request.params.lora
        lora_number = 0 if name is None else self.lora_number(name)
        admitted = self.core.admit(request)
        return replace(
            admitted,
            lora_number=lora_number,
            weights_number=self.weights_number,
            admitted_s=runtime.monotonic(),
        )

    def submit(self, admitted: Sequence[Admitted]) -> tuple[Admitted, ...]:
        """Submit admitted requests as a group; they start in the same step if they fit.

        Afterwards call `result` or `stream` exactly once per request; if other tasks make these calls, use
        `submitted`. Returns the requests with the load number of the LoRA weights in use, which may have been
        reloaded since `admit`.

        Raises:
            ParameterError: a request id is in use, or LoRA weights were removed; no request was accepted.
            EngineClosedError: the engine was closed.
        """
        accepted = self._open(admitted)
        self.core.send(Submit(accepted))
        return accepted

    @contextmanager
    def submitted(self, admitted: Sequence[Admitted]) -> Iterator[tuple[Admitted, ...]]:
        """Submit requests as `submit` does; at the end of the block, abort those that have no reader.

        This covers tasks that are cancelled before they start, and so never call `result` or `stream`.
        """
        accepted = self.submit(admitted)
        try:
            yield accepted
        finally:
            for request_id in (one.request.request_id for one in accepted):
                with self._lock:
                    is_unread = request_id in self._builders and request_id not in self._read
                if is_unread:
                    self._streams.unregister(request_id)
                    self.core.send(Abort(request_id))
                    self._forget(request_id)

    async def result(self, request_id: str) -> RequestOutput:
        """Wait for a request's final output; cancelling the wait aborts the request."""
        async with aclosing(self._grow(request_id, every_step=False, buffer_rows=BUFFER_ROWS)) as outputs:
            async for output in outputs:
                if output.is_finished:
                    return output
        raise AssertionError("a stream ends with a finished output")

    def stream(self, request_id: str, *, buffer_rows: int = BUFFER_ROWS) -> AsyncGenerator[RequestOutput]:
        """Yield the request's output object each time it has grown.

        Closing the stream early aborts the request. The request is paused while `buffer_rows` rows wait for
        the reader.
        """
        return self._grow(request_id, every_step=True, buffer_rows=buffer_rows)

    def abort(self, request_id: str) -> None:
        """Abort a request; its output keeps what was generated and gets finish reason `abort`."""
        self.core.send(Abort(request_id))

    def pause(self, request_id: str) -> None:
        """Pause a request until `resume`; its KV cache is kept while memory allows."""
        self.core.send(Pause(request_id))

    def resume(self, request_id: str) -> None:
        """Resume a paused request."""
        self.core.send(Resume(request_id))

    def forget_prefixes(self) -> None:
        """Evict every cached prefix that no request uses."""
        self.core.send(ForgetPrefixes())

    @property
    def is_busy(self) -> bool:
        """True while requests run or wait; a new request then joins the next step without delay."""
        return self.core.is_busy

    def add_lora(self, name: str, path: str | Path) -> None:
        """Load LoRA weights from a folder for `SamplingParams(lora=name)`, replacing any of that name.

        Raises:
            ModelError: the folder cannot be read, or the LoRA weights do not fit the model.
            ParameterError: the engine does not support LoRA.
            EngineError: an engine process exited during the load, or the engine was closed.
        """
        require(isinstance(name, str) and name, "name", f"must be a non-empty string, got {name!r}")
        from logprobe.models.lora import lora_version, resolved_folder

        folder = resolved_folder(path)
        load, version = LoadLora(next(self._numbers), name, str(folder)), lora_version(folder)
        self._check_open()
        self.core.ask(load)
        with self._lock:
            gone = self._loras.put(load, version)
        self._drop(gone)

    def remove_lora(self, name: str) -> None:
        """Unregister LoRA weights: new requests cannot use them; they are freed once no request uses them.

        Raises:
            ParameterError: no LoRA weights with this name are loaded.
        """
        with self._lock:
            gone = self._loras.remove(name)
        self._drop(gone)

    def list_loras(self) -> dict[str, str]:
        """Return the folders of the loaded LoRA weights, by name."""
        with self._lock:
            return self._loras.paths()

    def lora_number(self, name: str) -> int:
        """Return the load number that a LoRA name currently refers to.

        Raises:
            ParameterError: no LoRA weights with this name are loaded.
        """
        with self._lock:
            return self._loras.number(name)

    def load_weights(self, weights: str | Path | State, *, version: str | None = None, finishes: bool) -> str:
        """Replace the model's weights; return the new weights' version once they are in use.

        Concurrent calls are serialized.

        Args:
            weights: a dict of tensors or NumPy arrays by parameter name, such as a `state_dict()`, which is
                copied; or a folder of safetensors files. Prefixes from wrappers are removed
                (`models.loading.as_state`).
            version: name of the weights in records; None: a digest (`models.loading.digest_of`).
            finishes: let running requests finish on the old weights; otherwise they end with
                `WeightsReplacedError`.

        Raises:
            ModelError: the weights cannot be read, or do not fit the model; the old ones stay in use.
            ParameterError: the engine is not the native one, `version` is invalid, or `weights` has an
                unsupported type or belongs to an unmerged PEFT model.
            EngineError: an engine process exited during the load, or the engine was closed.
        """
        is_name = version is None or (
            isinstance(version, str) and 0 < len(version) <= MAX_VERSION_CHARS and version.isprintable()
        )
        require(is_name, "version", f"must be 1 to {MAX_VERSION_CHARS} printable characters", got=version)
        is_source = isinstance(weights, str | PathLike | Mapping)
        require(is_source, "weights", f"must be a state_dict() or a folder, got a {type(weights).__name__}")
        source = as_state(weights) if isinstance(weights, Mapping) else str(Path(weights).absolute())
        with self._loading:
            number = next(self._numbers)
            layout = self.core.ask(LoadWeights(number, source))
            assert layout is not None, "`LoadWeights` returns a layout"
            try:
                # Computed once, not in every engine process.
                version = version or digest_of(source if isinstance(source, Mapping) else read_state(source))
            except BaseException:
                self.core.send(DropWeights(number))
                raise
            capabilities = self._capabilities.of_weights(layout, version)
            self._expect(number, capabilities.source())
            self.core.ask(TakeWeights(number, finishes))
            self._capabilities, self._describer.weights_number = capabilities, number
        return version

    @property
    def weights_number(self) -> int:
        """Load number of the model weights in use."""
        return self._describer.weights_number

    def capabilities(self) -> Capabilities:
        """Return the current capabilities; with several processes, their limits are per process."""
        return self._capabilities

    def stats(self) -> EngineStats:
        """Return the current statistics; while the engine runs, they are not an atomic snapshot."""
        return self.core.stats()

    def stalled_s(self, request_ids: Collection[str] = ()) -> float:
        """Return for how many seconds the current step has run: 0 while idle, infinity once stopped.

        Args:
            request_ids: with several processes, return the longest duration among the processes that run
                these requests; if no process runs any of them, return the shortest duration of all processes.
        """
        return self.core.stalled_s(request_ids)

    def close(self) -> None:
        """End all requests with `EngineClosedError` and release the model; further calls have no effect."""
        if self._creator.is_gone:
            return
        with self._lock:
            self._is_closed = True
        self.core.close()

    def _check_open(self) -> None:
        self._creator.check()
        if self._is_closed:
            raise EngineClosedError("the engine is closed; make a new one")

    def _expect(self, number: int, source: LogprobsInfo) -> None:
        """Register the provenance of new weights before they may come into use."""
        with self._lock:
            now = self.weights_number
            oldest = min((builder.output.weights_number for builder in self._builders.values()), default=now)
            self._describer.expect(number, source, min(oldest, now))

    def _drop(self, lora_number: int | None) -> None:
        """Tell the core to free the LoRA weights of a load; None: do nothing."""
        if lora_number is not None:
            self.core.send(DropLora(lora_number))

    def _new_builder(self, admitted: Admitted) -> OutputBuilder:
        number = admitted.lora_number
        return OutputBuilder(
            admitted.request, self._describer, self._loras.version(number) if number else None
        )

    def _open(self, admitted: Sequence[Admitted]) -> tuple[Admitted, ...]:
        self._creator.check()  # before taking a lock that another thread may have held at the fork
        builders = {accepted.request.request_id: self._new_builder(accepted) for accepted in admitted}
        with self._lock:
            self._check_open()
            require(len(builders) == len(admitted), "request_id", "is not unique; give each request its own")
            for request_id in builders:
                is_new = request_id not in self._builders
                require(is_new, "request_id", f"{request_id!r} is in use; give each request its own")
            bound = tuple(map(self._bound, admitted))
            for accepted, before in zip(bound, admitted, strict=True):
                if accepted is not before:
                    builders[accepted.request.request_id] = self._new_builder(accepted)
                if accepted.lora_number:
                    self._loras.hold(accepted.lora_number)
                    self._held[accepted.request.request_id] = accepted.lora_number
            for request_id in builders:
                self._streams.open(request_id)
            self._builders |= builders
        return bound

    def _bound(self, admitted: Admitted) -> Admitted:
        """Return the request with the load number of LoRA weights that still exist.

        Weights of the same name may have been loaded again since `admit`.
        """
        name = admitted.request.params.lora
        if name is None or self._loras.has(admitted.lora_number):
            return admitted
        return replace(admitted, lora_number=self._loras.number(name))

    def _publish(self, events: Iterable[Event]) -> None:
        """Deliver the core's events to their readers; drop events of requests that are not open."""
        for request_id in self._streams.add_many(map(_parcel, events)):
            # The reader's event loop was closed, so nothing will read this request again.
            self._streams.unregister(request_id)
            self.core.send(Abort(request_id))
            self._forget(request_id)

    def _end(self, error: LogprobeError) -> None:
        """Accept no more requests, and end all open ones with `error`."""
        with self._lock:
            self._is_closed = True
            request_ids = list(self._builders)
        self._publish(Failure(request_id, error) for request_id in request_ids)

    async def _grow(
        self, request_id: str, *, every_step: bool, buffer_rows: int
    ) -> AsyncGenerator[RequestOutput]:
        with self._follow(request_id) as builder:
            min_rows = 1 if every_step or builder.is_wide(WIDE) else WAKE_ROWS
            messages = self._streams.stream(request_id, buffer_size=buffer_rows, min_rows=min_rows)
            async with aclosing(messages) as batches:
                async for events in batches:
                    for event in events:
                        builder.add(event)
                    is_finished = builder.output.is_finished
                    yield builder.output
                    if is_finished:
                        return

    @contextmanager
    def _follow(self, request_id: str) -> Iterator[OutputBuilder]:
        with self._lock:
            is_known = request_id in self._builders and request_id not in self._read
            require(is_known, "request_id", f"{request_id!r} is unknown, or its output was already taken")
            builder = self._builders[request_id]
            self._read.add(request_id)
        try:
            yield builder
        finally:
            if not builder.output.is_finished:
                self.core.send(Abort(request_id))
            self._forget(request_id)

    def _forget(self, request_id: str) -> None:
        with self._lock:
            self._builders.pop(request_id, None)
            self._read.discard(request_id)
            held = self._held.pop(request_id, None)
            gone = None if held is None else self._loras.release(held)
        self._drop(gone)


def check_on_running(on_running: OnRunning) -> bool:
    """Return True for `finish` and False for `end`.

    Raises:
        ParameterError: the value is neither `finish` nor `end`.
    """
    known = f"must be {' or '.join(get_args(OnRunning))}, got {on_running!r}"
    require(on_running in get_args(OnRunning), "on_running", known)
    return on_running == "finish"


def _parcel(event: Event) -> Parcel[Event]:
    # Prompt rows do not count: their number is bounded by the prompt, and prefill must not wait for a reader.
    num_rows = len(event.token_ids) if isinstance(event, Delta) else 0
    is_urgent = isinstance(event, Failure) or event.finish is not None or event.prompt is not None
    return Parcel(event.request_id, event, num_rows, is_urgent)
