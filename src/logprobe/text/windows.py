"""Cut token sequences that are longer than a model's context into windows, each token scored once.

Window i holds tokens [i · stride, i · stride + window); it scores those that no window before it has, so that
all but the first window's tokens have at least window - stride tokens of context. With a stride of a whole
window the windows are disjoint, and nothing predicts the first token of each. This is the usual loop around a
model of fixed length (Hugging Face's guide to perplexity), over ids that come piece by piece.
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
    """Some tokens of a longer sequence; those from `first_scored` on are scored here."""

    token_ids: IntArray
    start: int  # of the window in the sequence
    first_scored: int  # within the window; at least 1, as nothing predicts a first token
    num_unscored: int = (
        0  # tokens before it that no window scores: the first of a text, or of a disjoint window
    )

    @property
    def num_scored(self) -> int:
        """Tokens that are scored here; none where all that is left of a text is a first token."""
        return len(self.token_ids) - self.first_scored

    @property
    def pair(self) -> tuple[IntArray, IntArray]:
        """What stands before the scored tokens, and these."""
        return self.token_ids[: self.first_scored], self.token_ids[self.first_scored :]


def windows(pieces: Iterable[IntArray], window: int, stride: int) -> Iterator[Window]:
    """Cut a sequence that comes in pieces into windows; a sequence of one token or none gives none."""
    held = np.empty(0, np.int32)
    start = num_seen = 0

    def first(ids: IntArray) -> Window:
        return Window(ids, start, max(num_seen - start, 1), int(num_seen == start))

    for piece in pieces:
        held = np.concatenate([held, piece])
        while len(held) > window:  # one token more than the window shows that another follows
            yield first(held[:window])
            num_seen = start + window
            held, start = held[stride:], start + stride
    if start + len(held) > max(num_seen, 1):
        yield first(held)


def window_pairs(
    ids: IntArray, start: int, window: int, stride: int | None = None
) -> Iterator[tuple[IntArray, IntArray]]:
    """The tokens from `start` on by window, each after what that window holds before it.

    `stride` is half a window unless given.
    """
    for part in windows([ids], window, stride or max(window // 2, 1)):
        first = max(part.first_scored, start - part.start)
        if first < len(part.token_ids):
            yield part.token_ids[:first], part.token_ids[first:]


def last_tokens(ids: IntArray, start: int, limit: int) -> tuple[IntArray, IntArray]:
    """The tokens from `start` on after as much of what stands before them as `limit` tokens hold.

    Raises:
        ParameterError: they do not fit after even one.
    """
    num_scored = len(ids) - start
    require(num_scored < limit, "text", f"has {num_scored} tokens without its context, but {limit - 1} fit")
    first = max(len(ids) - limit, 0)
    return ids[first:start], ids[start:]


def last_of_split(split: Split, limit: int) -> Split:
    """A continuation after as much of its context as `limit` tokens hold.

    Raises:
        ParameterError: it does not fit after even one token.
    """
    ids, start, healing, data = split
    if healing is None:
        context, continuation = last_tokens(ids, start, limit)
        return Split(np.concatenate([context, continuation]), len(context), data=data)
    last_tokens(ids, healing.first, limit)  # what follows the given tokens fits
    # Other tokens that spell the bytes are more of them, at most one a byte.
    num_more = len(healing.text) - (healing.stop - healing.first)
    num_cut = min(max(len(ids) + num_more - limit, 0), healing.first - 1)
    return Split(ids[num_cut:], start - num_cut, healing.moved(num_cut), data)


def window_splits(split: Split, window: int, stride: int | None = None) -> list[Split]:
    """A continuation by window; what is summed over bytes comes first, after as much as one window holds.

    Raises:
        ParameterError: that does not fit.
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
