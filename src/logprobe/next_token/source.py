"""`RowSource`: what begins rows and samples; `EngineRows`, an engine of this program as one.

Before it: the batcher, which gathers prefixes. After it: the engine. The other source is a server.
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
"""A row on its way, behind its prefix under the loads that gave it; cancelling it gives this one up."""


class RowSource(Protocol):
    """What begins rows and samples of one model."""

    @property
    def is_busy(self) -> bool:
        """Whether something runs or waits, so that a row that is begun joins it without delay."""

    def capabilities(self) -> Capabilities:
        """What the engine behind it can do."""

    def loads(self, lora: str | None) -> tuple[int, int]:
        """Which load of LoRA weights answers now, 0 for none, and which of the model's own.

        `ParameterError` where there are no such weights.
        """

    def list_loras(self) -> dict[str, str]:
        """The loaded LoRA weights: name → path."""

    def begin(self, prefixes: Sequence[Prefix]) -> list[BegunRow]:
        """Begin rows, each of which ends alone; to be called on the batcher's loop.

        `LogprobeError` where one is refused; none was begun then.
        """

    async def sample(self, prompt: IntArray, params: SamplingParams) -> SampledIds:
        """The ids that were drawn, without the stop id that ended them; giving up the wait gives it up."""

    def close(self) -> None:
        """End what runs with `EngineClosedError`, and let all go."""


class ModelText(Protocol):
    """What a model's ids stand for."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, as transformers has it."""

    @property
    def vocabulary(self) -> Vocabulary:
        """The exact bytes of every id."""

    @property
    def bos_token_id(self) -> int | None:
        """What stands before a text; None where the model has no such token."""


@final
class EngineRows:
    """Implements `RowSource` on an engine of this program: a row is a request that ends with one."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded
        self._engine = loaded.engine
        self._requests = Requests(loaded.engine)

    @property
    def is_busy(self) -> bool:
        """Whether requests run or wait."""
        return self._engine.is_busy

    def capabilities(self) -> Capabilities:
        """What the engine can do."""
        return self._engine.capabilities()

    def loads(self, lora: str | None) -> tuple[int, int]:
        """As `RowSource.loads`."""
        return 0 if lora is None else self._engine.lora_number(lora), self._engine.weights_number

    def list_loras(self) -> dict[str, str]:
        """The loaded LoRA weights: name → path."""
        return self._engine.list_loras()

    def begin(self, prefixes: Sequence[Prefix]) -> list[BegunRow]:
        """Submit a request for each, which enter the same step where they fit.

        Raises:
            LogprobeError: the engine refuses one of them, or was closed.
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
        """Draw as one request.

        Raises:
            ParameterError: a value that cannot be served.
            EngineError: the engine failed, was closed, or gave the sample up.
        """
        admitted = self._requests.admit(prompt, params)
        self._engine.submit([admitted])
        output = await self._engine.result(admitted.request.request_id)
        if output.error is not None:
            raise output.error
        completion = output.outputs[0]
        if completion.finish_reason == "abort":
            raise RequestAbortedError("the engine gave the sample up")
        sample = SampledIds.before_stop(completion.token_ids, completion.finish_reason, params)
        if completion.logprobs is not None:
            sample.logprobs = completion.logprobs[: len(sample)]
        return sample

    def close(self) -> None:
        """End all requests and let the model go."""
        self._engine.close()

    def _begun(self, request_id: str, prefix: Prefix) -> BegunRow:
        loop = asyncio.get_running_loop()
        begun: BegunRow = loop.create_future()
        # Its task takes the output of an aborted row, too; cancelled before its first step, it would not.
        task = loop.create_task(self._follow(request_id, prefix, begun))
        begun.add_done_callback(partial(self._on_done, request_id, task))
        return begun

    async def _follow(self, request_id: str, prefix: Prefix, begun: BegunRow) -> None:
        try:
            output = await self._engine.result(request_id)
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait must hear of it
            settle(begun, error)
            return
        row = output.outputs[0].row
        if row is None:
            settle(begun, output.error or RequestAbortedError("the engine gave the ask up"))
        else:
            settle(begun, (prefix._replace(weights_number=output.weights_number), row))

    def _on_done(self, request_id: str, _task: asyncio.Task[None], begun: BegunRow) -> None:
        if begun.cancelled():
            self._engine.abort(request_id)


def settle(begun: BegunRow, outcome: tuple[Prefix, Row] | Exception) -> None:
    """End a row that was begun, unless it was given up."""
    if begun.done():
        return
    if isinstance(outcome, Exception):
        begun.set_exception(outcome)
    else:
        begun.set_result(outcome)
