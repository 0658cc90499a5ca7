"""Log-probabilities of prompt tokens, computed with the output head or taken from a cache.

The next-token distribution after a prompt position depends only on the tokens up to there, so the results are
cached by that position's slot. Scoring the same prompt again runs neither the model nor the head.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from logprobe.kernels.extraction.head import default_chunk_rows, head_extract
from logprobe.kernels.placement import as_rows, inference_mode
from logprobe.records.rows import EXTRAS, HostRows
from logprobe.sampling import Sampler
from logprobe.sampling.params import extras_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from logprobe.engine.plan.scheduler import Span
    from logprobe.engine.protocol import ForwardBackend
    from logprobe.kernels.placement import Rows
    from logprobe.models.lora import LoraWeights
    from logprobe.records.store.columns import Array
    from logprobe.records.values import IntArray
    from logprobe.sampling.params import NamedIds, SamplingParams

KNOWN_WIDTH = 20  # alternatives cached per slot


class KnownRows:
    """Cache of log-probabilities by slot: for each slot, the last computed row, for one next token."""

    def __init__(self, num_slots: int) -> None:
        self._next_ids = np.full(num_slots, -1, dtype=np.int32)
        self._ks = np.empty(num_slots, dtype=np.int32)
        self._ranks = np.empty(num_slots, dtype=np.int32)
        self._extras: dict[str, Array] = {}  # columns of EXTRAS requested so far; NaN: not computed
        self._token_ids = np.empty((num_slots, KNOWN_WIDTH + 1), dtype=np.int32)
        self._logprobs = np.empty((num_slots, KNOWN_WIDTH + 1), dtype=np.float32)

    def forget(self, slots: IntArray) -> None:
        """Invalidate the cached rows of these slots."""
        self._next_ids[slots] = -1

    def covers(self, slots: IntArray, next_ids: IntArray, k: int, extras: Sequence[str]) -> bool:
        """Return True if every slot has a row for its next token with `k` alternatives and these columns."""
        is_known = (self._next_ids[slots] == next_ids) & (self._ks[slots] >= k)
        for name in extras:
            is_known &= name in self._extras and ~np.isnan(self._extras[name][slots])
        return bool(is_known.all())

    def recall(self, slots: IntArray, k: int, extras: Sequence[str]) -> HostRows:
        """Return the cached rows of slots for which `covers` returned True."""
        return HostRows(
            self._token_ids[slots, : k + 1],
            self._logprobs[slots, : k + 1],
            self._ranks[slots],
            {name: self._extras[name][slots] for name in extras},
        )

    def remember(self, slots: IntArray, rows: HostRows) -> None:
        """Cache the valid rows among `rows`, with at most `KNOWN_WIDTH` alternatives each."""
        width = min(rows.token_ids.shape[1], KNOWN_WIDTH + 1)
        self._next_ids[slots] = np.where(rows.is_valid, rows.token_ids[:, 0], -1)
        self._ks[slots] = width - 1
        self._ranks[slots] = rows.ranks
        for name in rows.extras.keys() - self._extras.keys():
            self._extras[name] = np.full(len(self._ks), np.nan, EXTRAS[name])
        for name, column in self._extras.items():
            column[slots] = rows.extras.get(name, np.nan)
        self._token_ids[slots, :width] = rows.token_ids[:, :width]
        self._logprobs[slots, :width] = rows.logprobs[:, :width]


class PromptScorer:
    """Computes the prompt rows of a step, from the cache or with the output head."""

    def __init__(self, forward: ForwardBackend) -> None:
        self._forward = forward
        self._known = KnownRows(forward.num_slots)
        self._sampler = Sampler()

    def forget(self, slots: IntArray) -> None:
        """Invalidate cached rows; called with slots that were freed."""
        self._known.forget(slots)

    def score(self, spans: Sequence[Span]) -> list[HostRows]:
        """Return the rows of each span; uncached raw rows with the same head LoRA run as one batch."""
        answers = [self._recall(span) for span in spans]
        missing = [index for index, answer in enumerate(answers) if answer is None]
        heads = [spans[index].sample.head_lora for index in missing]
        for lora in dict.fromkeys(heads):
            alike = [index for index, own in zip(missing, heads, strict=True) if own is lora]
            for index, rows in zip(
                alike, self._compute([spans[index] for index in alike], lora), strict=True
            ):
                answers[index] = rows
        return [answer for answer in answers if answer is not None]

    def _recall(self, span: Span) -> HostRows | None:
        request = span.sample.request
        if request.scored_as is not None:
            return self._processed(span, request.scored_as)
        params = request.params
        k = _num_logprobs(span, self._forward.vocab_size)
        slots, next_ids = _slots(span), _next_ids(span)
        extras = [name for name, is_asked in extras_of(params).items() if is_asked]
        if params.logprob_token_ids or not self._known.covers(slots, next_ids, k, extras):
            return None
        return self._known.recall(slots, k, extras)

    def _processed(self, span: Span, params: SamplingParams) -> HostRows:
        """Score a span under the distribution that `params` would sample from; the rows are not cached."""
        size = default_chunk_rows(self._forward.vocab_size)
        slots, next_ids, named = _slots(span), _next_ids(span).tolist(), _named_ids(span)
        parts = []
        for start in range(0, len(slots), size):
            hidden = self._forward.hidden_rows(slots[start : start + size])
            logits = as_rows(_head(self._forward, span.sample.head_lora)(hidden))
            count = len(logits)
            forced = next_ids[start : start + size]
            ids = named[start : start + size]
            with inference_mode(logits):
                output = self._sampler.sample(logits, [params] * count, np.zeros(count), None, forced, ids)
            assert output.processed_logprobs is not None
            parts.append(output.processed_logprobs)
        return HostRows.joined(parts)

    def _compute(self, spans: Sequence[Span], lora: LoraWeights | None) -> list[HostRows]:
        """Compute and cache the raw rows of spans whose output head uses the same LoRA weights."""
        slots = np.concatenate([_slots(span) for span in spans])
        widths = [_num_logprobs(span, self._forward.vocab_size) for span in spans]
        lengths = [len(span) for span in spans]
        named_ids = [ids for span in spans for ids in _named_ids(span)]
        tensors = head_extract(
            self._forward.hidden_rows(slots),
            _head(self._forward, lora),
            np.concatenate([_next_ids(span) for span in spans]),
            np.repeat(widths, lengths),
            given_ids=None if all(ids is None for ids in named_ids) else named_ids,
            **extras_of(*(span.sample.request.params for span in spans)),
        )
        whole = tensors.to_host()
        starts = np.cumsum([0, *lengths]).tolist()
        rows = [
            whole.rows(start, start + length).narrowed(width)
            for start, length, width in zip(starts, lengths, widths, strict=False)
        ]
        for span, scored in zip(spans, rows, strict=True):
            self._known.remember(_slots(span), scored)
        return rows


def _head(forward: ForwardBackend, lora: LoraWeights | None) -> Callable[[Any], Rows]:
    return forward.head if lora is None else partial(forward.head, lora=lora)


def _slots(span: Span) -> IntArray:
    return span.sample.slots[span.start : span.end]


def _next_ids(span: Span) -> IntArray:
    return span.sample.token_ids[span.start + 1 : span.end + 1]


def _named_ids(span: Span) -> list[NamedIds]:
    """Return, for each row of the span, the token ids that the request wants reported."""
    params = span.sample.request.params
    if not params.names_positions:
        return [params.named_ids_at(0)] * len(span)
    return [params.named_ids_at(position) for position in range(span.start + 1, span.end + 1)]


def _num_logprobs(span: Span, vocab_size: int) -> int:
    asked = span.sample.request.params.prompt_logprobs
    assert asked is not None, "only prompts with prompt_logprobs are scored"
    return vocab_size if asked == -1 else min(asked, vocab_size)
