"""`Recorder`: what a step found → the containers of each request, and whether a sample has ended.

Before it: arrays of one step. After it: `RequestOutput`, which the front ends hand on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from logprobe.engine.prompt_rows import cut_given
from logprobe.errors import NonFiniteLogitsError
from logprobe.records import FlatLogprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from logprobe.engine.plan.sample import Sample
    from logprobe.engine.plan.scheduler import Span
    from logprobe.engine.prompt_rows import ScoredRows
    from logprobe.engine.request import RequestOutput
    from logprobe.records import LogprobsInfo, LogprobsTensors
    from logprobe.records.info import Stage
    from logprobe.sampling import SamplingParams
    from logprobe.sampling.sampler import SampledRows
    from logprobe.text.edge import TextEdge

STAGES: dict[str, tuple[Stage, ...]] = {
    "raw_logprobs": ("raw",),
    "processed_logprobs": ("processed",),
    "both": ("raw", "processed"),
}


class Describer:
    """Describes the numbers of one engine's requests; `source` names the engine, model and dtype."""

    def __init__(self, source: LogprobsInfo, vocab_size: int) -> None:
        self._source = source
        self._vocab_size = vocab_size

    def prompt(self, params: SamplingParams) -> LogprobsInfo:
        """Of prompt positions: always the model's own distribution."""
        return self._of(params.prompt_logprobs, stages=("raw",))

    def completion(self, params: SamplingParams, stages: tuple[Stage, ...]) -> LogprobsInfo:
        """Of generated positions at these stages."""
        if "processed" not in stages:
            return self._of(params.logprobs, stages=stages)
        return self._of(
            params.logprobs,
            stages=stages,
            temperature=params.temperature,
            top_k=params.top_k if params.top_k > 0 else None,
            top_p=params.top_p if params.top_p < 1 else None,
            min_p=params.min_p if params.min_p > 0 else None,
        )

    def request(self, params: SamplingParams) -> LogprobsInfo | None:
        """Of a whole output: its completions' numbers, or else its prompt's; None where none are asked."""
        if params.logprobs is not None:
            return self.completion(params, STAGES[params.logprobs_mode])
        return None if params.prompt_logprobs is None else self.prompt(params)

    def _of(self, asked: int | None, **fields: Any) -> LogprobsInfo:
        assert asked is not None, "only what was asked is described"
        delivered = self._vocab_size if asked == -1 else min(asked, self._vocab_size)
        return msgspec.structs.replace(
            self._source, num_logprobs_asked=asked, num_logprobs=delivered, **fields
        )


WholeRows: TypeAlias = "dict[int, NDArray[np.float32]]"
"""Row of a chunk → its log-softmax, (vocabulary,) nats."""


class Recorder:
    """Fills containers; looks up a token's bytes only where a stop string is to be found."""

    def __init__(self, text: TextEdge, eos_token_ids: frozenset[int], describer: Describer) -> None:
        self._text = text
        self._eos_token_ids = eos_token_ids
        self._describer = describer

    def open(self, sample: Sample, output: RequestOutput) -> None:
        """Give a new sample the containers that its request asks for."""
        params = sample.request.params
        output.info = self._describer.request(params)
        if params.prompt_logprobs is not None and sample.output.index == 0:
            first = [None] if sample.request.first_scored == 1 else []
            info = self._describer.prompt(params)
            sample.prompt_logprobs = output.prompt_logprobs = self._container(info, first)
        if params.logprobs is not None:
            first_stage, *more = STAGES[params.logprobs_mode]
            sample.output.logprobs = self._container(self._describer.completion(params, (first_stage,)))
            sample.output.cumulative_logprob = 0.0
            for stage in more:
                info = self._describer.completion(params, (stage,))
                sample.output.processed_logprobs = self._container(info)
        if params.max_tokens == 0 and sample.num_prompt_rows == 0:
            sample.finish("length")

    def add_prompt_rows(self, span: Span, rows: ScoredRows) -> None:
        """Record a span of prompt positions; a prompt that is only scored ends with its last."""
        sample = span.sample
        assert sample.prompt_logprobs is not None
        if not rows.is_valid.all():
            position = span.start + 1 + int(rows.is_valid.argmin())
            self._fail(sample, f"prompt position {position}")
            return
        params = sample.request.params
        sample.prompt_logprobs.append_rows(
            rows.token_ids,
            rows.logprobs,
            rows.ranks,
            entropy=rows.entropy if params.entropy else None,
            given=rows.given if params.logprob_token_ids else None,
        )
        if not sample.wants_sample and span.end == sample.num_prompt_rows:
            sample.finish("length")

    def add_tokens(self, samples: Sequence[Sample], rows: SampledRows, whole: WholeRows) -> None:
        """Record one drawn token a sample, or its whole distribution in place of one."""
        raw = None if rows.raw is None else _HostRows(rows.raw)
        processed = None if rows.processed is None else _HostRows(rows.processed)
        for row, sample in enumerate(samples):
            if sample.is_finished:
                continue
            if not rows.is_valid[row]:
                self._fail(sample, f"position {sample.num_tokens}")
                continue
            if row in whole:
                whole[row].flags.writeable = False
                sample.output.row = whole[row]
                sample.finish("length")
                continue
            if raw is not None and row in rows.raw_rows:
                _record_raw(sample, raw, rows.raw_rows[row])
            if processed is not None and row in rows.processed_rows:
                _record_processed(sample, processed, rows.processed_rows[row])
            token_id = int(rows.token_ids[row])
            # After its numbers, so that a reader on another thread who sees the token finds them too.
            sample.append_token(token_id)
            self._check_end(sample, token_id)

    def _check_end(self, sample: Sample, token_id: int) -> None:
        params = sample.request.params
        if token_id in params.stop_token_ids:
            sample.finish("stop", token_id)
        elif token_id in self._eos_token_ids and not params.ignore_eos:
            sample.finish("stop")
        elif (
            sample.stop_matcher
            and (hit := sample.stop_matcher.feed(self._text.bytes_of([token_id])))
            and sample.num_generated >= params.min_tokens
        ):
            sample.output.num_text_bytes = hit[1]
            sample.finish("stop", hit[0])
        elif sample.num_tokens == sample.max_len:
            sample.finish("length")

    def _container(self, info: LogprobsInfo, positions: Sequence[None] = ()) -> FlatLogprobs:
        return FlatLogprobs(positions, table=self._text.vocabulary, info=info)

    @staticmethod
    def _fail(sample: Sample, where: str) -> None:
        sample.output.error = NonFiniteLogitsError(
            f"the model gave NaN or +inf, or nothing but -inf, at {where} of request "
            f"{sample.request.request_id!r}; check the weights and the dtype"
        )
        sample.finish("error")


class _HostRows:
    """One step's numbers as arrays and lists: reading a tensor row by row costs microseconds each time."""

    def __init__(self, tensors: LogprobsTensors) -> None:
        self.tensors = tensors
        self.token_ids, self.logprobs = tensors.token_ids.numpy(), tensors.logprobs.numpy()
        self.ranks = tensors.ranks.numpy()
        self.entropy = None if tensors.entropy is None else tensors.entropy.numpy()
        self.num_logprobs: list[int] = tensors.num_logprobs.tolist()
        self.chosen: list[float] = tensors.logprobs[:, 0].tolist()

    def append_to(self, container: FlatLogprobs, row: int, params: SamplingParams) -> None:
        """Append what a request asked of one row."""
        width = self.num_logprobs[row] + 1
        # Other rows of the step may have asked for more than this one.
        entropy = self.entropy if params.entropy else None
        container.append_rows(
            self.token_ids[row : row + 1, :width],
            self.logprobs[row : row + 1, :width],
            self.ranks[row : row + 1],
            entropy=None if entropy is None else entropy[row : row + 1],
            given=cut_given(self.tensors, row, row + 1) if params.logprob_token_ids else None,
        )


def _record_raw(sample: Sample, rows: _HostRows, row: int) -> None:
    output, params = sample.output, sample.request.params
    output.raw_logprob = (output.raw_logprob or 0.0) + rows.chosen[row]
    if output.logprobs is not None and params.logprobs_mode != "processed_logprobs":
        rows.append_to(output.logprobs, row, params)
        output.cumulative_logprob = output.raw_logprob


def _record_processed(sample: Sample, rows: _HostRows, row: int) -> None:
    output, params = sample.output, sample.request.params
    is_alone = params.logprobs_mode == "processed_logprobs"
    container = output.logprobs if is_alone else output.processed_logprobs
    assert container is not None
    rows.append_to(container, row, params)
    if is_alone:
        output.cumulative_logprob = (output.cumulative_logprob or 0.0) + rows.chosen[row]
