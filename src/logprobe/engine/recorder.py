"""`Recorder`: what a step found → the containers of each request, and whether a sequence has ended.

Before it: arrays of one step. After it: `RequestOutput`, which the front ends hand on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from logprobe.engine.prompt_rows import cut_given
from logprobe.errors import NonFiniteLogitsError
from logprobe.records import FlatLogprobs

if TYPE_CHECKING:
    from collections.abc import Sequence as Items

    from logprobe.engine.prompt_rows import ScoredRows
    from logprobe.engine.request import RequestOutput
    from logprobe.engine.scheduler import Span
    from logprobe.engine.sequence import Sequence
    from logprobe.engine.text import TextEdge
    from logprobe.records import LogprobsTensors
    from logprobe.sampling.sampler import SampledRows


class Recorder:
    """Fills containers; looks up a token's bytes only where a stop string is to be found."""

    def __init__(self, text: TextEdge, eos_token_ids: frozenset[int]) -> None:
        self._text = text
        self._eos_token_ids = eos_token_ids

    def open(self, sequence: Sequence, output: RequestOutput) -> None:
        """Give a new sequence the containers that its request asks for."""
        params = sequence.request.params
        if params.prompt_logprobs is not None and sequence.output.index == 0:
            first = [None] if sequence.request.first_scored == 1 else []
            sequence.prompt_logprobs = output.prompt_logprobs = self._container(first)
        if params.logprobs is not None:
            sequence.output.logprobs = self._container()
            sequence.output.cumulative_logprob = 0.0
            if params.logprobs_mode == "both":
                sequence.output.processed_logprobs = self._container()
        if params.max_tokens == 0 and sequence.num_prompt_rows == 0:
            sequence.finish("length")

    def add_prompt_rows(self, span: Span, rows: ScoredRows) -> None:
        """Record a span of prompt positions; a prompt that is only scored ends with its last."""
        sequence = span.sequence
        assert sequence.prompt_logprobs is not None
        if not rows.is_valid.all():
            position = span.start + 1 + int(rows.is_valid.argmin())
            self._fail(sequence, f"prompt position {position}")
            return
        sequence.prompt_logprobs.append_rows(
            rows.token_ids, rows.logprobs, rows.ranks, entropy=rows.entropy, given=rows.given
        )
        if not sequence.wants_sample and span.end == sequence.num_prompt_rows:
            sequence.finish("length")

    def add_tokens(self, sequences: Items[Sequence], rows: SampledRows) -> None:
        """Record one drawn token a sequence."""
        for row, sequence in enumerate(sequences):
            if sequence.is_finished:
                continue
            if not rows.is_valid[row]:
                self._fail(sequence, f"position {sequence.num_tokens}")
                continue
            output, mode = sequence.output, sequence.request.params.logprobs_mode
            sequence.append_token(int(rows.token_ids[row]))
            first = output.logprobs if mode != "processed_logprobs" else None
            if rows.raw is not None and row in rows.raw_rows and first is not None:
                logprob = _append(first, rows.raw, rows.raw_rows[row])
                output.cumulative_logprob = (output.cumulative_logprob or 0.0) + logprob
            processed = output.logprobs if mode == "processed_logprobs" else output.processed_logprobs
            if rows.processed is not None and row in rows.processed_rows and processed is not None:
                logprob = _append(processed, rows.processed, rows.processed_rows[row])
                if mode == "processed_logprobs":
                    output.cumulative_logprob = (output.cumulative_logprob or 0.0) + logprob
            self._check_end(sequence, int(rows.token_ids[row]))

    def _check_end(self, sequence: Sequence, token_id: int) -> None:
        params = sequence.request.params
        if token_id in params.stop_token_ids:
            sequence.finish("stop", token_id)
        elif token_id in self._eos_token_ids and not params.ignore_eos:
            sequence.finish("stop")
        elif sequence.stop_matcher and (hit := sequence.stop_matcher.feed(self._text.bytes_of([token_id]))):
            sequence.output.num_text_bytes = hit[1]
            sequence.finish("stop", hit[0])
        elif sequence.num_tokens == sequence.max_len:
            sequence.finish("length")

    def _container(self, positions: Items[None] = ()) -> FlatLogprobs:
        return FlatLogprobs(positions, table=self._text.vocabulary)

    @staticmethod
    def _fail(sequence: Sequence, where: str) -> None:
        sequence.output.error = NonFiniteLogitsError(
            f"the model gave NaN or +inf, or nothing but -inf, at {where} of request "
            f"{sequence.request.request_id!r}; check the weights and the dtype"
        )
        sequence.finish("error")


def _append(container: FlatLogprobs, tensors: LogprobsTensors, row: int) -> float:
    """Append one row of a step; its chosen token's logprob in nats."""
    width = int(tensors.num_logprobs[row]) + 1
    container.append_rows(
        tensors.token_ids[row : row + 1, :width].numpy(),
        tensors.logprobs[row : row + 1, :width].numpy(),
        tensors.ranks[row : row + 1].numpy(),
        entropy=None if tensors.entropy is None else tensors.entropy[row : row + 1].numpy(),
        given=cut_given(tensors, row, row + 1),
    )
    return float(tensors.logprobs[row, 0])
