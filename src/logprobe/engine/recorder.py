"""`Recorder`: what a step found → what is new of each request, and whether a sample has ended.

Before it: a step's numbers on the host. After it: messages to those who read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from logprobe.errors import NonFiniteLogitsError
from logprobe.records import LogprobsTensors
from logprobe.transport.messages import Delta, Finish

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from logprobe.engine.plan.sample import Sample
    from logprobe.engine.plan.scheduler import Span
    from logprobe.records import LogprobsLists, SamplerOutput
    from logprobe.records.store.columns import Array
    from logprobe.text.edge import TextEdge


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
        scored: Iterable[tuple[Span, LogprobsLists]],
        samples: Sequence[Sample],
        output: SamplerOutput | None,
    ) -> list[Delta]:
        """Everything that a step found, one delta a sample; `output` holds a row for each of `samples`."""
        deltas: dict[Sample, Delta] = {}
        for span, rows in scored:
            self._add_prompt_rows(_delta_of(span.sample, deltas), span, rows)
        if output is not None:
            self._add_tokens(samples, output, deltas)
        for sample, delta in deltas.items():
            delta.finish = sample.end
        return list(deltas.values())

    def end(self, samples: Iterable[Sample]) -> list[Delta]:
        """That these samples have ended, and nothing else."""
        return [
            Delta(request_id=sample.request.request_id, index=sample.index, finish=sample.end)
            for sample in samples
        ]

    def _add_prompt_rows(self, delta: Delta, span: Span, rows: LogprobsLists) -> None:
        sample = span.sample
        if not rows.is_valid.all():
            position = span.start + 1 + int(rows.is_valid.argmin())
            self._fail(sample, f"prompt position {position}")
            return
        delta.prompt = rows
        if not sample.wants_sample and span.end == sample.num_prompt_rows:
            sample.finish(Finish("length"))

    def _add_tokens(
        self, samples: Sequence[Sample], output: SamplerOutput, deltas: dict[Sample, Delta]
    ) -> None:
        assert output.is_valid is not None
        is_valid, token_ids = output.is_valid.tolist(), output.sampled_token_ids.tolist()
        raw, processed = (
            _Cutter(output.logprobs, output.logprobs_rows),
            _Cutter(output.processed_logprobs, output.processed_rows),
        )
        for row, sample in enumerate(samples):
            delta = _delta_of(sample, deltas)
            if sample.is_finished:
                continue
            if not is_valid[row]:
                self._fail(sample, f"position {sample.num_tokens}")
            elif row in output.whole_rows:
                delta.row = output.whole_rows[row]
                sample.finish(Finish("length"))
            else:
                delta.raw, delta.processed = raw.row(row), processed.row(row)
                delta.token_ids = [token_ids[row]]
                delta.effects, sample.effects = sample.effects, None
                sample.append_token(token_ids[row])
                self._check_end(sample, token_ids[row])

    def _check_end(self, sample: Sample, token_id: int) -> None:
        params = sample.request.params
        if token_id in params.stop_token_ids:
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
    """Cuts the rows of single samples out of a step's, each as wide as it was asked."""

    def __init__(self, lists: LogprobsLists | LogprobsTensors | None, rows: Array | None) -> None:
        assert not isinstance(lists, LogprobsTensors), "a step's numbers are on the host by now"
        self._lists = lists
        self._rows: list[int] = [] if rows is None else rows.tolist()
        self._ks: list[int] = [] if lists is None else lists.num_logprobs.tolist()

    def row(self, index: int) -> LogprobsLists | None:
        """The row of one sample; None where it asked for none."""
        if self._lists is None or (row := self._rows[index]) < 0:
            return None
        return self._lists.rows(row, row + 1, self._ks[row])


def _delta_of(sample: Sample, deltas: dict[Sample, Delta]) -> Delta:
    if sample not in deltas:
        deltas[sample] = Delta(request_id=sample.request.request_id, index=sample.index)
    return deltas[sample]
