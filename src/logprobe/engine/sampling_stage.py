"""`SamplingStage`: samples a token from each row of a step's logits, and computes log-probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from logprobe.kernels.extraction.api import extract
from logprobe.kernels.extraction.head import default_chunk_rows
from logprobe.kernels.placement import as_rows
from logprobe.processors.batch import BatchRow
from logprobe.processors.pipeline import NO_ARGS, Pipeline
from logprobe.records.digests import digest_ids
from logprobe.records.rows import HostRows, host_array, on_host
from logprobe.sampling import Sampler

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logprobe.config import EngineConfig
    from logprobe.engine.plan.sample import Sample, SampleRow
    from logprobe.errors import ConflictingParametersError
    from logprobe.kernels.placement import Rows
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
        self._num_seen = 0  # rows that processors see: the active ones, or all if a processor sees all rows
        self.chunk_rows = default_chunk_rows(model.vocab_size, config.device.partition(":")[0])

    def admit(self, params: SamplingParams) -> dict[int, Any]:
        """Validate a request's processor arguments; thread-safe.

        Returns:
            The parsed arguments by index of the pipeline stage; empty if no processor applies.

        Raises:
            ParameterError: the arguments are invalid.
        """
        is_asked = params.asks_processors or self.pipeline.applies_to_all
        return self.pipeline.admit(params) if is_asked else {}

    def open(self, sample: Sample, number: int, args: dict[int, Any]) -> None:
        """Attach the processors that apply to a new sample.

        Args:
            sample: the sample.
            number: serial number of its request.
            args: the result of `admit`.
        """
        sample.active = self.pipeline.open(_row(sample, sample.output_token_ids, number), args)
        sample.is_plain = False

    def why_no_drafts(self, sample: Sample) -> str | None:
        """Return why drafts cannot be used for a sample (a processor keeps state); None if they can."""
        names = [] if sample.active is None else self.pipeline.keeping_state(sample.active)
        return f"{', '.join(names)} keeps state" if names else None

    def prepare(self, rows: list[SampleRow]) -> list[SampleRow]:
        """Announce the rows of a step to the processors; must be called before the forward pass.

        Returns:
            The rows in the order that `chunks` and `draw` expect: rows with processors first.
        """
        active = [row for row in rows if row.sample.active is not None]
        # If only the last step had such rows, call the pipeline without any, so that it sees they are gone.
        if active or self._num_active:
            samples = [_rows_of(row) for row in active]
            is_seen = self.pipeline.sees_all(samples)
            seen = [_bystander(row) for row in rows if row.sample.active is None] if is_seen else []
            self._num_active, self._num_seen = len(active), len(active) + len(seen)
            self.pipeline.prepare(samples, seen)
        return active + [row for row in rows if row.sample.active is None] if active else rows

    def chunks(self, rows: list[SampleRow]) -> Iterator[slice]:
        """Cut the rows that `prepare` returned into chunks; all rows that processors see are in the first."""
        start = 0
        while start < len(rows):
            end = max(start + self.chunk_rows, self._num_seen)
            yield slice(start, end)
            start = end

    def draw(self, chunk: list[SampleRow], logits: Rows) -> SampledRows:
        """Sample a token from each row of logits and compute the requested log-probabilities.

        Args:
            chunk: rows of one slice of `chunks`.
            logits: (rows, V) float32, an array or a tensor; not modified.
        """
        logits = as_rows(logits)
        params = [row.sample.request.params for row in chunk]
        uniforms = np.array([row.sample.uniform(row.ahead) for row in chunk])
        if all(row.sample.is_plain for row in chunk):
            return self._sampler.draw(logits, params, uniforms)
        changed = self._apply(chunk, logits)
        forced = [row.sample.forced_token_id(row.ahead) for row in chunk]
        named = None
        if any(asked.names_positions or asked.digest for asked in params):
            named = [_named_ids(row, logits.shape[1]) for row in chunk]
        output = self._sampler.draw(
            logits, params, uniforms, None if changed is None else changed.logits, forced, named
        )
        if any(asked.explain for asked in params):
            output = output.to_host()  # explanations cover the tokens listed in the rows
        self._set_errors_and_effects(chunk, logits, changed, output)
        output.whole_rows.update(_whole_rows(chunk, logits))
        return output

    def _apply(self, chunk: list[SampleRow], logits: Rows) -> ProcessedRows | None:
        """Run the processors on the rows that they see of a chunk; None if no row has active processors."""
        has_active = any(row.sample.active is not None for row in chunk)
        return self.pipeline.apply(logits[: self._num_seen]) if has_active else None

    def _set_errors_and_effects(
        self, chunk: list[SampleRow], logits: Rows, run: ProcessedRows | None, output: SampledRows
    ) -> None:
        """Set `error` on rows whose processors failed, and `effects` on the others if requested."""
        for index, row in enumerate(chunk):
            if run is not None and index < len(run.logits):
                row.error = run.errors.get(index) or self._dead_end(index, logits, output)
            if row.error is None and row.sample.request.params.explain and output.is_valid[index]:
                effects = run.effects.get(index, []) if run is not None else []
                row.effects = _explained(effects, output, index)

    def _dead_end(self, index: int, logits: Rows, output: SampledRows) -> ConflictingParametersError | None:
        """Return an error if the processors together removed every token of a row, else None."""
        if output.is_valid[index] or not np.isfinite(host_array(logits[index].max())):
            return None
        return self.pipeline.dead_end(index)


def _named_ids(row: SampleRow, vocab_size: int) -> NamedIds:
    """Return the token ids to report for this row: those that the request names, and those of its digest.

    The request's per-position ids do not count if they are for the prompt. None if there are no ids.
    """
    params, position = row.sample.request.params, row.position - row.sample.num_prompt
    is_of_prompt = params.names_positions and params.prompt_logprobs is not None
    ids = None if is_of_prompt else params.named_ids_at(position)
    if not params.digest:
        return ids
    return [
        *(() if ids is None else ids),
        *digest_ids(row.sample.request.prompt_token_ids, position, vocab_size),
    ]


def _rows_of(row: SampleRow) -> ActiveSample:
    """Return the row's processors, in the state that they have after all drafts before the row."""
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


def _whole_rows(rows: list[SampleRow], logits: Rows) -> dict[int, Array]:
    """Return row index → (V,) float32 log-probabilities in nats, for requests with `wants_row`.

    The arrays are read-only copies.
    """
    wanted = [index for index, row in enumerate(rows) if row.sample.request.wants_row]
    if not wanted:
        return {}
    # Our own log-normalizer: a plain float32 log_softmax is off by 1e-5 on wide vocabularies.
    lse = extract(logits[wanted], [0] * len(wanted), 0).lse
    with np.errstate(invalid="ignore"):  # of invalid rows
        (table,) = on_host([logits[wanted] - lse[:, None]])
    whole = {}
    for index, values in zip(wanted, table, strict=True):
        whole[index] = values.copy()
        whole[index].flags.writeable = False
    return whole
