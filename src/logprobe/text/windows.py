"""Split token sequences longer than the model's context into windows, scoring each token once.

Window i holds tokens [i · stride, i · stride + window) and scores those that no earlier window has scored, so
every scored token outside the first window has at least window - stride tokens of context. If stride equals
window, the windows are disjoint and the first token of each is not scored. This is the strided evaluation in
Hugging Face's perplexity guide for fixed-length models, for token ids that arrive in several arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from logprobe.errors import require
from logprobe.text.boundary import Split

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from logprobe.records.values import IntArray


@dataclass(frozen=True, slots=True)
class Window:
    """A slice of a longer sequence, in which the tokens from index `first_scored` on are scored."""

    token_ids: IntArray
    start: int  # index of the window's first token in the sequence
    first_scored: int  # index within the window; >= 1, since the first token has no context
    num_unscored: int = (
        0  # unscored tokens just before the window's scored ones: the first of a text or window
    )

    @property
    def num_scored(self) -> int:
        """Number of tokens scored in this window; 0 if only a text's first token is left."""
        return len(self.token_ids) - self.first_scored

    @property
    def pair(self) -> tuple[IntArray, IntArray]:
        """The context and the tokens to score."""
        return self.token_ids[: self.first_scored], self.token_ids[self.first_scored :]


def windows(pieces: Iterable[IntArray], window: int, stride: int) -> Iterator[Window]:
    """Yield the windows of the concatenated `pieces`; no windows if there are fewer than two tokens."""
    held = np.empty(0, np.int32)
    start = num_seen = 0

    def first(ids: IntArray) -> Window:
        return Window(ids, start, max(num_seen - start, 1), int(num_seen == start))

    for piece in pieces:
        held = np.concatenate([held, piece])
        while len(held) > window:  # wait for one extra token, which shows that another window follows
            yield first(held[:window])
            num_seen = start + window
            held, start = held[stride:], start + stride
    if start + len(held) > max(num_seen, 1):
        yield first(held)


def window_pairs(
    ids: IntArray, start: int, window: int, stride: int | None = None
) -> Iterator[tuple[IntArray, IntArray]]:
    """Yield (context, tokens to score), one pair per window, such that the tokens from `start` on are scored.

    `stride` defaults to half of `window`.
    """
    for part in windows([ids], window, stride or max(window // 2, 1)):
        first = max(part.first_scored, start - part.start)
        if first < len(part.token_ids):
            yield part.token_ids[:first], part.token_ids[first:]


def last_tokens(ids: IntArray, start: int, limit: int) -> tuple[IntArray, IntArray]:
    """Split `ids` at `start`, and drop the oldest context tokens so that both parts fit in `limit` tokens.

    Raises:
        ParameterError: the tokens from `start` on and one context token do not fit in `limit`.
    """
    num_scored = len(ids) - start
    problem = f"has {num_scored} tokens without its context, but {limit - 1} fit; shorten it or score windows"
    require(num_scored < limit, "text", problem)
    first = max(len(ids) - limit, 0)
    return ids[first:start], ids[start:]


def last_of_split(split: Split, limit: int) -> Split:
    """Drop the oldest context tokens of a split so that it fits in `limit` tokens.

    Raises:
        ParameterError: the continuation and one context token do not fit.
    """
    ids, start, healing, data = split
    if healing is None:
        context, continuation = last_tokens(ids, start, limit)
        return Split(np.concatenate([context, continuation]), len(context), data=data)
    last_tokens(ids, healing.first, limit)  # raises if the tokens after the shared prefix do not fit
    # An alternative tokenization of the bytes is longer by at most one token per byte.
    num_more = len(healing.text) - (healing.stop - healing.first)
    num_cut = min(max(len(ids) + num_more - limit, 0), healing.first - 1)
    return Split(ids[num_cut:], start - num_cut, healing.moved(num_cut), data)


def window_splits(split: Split, window: int, stride: int | None = None) -> list[Split]:
    """Split a continuation into windows; a part scored by bytes comes first and must fit in one window.

    Raises:
        ParameterError: the part scored by bytes does not fit in one window.
    """
    ids, start, healing, data = split
    parts = []
    if healing is not None:
        region = replace(healing, num_bytes=len(healing.text) - len(healing.tail))
        parts.append(last_of_split(Split(ids[: healing.stop], start, region), window))
        start = healing.stop
    pairs = window_pairs(ids, start, window, stride)
    parts += [Split(np.concatenate(pair), len(pair[0])) for pair in pairs]
    return parts if len(parts) > 1 else [parts[0]._replace(data=data)]
