"""`Recorder`: turns a step's results into one delta per sample, and detects finished samples.

A delta holds what a step adds to a sample's output. `record` does everything that the next step depends on;
the log-probabilities are read only by `StepDeltas.arrived`, which may run concurrently with the next step.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from logprobe.errors import NonFiniteLogitsError
from logprobe.records.rows import HostRows
from logprobe.transport.messages import Delta, Finish

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from logprobe.engine.plan.sample import Sample, SampleRow
    from logprobe.engine.plan.scheduler import Span
    from logprobe.records.rows import Send
    from logprobe.sampling.sampler import SampledRows
    from logprobe.text.edge import TextEdge
    from logprobe.transport.messages import Event


class Drawn(NamedTuple):
    """A row that a token was sampled from, and where to find the token and its log-probabilities."""

    row: SampleRow
    chunk: SampledRows
    chunk_row: int


@dataclass(slots=True)
class StepDeltas:
    """Deltas of a step by sample; their rows may still be in transfer to the host."""

    deltas: dict[Sample, Delta] = field(default_factory=dict)
    # For each sampled token with log-probabilities, in order: its delta, chunk, and row in the chunk.
    rows: list[tuple[Delta, SampledRows, int]] = field(default_factory=list)
    sent: list[SampledRows] = field(default_factory=list)  # chunks whose rows are in transfer
    others: Sequence[Event] = ()  # events of requests that were not in the step

    def send(self, send: Send | None) -> None:
        """Start copying the sampled tokens' rows to the host; `arrived` must be called once afterwards."""
        sent = {chunk: chunk.sent(send) for chunk in dict.fromkeys(chunk for _, chunk, _ in self.rows)}
        self.rows = [(delta, sent[chunk], row) for delta, chunk, row in self.rows]
        self.sent = [*sent.values()]

    def drop(self, samples: Iterable[Sample]) -> None:
        """Discard the deltas of these samples."""
        dropped = [self.deltas.pop(sample) for sample in samples if sample in self.deltas]
        self.rows = [row for row in self.rows if row[0] not in dropped]

    def arrived(self) -> list[Delta]:
        """Wait until all rows are on the host; return the deltas with their rows."""
        with ExitStack() as copies:
            for chunk in self.sent:  # collect every copy, even after an error; else later ones are blocked
                copies.callback(chunk.arrive)
        for (delta, chunk), run in groupby(self.rows, itemgetter(0, 1)):
            rows = [row for _, _, row in run]
            raw, processed = chunk.cut(rows[0], len(rows))
            delta.raw, delta.processed = _after(delta.raw, raw), _after(delta.processed, processed)
        return list(self.deltas.values())


class Recorder:
    """Builds deltas; looks up a token's bytes only if the request has stop strings."""

    def __init__(self, text: TextEdge, eos_token_ids: frozenset[int]) -> None:
        self._text = text
        self._eos_token_ids = eos_token_ids

    def open(self, sample: Sample) -> None:
        """Finish a new sample at once if it generates nothing and reports nothing about its prompt."""
        if not sample.wants_sample and sample.num_to_run == 0:
            sample.finish(Finish("length"))

    def record(self, scored: Iterable[tuple[Span, HostRows]], drawn: Iterable[Drawn]) -> StepDeltas:
        """Build a step's deltas from its prompt rows and sampled tokens, and update the samples.

        Tokens of the same sample must be in order.
        """
        step = StepDeltas()
        for span, rows in scored:
            self._add_prompt_rows(self.delta_in(step, span.sample), span, rows)
        for token in drawn:
            self._add_row(self.delta_in(step, token.row.sample), token, step)
        for sample, delta in step.deltas.items():
            if sample.is_finished:
                _end(delta, sample)
        return step

    @staticmethod
    def delta_in(step: StepDeltas, sample: Sample) -> Delta:
        """Return the sample's delta in a step; create it if there is none."""
        if sample not in step.deltas:
            step.deltas[sample] = _new_delta(sample)
        return step.deltas[sample]

    def finish(self, step: StepDeltas, sample: Sample, finish: Finish) -> None:
        """End a sample after `record`; replaces an end that was recorded in the same step."""
        sample.end = finish
        _end(self.delta_in(step, sample), sample)

    def end(self, samples: Iterable[Sample]) -> list[Delta]:
        """Return deltas that only report how these samples ended."""
        deltas = [(_new_delta(sample), sample) for sample in samples]
        for delta, sample in deltas:
            _end(delta, sample)
        return [delta for delta, _ in deltas]

    def _add_prompt_rows(self, delta: Delta, span: Span, rows: HostRows) -> None:
        sample = span.sample
        if not rows.is_valid.all():
            position = span.start + 1 + int(rows.is_valid.argmin())
            self._fail(sample, f"prompt position {position}")
            return
        delta.prompt = rows
        is_reported = sample.capture is None or sample.capture.num_done == sample.capture.num_prompt
        if not sample.wants_sample and span.end == sample.num_prompt_rows and is_reported:
            sample.finish(Finish("length"))

    def _add_row(self, delta: Delta, drawn: Drawn, step: StepDeltas) -> None:
        row, chunk, index = drawn
        sample = row.sample
        if not row.is_used:
            return
        if row.error is not None:
            sample.fail(row.error)
        elif not chunk.is_valid[index]:
            self._fail(sample, f"position {sample.num_tokens}")
        elif index in chunk.whole_rows:
            delta.row = chunk.whole_rows[index]
            sample.finish(Finish("length"))
        else:
            if chunk.has_rows:
                step.rows.append((delta, chunk, index))
            self._add_token(row, chunk.sampled_token_ids[index], delta)

    def _add_token(self, row: SampleRow, token_id: int, delta: Delta) -> None:
        delta.token_ids.append(token_id)
        if row.effects is not None:
            delta.effects = [*(delta.effects or ()), row.effects]
        row.sample.append_token(token_id)
        self._check_end(row.sample, token_id)

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
                f"the model returned NaN, +inf or only -inf at {where} of request "
                f"{sample.request.request_id!r}; check the weights and the dtype"
            )
        )


def _new_delta(sample: Sample) -> Delta:
    return Delta(
        request_id=sample.request.request_id,
        index=sample.index,
        weights_number=sample.weights_number,
    )


def _end(delta: Delta, sample: Sample) -> None:
    """Set the fields of a delta that are reported only at the end of a sample."""
    delta.finish, delta.drafts = sample.end, sample.drafts
    delta.num_cached_tokens = sample.num_cached


def _after(earlier: HostRows | None, rows: HostRows | None) -> HostRows | None:
    """Append `rows` to `earlier` rows of the same sample, whose drafts may span two chunks."""
    return rows if earlier is None or rows is None else HostRows.joined([earlier, rows])
