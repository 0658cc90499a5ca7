"""`SamplingStage`: draws a token from each row of a step's logits and computes the requested numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from logprobe.kernels import extract
from logprobe.kernels.extraction.head import default_chunk_rows
from logprobe.processors.batch import BatchRow
from logprobe.processors.pipeline import NO_ARGS, Pipeline
from logprobe.records.rows import HostRows, on_host
from logprobe.sampling import Sampler

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from logprobe.config import EngineConfig
    from logprobe.engine.plan.sample import Sample, SampleRow
    from logprobe.errors import ConflictingParametersError
    from logprobe.processors.effects import ProcessorEffect, RowEffect
    from logprobe.processors.interface import ModelFacts
    from logprobe.processors.pipeline import ActiveSample, ProcessedRows
    from logprobe.records.store.columns import Array
    from logprobe.sampling import SamplingParams
    from logprobe.sampling.params import NamedIds
    from logprobe.sampling.sampler import SampledRows


class SamplingStage:
    """Runs the logits processors, then the sampler, on rows of logits."""

    def __init__(self, config: EngineConfig, model: ModelFacts) -> None:
        self.pipeline = Pipeline(config, model)
        self._sampler = Sampler()
        self._num_active = 0  # rows with processors in the last prepared step
        self._num_seen = 0  # these, plus the following rows if a processor looks at all rows
        self.chunk_rows = default_chunk_rows(model.vocab_size, config.device)

    def admit(self, params: SamplingParams) -> dict[int, Any]:
        """Validate a request's processor arguments; thread-safe.

        Returns:
            The typed arguments by pipeline stage.

        Raises:
            ParameterError: invalid arguments.
        """
        is_asked = params.asks_processors or self.pipeline.applies_to_all
        return self.pipeline.admit(params) if is_asked else {}

    def open(self, sample: Sample, number: int, args: dict[int, Any]) -> None:
        """Find the processors that apply to a new sample; `number` is its request's serial number."""
        sample.active = self.pipeline.open(_row(sample, sample.output_token_ids, number), args)
        sample.is_plain = False

    def why_no_drafts(self, sample: Sample) -> str | None:
        """Return why a sample's drafts cannot be verified: stateful processors; None if it has none."""
        names = [] if sample.active is None else self.pipeline.keeping_state(sample.active)
        return f"{', '.join(names)} keeps state" if names else None

    def prepare(self, rows: list[SampleRow]) -> list[SampleRow]:
        """Announce the rows of the next step to the processors; call it before the forward pass.

        Returns:
            The rows in the order that `chunks` and `draw` expect: those with processors first.
        """
        active = [row for row in rows if row.sample.active is not None]
        # Call the pipeline also if no row has processors now: it learns which samples have left.
        if active or self._num_active:
            samples = [_rows_of(row) for row in active]
            is_seen = self.pipeline.sees_all(samples)
            seen = [_bystander(row) for row in rows if row.sample.active is None] if is_seen else []
            self._num_active, self._num_seen = len(active), len(active) + len(seen)
            self.pipeline.prepare(samples, seen)
        return active + [row for row in rows if row.sample.active is None] if active else rows

    def chunks(self, rows: list[SampleRow]) -> Iterator[slice]:
        """Cut the rows that `prepare` returned into chunks; the first has every row that processors see."""
        start = 0
        while start < len(rows):
            end = max(start + self.chunk_rows, self._num_seen)
            yield slice(start, end)
            start = end

    def draw(self, chunk: list[SampleRow], logits: Tensor) -> SampledRows:
        """Draw a token for each row of `logits`, (rows, V) float32, which is not modified; see `chunks`."""
        params = [row.sample.request.params for row in chunk]
        uniforms = np.array([row.sample.uniform(row.ahead) for row in chunk])
        if all(row.sample.is_plain for row in chunk):
            return self._sampler.draw(logits, params, uniforms)
        changed = self._apply(chunk, logits)
        forced = [row.sample.forced_token_id(row.ahead) for row in chunk]
        named = [_named_ids(row) for row in chunk] if any(asked.names_positions for asked in params) else None
        output = self._sampler.draw(
            logits, params, uniforms, None if changed is None else changed.logits, forced, named
        )
        if any(asked.explain for asked in params):
            output = output.to_host()  # explanations cover the tokens listed in the rows
        self._note_processed(chunk, logits, changed, output)
        output.whole_rows.update(_whole_rows(chunk, logits))
        return output

    def _apply(self, chunk: list[SampleRow], logits: Tensor) -> ProcessedRows | None:
        """Run the processors on the first rows of a chunk, those that they see."""
        has_active = any(row.sample.active is not None for row in chunk)
        return self.pipeline.apply(logits[: self._num_seen]) if has_active else None

    def _note_processed(
        self, chunk: list[SampleRow], logits: Tensor, run: ProcessedRows | None, output: SampledRows
    ) -> None:
        """Set `error` on rows that a processor failed, and `effects` on the others if requested."""
        for index, row in enumerate(chunk):
            if run is not None and index < len(run.logits):
                row.error = run.errors.get(index) or self._dead_end(index, logits, output)
            if row.error is None and row.sample.request.params.explain and output.is_valid[index]:
                effects = run.effects.get(index, []) if run is not None else []
                row.effects = _explained(effects, output, index)

    def _dead_end(self, index: int, logits: Tensor, output: SampledRows) -> ConflictingParametersError | None:
        """Return an error if several processors together leave no token but each alone leaves some."""
        if output.is_valid[index] or not bool(logits[index].amax().cpu().isfinite()):
            return None
        return self.pipeline.dead_end(index)


def _named_ids(row: SampleRow) -> NamedIds:
    """Return the ids that a drawn token reports; None if per-position ids belong to the prompt."""
    params = row.sample.request.params
    if params.names_positions and params.prompt_logprobs is not None:
        return None
    return params.named_ids_at(row.position - row.sample.num_prompt)


def _rows_of(row: SampleRow) -> ActiveSample:
    """Return the processors of a row as if the drafts before it had been generated."""
    active = row.sample.active
    assert active is not None
    return active.after(row.sample.draft_ids[: row.ahead]) if row.ahead else active


def _row(sample: Sample, output_token_ids: list[int], number: int = -1) -> BatchRow:
    request = sample.request
    return BatchRow(
        request_id=request.request_id,
        args=NO_ARGS,
        prompt_token_ids=request.prompt_token_ids,  # type: ignore[arg-type]  # reads like a sample
        output_token_ids=output_token_ids,
        params=request.params,
        sample=sample.index,
        serial=number,
    )


def _bystander(row: SampleRow) -> BatchRow:
    """Return the `BatchRow` of a sample without processors, for processors that look at all samples."""
    ids = row.sample.output_token_ids
    return _row(row.sample, [*ids, *row.sample.draft_ids[: row.ahead]] if row.ahead else ids)


def _explained(effects: list[RowEffect], output: SampledRows, index: int) -> list[ProcessorEffect]:
    listed = {output.sampled_token_ids[index]}
    width = output.num_logprobs[index] + 1
    reports = ((output.logprobs, output.logprobs_rows), (output.processed_logprobs, output.processed_rows))
    for rows, places in reports:
        if isinstance(rows, HostRows) and (place := places[index]) >= 0:
            listed.update(rows.token_ids[place, :width].tolist())
            if rows.given is not None:
                listed.update(rows.given.rows(place, place + 1).token_ids.tolist())
    return [effect.among(listed) for effect in effects]


def _whole_rows(rows: list[SampleRow], logits: Tensor) -> dict[int, Array]:
    """Return the log-softmax, nats, of rows whose requests want it; arrays are copies, not views."""
    wanted = [index for index, row in enumerate(rows) if row.sample.request.wants_row]
    if not wanted:
        return {}
    # Our own log-normaliser: torch's float32 log_softmax is off by 1e-5 on wide vocabularies.
    lse = extract(logits[wanted], [0] * len(wanted), 0).lse
    (table,) = on_host([logits[wanted] - lse[:, None]])
    whole = {}
    for index, values in zip(wanted, table, strict=True):
        whole[index] = values.copy()
        whole[index].flags.writeable = False
    return whole
