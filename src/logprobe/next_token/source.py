"""`RowSource`: interface for computing rows and samples; `EngineRows`: its implementation with an engine.

The other implementation uses a server (`integrations.remote`).
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, final

from logprobe.engine.request import Requests
from logprobe.errors import RequestAbortedError
from logprobe.next_token.rows import Row, SampledIds, row_params

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.engine.backends.start import LoadedModel
    from logprobe.engine.protocol import Capabilities
    from logprobe.models import Vocabulary
    from logprobe.next_token.rows import Prefix
    from logprobe.records.values import IntArray
    from logprobe.sampling import SamplingParams

BegunRow: TypeAlias = "asyncio.Future[tuple[Prefix, Row]]"
"""Future of (prefix with the load numbers of the weights used, row); cancelling it aborts the request."""


class RowSource(Protocol):
    """Interface for computing rows and samples with one model."""

    @property
    def is_busy(self) -> bool:
        """True if requests are running or waiting; a new request then need not wait for a larger batch."""

    def capabilities(self) -> Capabilities:
        """Return the capabilities of the engine."""

    def loads(self, lora: str | None) -> tuple[int, int]:
        """Return the load numbers of a LoRA adapter (0 for None) and of the model's weights.

        A load number changes whenever the adapter or the weights are loaded again.

        Raises:
            ParameterError: the LoRA name is unknown.
        """

    def list_loras(self) -> dict[str, str]:
        """Return the loaded LoRA adapters as a map from name to path."""

    def begin(self, prefixes: Sequence[Prefix]) -> list[BegunRow]:
        """Start computing one row per prefix and return a future for each; call on the batcher's loop.

        Raises:
            LogprobeError: a request was rejected; in this case none is started.
        """

    async def sample(self, prompt: IntArray, params: SamplingParams) -> SampledIds:
        """Return sampled ids, as in `SampledIds.before_stop`; cancelling the call aborts the request."""

    def close(self) -> None:
        """Fail running requests with `EngineClosedError` and release all resources."""


class ModelText(Protocol):
    """Tokenizer and vocabulary of a model."""

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer."""

    @property
    def vocabulary(self) -> Vocabulary:
        """Map from token id to exact bytes."""

    @property
    def bos_token_id(self) -> int | None:
        """Id of the BOS token; None if the model has none."""


@final
class EngineRows:
    """`RowSource` with an engine in this program: each row is one request to the engine."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self._engine = loaded.engine
        self._requests = Requests(loaded.engine)

    @property
    def is_busy(self) -> bool:
        """True if requests are running or waiting."""
        return self._engine.is_busy

    def capabilities(self) -> Capabilities:
        """Return the capabilities of the engine."""
        return self._engine.capabilities()

    def loads(self, lora: str | None) -> tuple[int, int]:
        """Return the load numbers of a LoRA adapter and the model's weights, as in `RowSource.loads`."""
        return 0 if lora is None else self._engine.lora_number(lora), self._engine.weights_number

    def list_loras(self) -> dict[str, str]:
        """Return the loaded LoRA adapters as a map from name to path."""
        return self._engine.list_loras()

    def begin(self, prefixes: Sequence[Prefix]) -> list[BegunRow]:
        """Submit one request per prefix; they run in the same step if they fit.

        Raises:
            LogprobeError: the engine rejected a request, or was closed.
        """
        admitted = [
            self._requests.admit(prefix.token_ids, row_params(prefix.lora), wants_row=True)
            for prefix in prefixes
        ]
        accepted = self._engine.submit(admitted)
        return [
            self._begun(request.request.request_id, prefix._replace(lora_number=request.lora_number))
            for request, prefix in zip(accepted, prefixes, strict=True)
        ]

    async def sample(self, prompt: IntArray, params: SamplingParams) -> SampledIds:
        """Sample with one request.

        Raises:
            ParameterError: a parameter is invalid.
            EngineError: the engine failed, was closed, or aborted the request.
        """
        admitted = self._requests.admit(prompt, params)
        self._engine.submit([admitted])
        output = await self._engine.result(admitted.request.request_id)
        if output.error is not None:
            raise output.error
        completion = output.outputs[0]
        if completion.finish_reason == "abort":
            raise RequestAbortedError("the engine aborted the request")
        sample = SampledIds.before_stop(completion.token_ids, completion.finish_reason, params)
        if completion.logprobs is not None:
            sample.logprobs = completion.logprobs[: len(sample)]
        return sample

    def close(self) -> None:
        """Abort all requests and unload the model."""
        self._engine.close()

    def _begun(self, request_id: str, prefix: Prefix) -> BegunRow:
        loop = asyncio.get_running_loop()
        begun: BegunRow = loop.create_future()
        # The task is not cancelled with the future, since it must consume the output of an aborted request
        # too.
        task = loop.create_task(self._follow(request_id, prefix, begun))
        begun.add_done_callback(partial(self._on_done, request_id, task))
        return begun

    async def _follow(self, request_id: str, prefix: Prefix, begun: BegunRow) -> None:
        try:
            output = await self._engine.result(request_id)
        except Exception as error:  # noqa: BLE001 - the waiters get the error, whatever it is
            settle(begun, error)
            return
        row = output.outputs[0].row
        if row is None:
            settle(begun, output.error or RequestAbortedError("the engine aborted the request"))
        else:
            settle(begun, (prefix._replace(weights_number=output.weights_number), row))

    def _on_done(self, request_id: str, _task: asyncio.Task[None], begun: BegunRow) -> None:
        if begun.cancelled():
            self._engine.abort(request_id)


def settle(begun: BegunRow, outcome: tuple[Prefix, Row] | Exception) -> None:
    """Set the result or exception of a future, unless it is done or cancelled."""
    if begun.done():
        return
    if isinstance(outcome, Exception):
        begun.set_exception(outcome)
    else:
        begun.set_result(outcome)
