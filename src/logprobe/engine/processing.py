"""`Processing`: the logits processors of one engine, sequence by sequence.

Before it: the scheduler's samples and their raw logits. After it: the sampler, which draws from what the
processors left, and the record of failures and effects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from logprobe.errors import ProcessorError
from logprobe.processors.batch import BatchRow
from logprobe.processors.pipeline import Pipeline

if TYPE_CHECKING:
    from collections.abc import Iterator
    from collections.abc import Sequence as Items

    from torch import Tensor

    from logprobe.config import EngineConfig
    from logprobe.engine.plan.sample import Sequence
    from logprobe.processors.effects import ProcessorEffect, RowEffect
    from logprobe.processors.interface import ModelFacts
    from logprobe.processors.pipeline import ProcessedRows
    from logprobe.records import LogprobsTensors
    from logprobe.sampling import SamplingParams
    from logprobe.sampling.sampler import SampledRows


class Processing:
    """Puts the sequences that have processors first, runs them, and tells each what became of its row."""

    def __init__(self, config: EngineConfig, model: ModelFacts) -> None:
        self.pipeline = Pipeline(config, model)

    def check(self, params: SamplingParams) -> None:
        """Raise `ParameterError` where the processors' arguments can never be served; from any thread."""
        self.pipeline.check(params)

    def open(self, sequence: Sequence, number: int) -> None:
        """Find the processors that concern a new sequence of the engine's `number`-th request."""
        request = sequence.request
        sequence.output.explanations = [] if request.params.explain else None
        row = BatchRow(
            request_id=request.request_id,
            args=None,
            prompt_token_ids=request.prompt_token_ids,  # type: ignore[arg-type]  # reads like a sequence
            output_token_ids=sequence.output.token_ids,
            params=request.params,
            sample=sequence.output.index,
            serial=number,
        )
        sequence.active = self.pipeline.open(row)

    def prepare(self, sequences: Items[Sequence]) -> None:
        """Tell the processors whose logits come next; before the forward pass."""
        self.pipeline.prepare([sequence.active for sequence in sequences if sequence.active is not None])

    def chunks(self, sequences: list[Sequence], size: int) -> Iterator[list[Sequence]]:
        """Cut a step's sequences into chunks of `size`; all that have processors come first, in one chunk."""
        active = [sequence for sequence in sequences if sequence.active is not None]
        if active:
            sequences = active + [sequence for sequence in sequences if sequence.active is None]
        start = 0
        while start < len(sequences):
            end = max(start + size, len(active))
            yield sequences[start:end]
            start = end

    def apply(self, chunk: list[Sequence], logits: Tensor) -> ProcessedRows | None:
        """Run the processors on the rows of a chunk that have any: its first ones."""
        num_active = sum(sequence.active is not None for sequence in chunk)
        return self.pipeline.apply(logits[:num_active]) if num_active else None

    def record(
        self, chunk: list[Sequence], logits: Tensor, run: ProcessedRows | None, rows: SampledRows
    ) -> None:
        """Fail the sequences that a processor failed, and keep the effects of the others."""
        for row, sequence in enumerate(chunk):
            if run is not None and row < len(run.logits):
                error = run.errors.get(row) or self._dead_end(sequence, row, logits, rows)
                if error is not None:
                    sequence.output.error = error
                    sequence.finish("error")
                    continue
            if sequence.output.explanations is not None and rows.is_valid[row]:
                effects = run.effects.get(row, []) if run is not None else []
                sequence.output.explanations.append(_explained(effects, rows, row))

    def _dead_end(
        self, sequence: Sequence, row: int, logits: Tensor, rows: SampledRows
    ) -> ProcessorError | None:
        """Several processors may leave no token where each alone leaves some."""
        if rows.is_valid[row] or not bool(logits[row].amax().isfinite()):
            return None
        name = sequence.request.request_id
        return ProcessorError(self.pipeline.names(row), f"failed request {name!r}: no token is left possible")


def _explained(effects: list[RowEffect], rows: SampledRows, row: int) -> list[ProcessorEffect]:
    listed = {int(rows.token_ids[row])}
    for tensors, places in ((rows.raw, rows.raw_rows), (rows.processed, rows.processed_rows)):
        if tensors is not None and row in places:
            listed.update(_listed(tensors, places[row]))
    return [effect.among(listed) for effect in effects]


def _listed(tensors: LogprobsTensors, place: int) -> list[int]:
    width = int(tensors.num_logprobs[place]) + 1
    ids: list[int] = tensors.token_ids[place, :width].tolist()
    if tensors.given is not None:
        start, end = tensors.given.offsets[place : place + 2].tolist()
        ids += tensors.given.token_ids[start:end].tolist()
    return ids
