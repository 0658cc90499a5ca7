"""`Drawing`: a step's rows of logits → a token each, and the numbers asked about them.

Before it: the output head, this engine's or another's. After it: `Recorder`.
"""

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
    from logprobe.engine.plan.sample import Draw, Sample
    from logprobe.errors import ConflictingParametersError
    from logprobe.processors.effects import ProcessorEffect, RowEffect
    from logprobe.processors.interface import ModelFacts
    from logprobe.processors.pipeline import ActiveSample, ProcessedRows
    from logprobe.records.store.columns import Array
    from logprobe.sampling import SamplingParams
    from logprobe.sampling.params import NamedIds
    from logprobe.sampling.sampler import SampledRows


class Drawing:
    """Runs the sampler on rows of logits, after the processors of those requests that have any."""

    def __init__(self, config: EngineConfig, model: ModelFacts) -> None:
        self.pipeline = Pipeline(config, model)
        self._sampler = Sampler()
        self._num_active = 0  # draws with processors in the step that was prepared last
        self._num_seen = 0  # those, and the ones after them that a processor looks at
        self.chunk_rows = default_chunk_rows(model.vocab_size, config.device)

    def admit(self, params: SamplingParams) -> dict[int, Any]:
        """What the processors make of a request's arguments, or `ParameterError`; from any thread."""
        is_asked = params.asks_processors or self.pipeline.applies_to_all
        return self.pipeline.admit(params) if is_asked else {}

    def open(self, sample: Sample, number: int, args: dict[int, Any]) -> None:
        """Find the processors that concern a new sample of the engine's `number`-th request."""
        sample.active = self.pipeline.open(_row(sample, sample.output_token_ids, number), args)
        sample.is_plain = False

    def why_no_drafts(self, sample: Sample) -> str | None:
        """Which of a sample's processors keep state, so that no draft of its tokens can be verified."""
        names = [] if sample.active is None else self.pipeline.keeping_state(sample.active)
        return f"{', '.join(names)} keeps state" if names else None

    def prepare(self, draws: list[Draw]) -> list[Draw]:
        """Tell the processors whose logits come next; before the forward pass.

        The draws come back in their order for `chunks`: first those that have processors.
        """
        active = [draw for draw in draws if draw.sample.active is not None]
        # Who was in the last step and is in this one no more has left, which processors are told.
        if active or self._num_active:
            samples = [_rows_of(draw) for draw in active]
            is_seen = self.pipeline.sees_all(samples)
            seen = [_bystander(draw) for draw in draws if draw.sample.active is None] if is_seen else []
            self._num_active, self._num_seen = len(active), len(active) + len(seen)
            self.pipeline.prepare(samples, seen)
        return active + [draw for draw in draws if draw.sample.active is None] if active else draws

    def chunks(self, draws: list[Draw]) -> Iterator[slice]:
        """Cut a step's draws, as `prepare` gave them, into chunks; the first has all that processors see."""
        start = 0
        while start < len(draws):
            end = max(start + self.chunk_rows, self._num_seen)
            yield slice(start, end)
            start = end

    def draw(self, chunk: list[Draw], logits: Tensor) -> SampledRows:
        """A token for each row of (rows, V) float32 logits, which stay raw; see `chunks`."""
        params = [draw.sample.request.params for draw in chunk]
        uniforms = np.array([draw.sample.uniform(draw.ahead) for draw in chunk])
        if all(draw.sample.is_plain for draw in chunk):
            return self._sampler.draw(logits, params, uniforms)
        changed = self._apply(chunk, logits)
        forced = [draw.sample.forced_token_id(draw.ahead) for draw in chunk]
        named = (
            [_named_ids(draw) for draw in chunk] if any(asked.names_positions for asked in params) else None
        )
        output = self._sampler.draw(
            logits, params, uniforms, None if changed is None else changed.logits, forced, named
        )
        if any(asked.explain for asked in params):
            output = output.to_host()  # an explanation names the tokens that the rows list
        self._note_processed(chunk, logits, changed, output)
        output.whole_rows.update(_whole_rows(chunk, logits))
        return output

    def _apply(self, chunk: list[Draw], logits: Tensor) -> ProcessedRows | None:
        """Run the processors on the rows of a chunk that have any: its first ones."""
        has_active = any(draw.sample.active is not None for draw in chunk)
        return self.pipeline.apply(logits[: self._num_seen]) if has_active else None

    def _note_processed(
        self, chunk: list[Draw], logits: Tensor, run: ProcessedRows | None, output: SampledRows
    ) -> None:
        """Note which draws a processor failed, and the effects on the others."""
        for row, draw in enumerate(chunk):
            if run is not None and row < len(run.logits):
                draw.error = run.errors.get(row) or self._dead_end(row, logits, output)
            if draw.error is None and draw.sample.request.params.explain and output.is_valid[row]:
                effects = run.effects.get(row, []) if run is not None else []
                draw.effects = _explained(effects, output, row)

    def _dead_end(self, row: int, logits: Tensor, output: SampledRows) -> ConflictingParametersError | None:
        """Return an error where several processors leave no token and each alone leaves some."""
        if output.is_valid[row] or not bool(logits[row].amax().cpu().isfinite()):
            return None
        return self.pipeline.dead_end(row)


def _named_ids(draw: Draw) -> NamedIds:
    """The ids that a token to draw reports; those of a prompt's positions are no token's."""
    params = draw.sample.request.params
    if params.names_positions and params.prompt_logprobs is not None:
        return None
    return params.named_ids_at(draw.position - draw.sample.num_prompt)


def _rows_of(draw: Draw) -> ActiveSample:
    """The processors' rows of a draw: as they are, or as they are once the drafts before it have come."""
    active = draw.sample.active
    assert active is not None
    return active.after(draw.sample.draft_ids[: draw.ahead]) if draw.ahead else active


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


def _bystander(draw: Draw) -> BatchRow:
    """The row of a draw without processors, for one that looks at all of them."""
    ids = draw.sample.output_token_ids
    return _row(draw.sample, [*ids, *draw.sample.draft_ids[: draw.ahead]] if draw.ahead else ids)


def _explained(effects: list[RowEffect], output: SampledRows, row: int) -> list[ProcessorEffect]:
    listed = {output.sampled_token_ids[row]}
    width = output.num_logprobs[row] + 1
    reports = ((output.logprobs, output.logprobs_rows), (output.processed_logprobs, output.processed_rows))
    for rows, indices in reports:
        if isinstance(rows, HostRows) and (index := indices[row]) >= 0:
            listed.update(rows.token_ids[index, :width].tolist())
            if rows.given is not None:
                listed.update(rows.given.rows(index, index + 1).token_ids.tolist())
    return [effect.among(listed) for effect in effects]


def _whole_rows(draws: list[Draw], logits: Tensor) -> dict[int, Array]:
    """The log-softmax of the rows whose requests want it; each array is its own, not a view of the batch."""
    rows = [row for row, draw in enumerate(draws) if draw.sample.request.wants_row]
    if not rows:
        return {}
    # Our own log-normaliser: torch's float32 log_softmax is off by 1e-5 on wide vocabularies.
    lse = extract(logits[rows], [0] * len(rows), 0).lse
    (table,) = on_host([logits[rows] - lse[:, None]])
    whole = {}
    for row, values in zip(rows, table, strict=True):
        whole[row] = values.copy()
        whole[row].flags.writeable = False
    return whole
