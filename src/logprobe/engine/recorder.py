"""`Recorder`: what a step found → what is new of each request, and whether a sample has ended.

Before it: a step's tokens on the host. After it: messages to those who read. What the next step rests on is
settled by `record`; the numbers of the rows are only needed by `tell`, which may run beside the next step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

from logprobe.errors import NonFiniteLogitsError
from logprobe.transport.messages import Delta, Finish

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from logprobe.engine.plan.sample import Draw, Sample
    from logprobe.engine.plan.scheduler import Span
    from logprobe.records.rows import HostRows
    from logprobe.records.store.columns import Array
    from logprobe.sampling.sampled import SampledRows
    from logprobe.text.edge import TextEdge
    from logprobe.transport.messages import News


@dataclass(slots=True)
class StepNews:
    """What one step found: tokens and ends, and where the rows of the tokens are."""

    deltas: dict[Sample, Delta] = field(default_factory=dict)
    rows: list[tuple[Delta, int]] = field(default_factory=list)  # of the step's output, for its first token
    arrive: Callable[[], SampledRows] | None = None  # waits for that output; None: nothing was drawn
    others: Sequence[News] = ()  # of requests that were not in the step

    def drop(self, samples: Iterable[Sample]) -> None:
        """Say nothing of these."""
        dropped = [id(self.deltas.pop(sample)) for sample in samples if sample in self.deltas]
        self.rows = [(delta, row) for delta, row in self.rows if id(delta) not in dropped]


class Recorder:
    """Tells what is new; looks up a token's bytes only where a stop string is to be found."""

    def __init__(self, text: TextEdge, eos_token_ids: frozenset[int]) -> None:
        self._text = text
        self._eos_token_ids = eos_token_ids

    def open(self, sample: Sample) -> None:
        """End a new sample of which nothing is asked."""
        if not sample.wants_sample and sample.num_prompt_rows == 0:
            sample.finish(Finish("length"))

    def record(
        self,
        scored: Iterable[tuple[Span, HostRows]],
        draws: Sequence[Draw],
        parts: Sequence[SampledRows],
    ) -> StepNews:
        """What a step found, one delta a sample; the `parts` together hold a row for each of `draws`."""
        news = StepNews()
        for span, rows in scored:
            self._add_prompt_rows(_delta_of(span.sample, news), span, rows)
        self._add_tokens(draws, parts, news)
        for sample, delta in news.deltas.items():
            delta.finish = sample.end
            delta.drafts = sample.drafts if sample.is_finished else None
        return news

    @staticmethod
    def tell(news: StepNews) -> list[Delta]:
        """Everything that a step found, with the rows of its tokens; waits until these are on the host."""
        if news.arrive is not None:
            output = news.arrive()
            ks = output.num_logprobs.tolist()
            raw = _Cutter(output.raw_on_host, output.logprobs_rows, ks)
            processed = _Cutter(output.processed_logprobs, output.processed_rows, ks)
            for delta, row in news.rows:
                count = len(delta.token_ids)
                delta.raw, delta.processed = raw.rows(row, count), processed.rows(row, count)
        return list(news.deltas.values())

    def end(self, samples: Iterable[Sample]) -> list[Delta]:
        """That these samples have ended, and nothing else."""
        return [
            Delta(
                request_id=sample.request.request_id,
                index=sample.index,
                finish=sample.end,
                drafts=sample.drafts,
                weights_number=sample.weights_number,
            )
            for sample in samples
        ]

    def _add_prompt_rows(self, delta: Delta, span: Span, rows: HostRows) -> None:
        sample = span.sample
        if not rows.is_valid.all():
            position = span.start + 1 + int(rows.is_valid.argmin())
            self._fail(sample, f"prompt position {position}")
            return
        delta.prompt = rows
        if not sample.wants_sample and span.end == sample.num_prompt_rows:
            sample.finish(Finish("length"))

    def _add_tokens(self, draws: Sequence[Draw], parts: Sequence[SampledRows], news: StepNews) -> None:
        token_ids = chain.from_iterable(part.sampled_token_ids.tolist() for part in parts)
        whole_rows = chain.from_iterable(map(_drawn_rows, parts))
        for row, (draw, token_id, (is_valid, whole)) in enumerate(
            zip(draws, token_ids, whole_rows, strict=True)
        ):
            sample = draw.sample
            delta = _delta_of(sample, news)
            if not draw.is_right:
                continue
            if draw.error is not None:
                sample.fail(draw.error)
            elif not is_valid:
                self._fail(sample, f"position {sample.num_tokens}")
            elif whole is not None:
                delta.row = whole
                sample.finish(Finish("length"))
            else:
                if not delta.token_ids:
                    news.rows.append((delta, row))
                self._add_token(draw, token_id, delta)

    def _add_token(self, draw: Draw, token_id: int, delta: Delta) -> None:
        delta.token_ids.append(token_id)
        if draw.effects is not None:
            delta.effects = [*(delta.effects or ()), draw.effects]
        draw.sample.append_token(token_id)
        self._check_end(draw.sample, token_id)

    def _check_end(self, sample: Sample, token_id: int) -> None:
        params = sample.request.params
        if sample.request.forced_token_ids is not None:
            if sample.num_tokens == sample.max_len:
                sample.finish(Finish("length"))
        elif token_id in params.stop_token_ids:
            sample.finish(Finish("stop", token_id))
        elif token_id in self._eos_token_ids and not params.ignore_eos:
            sample.finish(Finish("stop"))
        elif (
            sample.stop_matcher
            and (hit := sample.stop_matcher.feed(self._text.bytes_of([token_id])))
            and sample.num_generated >= params.min_tokens
        ):
            sample.finish(Finish("stop", hit[0], hit[1]))
        elif sample.num_tokens == sample.max_len:
            sample.finish(Finish("length"))

    @staticmethod
    def _fail(sample: Sample, where: str) -> None:
        sample.fail(
            NonFiniteLogitsError(
                f"the model gave NaN or +inf, or nothing but -inf, at {where} of request "
                f"{sample.request.request_id!r}; check the weights and the dtype"
            )
        )


class _Cutter:
    """Cuts the rows of single samples out of a step's, as ranges of one block for each width asked for."""

    def __init__(self, whole: HostRows | None, places: Array, ks: list[int]) -> None:
        self._whole = whole
        self._places: list[int] = places.tolist()
        self._ks = ks
        self._blocks: dict[int, HostRows] = {}

    def rows(self, first: int, count: int) -> HostRows | None:
        """The rows of one sample, which lie together; None where it asked for none."""
        if self._whole is None or (place := self._places[first]) < 0:
            return None
        k = self._ks[first]
        if k not in self._blocks:
            self._blocks[k] = self._whole.narrowed(k)
        return self._blocks[k].rows(place, place + count)


def _drawn_rows(part: SampledRows) -> Iterable[tuple[bool, Array | None]]:
    """Whether each row is valid, and the whole distribution of those that want one."""
    return ((is_valid, part.whole_rows.get(row)) for row, is_valid in enumerate(part.is_valid.tolist()))


def _delta_of(sample: Sample, news: StepNews) -> Delta:
    if sample not in news.deltas:
        news.deltas[sample] = Delta(
            request_id=sample.request.request_id, index=sample.index, weights_number=sample.weights_number
        )
    return news.deltas[sample]
