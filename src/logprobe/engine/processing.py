"""`Processing`: the logits processors of one engine, sample by sample.

Before it: the scheduler's samples and their raw logits. After it: the sampler, which draws from what the
processors left, and the record of failures and effects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from logprobe.errors import ProcessorError
from logprobe.processors.batch import BatchRow
from logprobe.processors.pipeline import Pipeline

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from logprobe.config import EngineConfig
    from logprobe.engine.plan.sample import Sample
    from logprobe.processors.effects import ProcessorEffect, RowEffect
    from logprobe.processors.interface import ModelFacts
    from logprobe.processors.pipeline import ProcessedRows
    from logprobe.records import LogprobsTensors
    from logprobe.sampling import SamplingParams
    from logprobe.sampling.sampler import SampledRows


class Processing:
    """Puts the samples that have processors first, runs them, and tells each what became of its row."""

    def __init__(self, config: EngineConfig, model: ModelFacts) -> None:
        self.pipeline = Pipeline(config, model)

    def check(self, params: SamplingParams) -> None:
        """Raise `ParameterError` where the processors' arguments can never be served; from any thread."""
        self.pipeline.check(params)

    def open(self, sample: Sample, number: int) -> None:
        """Find the processors that concern a new sample of the engine's `number`-th request."""
        request = sample.request
        sample.output.explanations = [] if request.params.explain else None
        row = BatchRow(
            request_id=request.request_id,
            args=None,
            prompt_token_ids=request.prompt_token_ids,  # type: ignore[arg-type]  # reads like a sample
            output_token_ids=sample.output.token_ids,
            params=request.params,
            sample=sample.output.index,
            serial=number,
        )
        sample.active = self.pipeline.open(row)

    def prepare(self, samples: Sequence[Sample]) -> None:
        """Tell the processors whose logits come next; before the forward pass."""
        self.pipeline.prepare([sample.active for sample in samples if sample.active is not None])

    def chunks(self, samples: list[Sample], size: int) -> Iterator[list[Sample]]:
        """Cut a step's samples into chunks of `size`; all that have processors come first, in one chunk."""
        active = [sample for sample in samples if sample.active is not None]
        if active:
            samples = active + [sample for sample in samples if sample.active is None]
        start = 0
        while start < len(samples):
            end = max(start + size, len(active))
            yield samples[start:end]
            start = end

    def apply(self, chunk: list[Sample], logits: Tensor) -> ProcessedRows | None:
        """Run the processors on the rows of a chunk that have any: its first ones."""
        num_active = sum(sample.active is not None for sample in chunk)
        return self.pipeline.apply(logits[:num_active]) if num_active else None

    def record(
        self, chunk: list[Sample], logits: Tensor, run: ProcessedRows | None, rows: SampledRows
    ) -> None:
        """Fail the samples that a processor failed, and keep the effects of the others."""
        for row, sample in enumerate(chunk):
            if run is not None and row < len(run.logits):
                error = run.errors.get(row) or self._dead_end(sample, row, logits, rows)
                if error is not None:
                    sample.output.error = error
                    sample.finish("error")
                    continue
            if sample.output.explanations is not None and rows.is_valid[row]:
                effects = run.effects.get(row, []) if run is not None else []
                sample.output.explanations.append(_explained(effects, rows, row))

    def _dead_end(self, sample: Sample, row: int, logits: Tensor, rows: SampledRows) -> ProcessorError | None:
        """Several processors may leave no token where each alone leaves some."""
        if rows.is_valid[row] or not bool(logits[row].amax().isfinite()):
            return None
        name = sample.request.request_id
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
