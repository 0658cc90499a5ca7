"""Positions with any number of entries as flat arrays, and single positions as Python values."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, compress, pairwise, repeat
from math import inf
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from logprobe.records.store.columns import spans

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.records.store.columns import Array
    from logprobe.records.values import TokenTable

NO_RANK = -1  # marks a missing rank in integer columns; readers get None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """The N entries of n positions as flat arrays; each position's chosen token comes first."""

    offsets: Array  # (n + 1,) int64: position i owns entries [offsets[i], offsets[i + 1])
    token_ids: Array  # (N,) unsigned or signed integers
    logprobs: Array  # (N,) float32 or float64, nats
    ranks: Array  # (N,) integers; NO_RANK where missing
    is_none: Array | None = None  # (n,) bool: True for positions appended as None
    texts: list[str | None] | None = None  # N texts appended with the entries; None if there are none

    @classmethod
    def none(cls, count: int) -> Entries:
        """Create `count` positions without a prediction; they take no memory."""
        return cls(
            offsets=np.broadcast_to(np.int64(0), count + 1),
            token_ids=np.empty(0, np.uint16),
            logprobs=np.empty(0, np.float32),
            ranks=np.empty(0, np.int32),
            is_none=np.broadcast_to(np.True_, count),
        )

    @classmethod
    def joined(cls, parts: Sequence[Entries]) -> Entries:
        """Concatenate `Entries`; if only one has positions, it is returned as is."""
        parts = [part for part in parts if part.num_rows]
        if not parts:
            return cls.none(0)
        if len(parts) == 1:
            return parts[0]
        filled = [part for part in parts if len(part.token_ids)] or parts[:1]
        widths = np.concatenate([np.diff(part.offsets) for part in parts])
        has_texts = any(part.texts is not None for part in parts)
        return cls(
            offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(widths)]),
            token_ids=np.concatenate([part.token_ids for part in filled]),
            logprobs=np.concatenate([part.logprobs for part in filled]),
            ranks=np.concatenate([part.ranks for part in filled]),
            is_none=np.concatenate([part.none_flags() for part in parts]),
            texts=[text for part in filled for text in part.text_list(None)] if has_texts else None,
        )

    @property
    def num_rows(self) -> int:
        """Number of positions."""
        return len(self.offsets) - 1

    def none_flags(self) -> Array:
        """Return an (n,) bool array that is True where a position was appended as None."""
        return np.zeros(self.num_rows, np.bool_) if self.is_none is None else self.is_none

    def take(self, rows: Array) -> Entries:
        """Select positions by their indices."""
        is_none = None if self.is_none is None else self.is_none[rows]
        return self.spans(self.offsets[rows], np.diff(self.offsets)[rows], is_none)

    def spans(self, starts: Array, widths: Array, is_none: Array | None = None) -> Entries:
        """Build positions from ranges of the entries, given by their starts and widths (m,)."""
        offsets, picked = spans(starts, widths)
        return Entries(
            offsets=offsets,
            token_ids=self.token_ids[picked],
            logprobs=self.logprobs[picked],
            ranks=self.ranks[picked],
            is_none=is_none,
            texts=self.texts and [self.texts[entry] for entry in picked.tolist()],
        )

    def possible(self) -> Entries:
        """Return the entries whose log-probability is not -inf."""
        is_kept = ~np.isneginf(self.logprobs)
        num_kept = np.concatenate([np.zeros(1, np.int64), np.cumsum(is_kept)])
        return Entries(
            offsets=num_kept[self.offsets],
            token_ids=self.token_ids[is_kept],
            logprobs=self.logprobs[is_kept],
            ranks=self.ranks[is_kept],
            is_none=self.is_none,
            texts=None if self.texts is None else [*compress(self.texts, is_kept)],
        )

    def is_valid(self) -> Array:
        """Return an (n,) bool array that is False where a position has a NaN log-probability."""
        is_valid = np.ones(self.num_rows, np.bool_)
        wrong = np.flatnonzero(np.isnan(self.logprobs))
        is_valid[np.searchsorted(self.offsets, wrong, side="right") - 1] = False
        return is_valid

    def rank_list(self) -> list[int | None]:
        """Return the ranks as a list, with None where missing."""
        return ranks_of(self.ranks.tolist())

    def text_list(self, table: TokenTable | None) -> list[str | None]:
        """Return the texts as a list, with None where unknown."""
        return texts_of(self.token_ids.tolist(), self.texts, table)

    def chosen_entries(self) -> Entries:
        """Return the chosen token of each position that has entries."""
        has_chosen = self.offsets[1:] > self.offsets[:-1]
        return self._picked(self.offsets[:-1][has_chosen], has_chosen)

    def top_entries(self) -> Entries:
        """Return the k most likely tokens of each position; the chosen token only if it is one of them."""
        ids, ranks = self.token_ids.tolist(), self.ranks.tolist()
        picked = [
            [first + entry for entry in top_of_row(ids[first:last], ranks[first:last])]
            for first, last in pairwise(self.offsets.tolist())
        ]
        return self._picked(np.array([*chain.from_iterable(picked)], np.intp), np.array([*map(len, picked)]))

    def _picked(self, picked: Array, widths: Array) -> Entries:
        return Entries(
            offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(widths, dtype=np.int64)]),
            token_ids=self.token_ids[picked],
            logprobs=self.logprobs[picked],
            ranks=self.ranks[picked],
            is_none=self.is_none,
        )


def top_of_row(ids: list[int], ranks: Sequence[int | None]) -> list[int]:
    """Return the indices of a row's k most likely tokens, by rank.

    Entry 0 is the chosen token, and the other entries are in order of rank. Entry 0 is included only if the
    others skip its rank or end just before it.
    """
    rest = list(range(1, len(ids)))
    if not ids or ids[0] in ids[1:]:
        return rest
    gap = next((place for place, entry in enumerate(rest) if ranks[entry] != place + 1), len(rest))
    if gap == len(rest) and ranks[0] != gap + 1:
        return rest
    return [*rest[:gap], 0, *rest[gap:]]


def logs_outside_top(chosen: Entries, top: Entries, *, with_chosen: bool) -> Array:
    """Return the log of the probability outside each position's top tokens, (n,) float32 in nats.

    With `with_chosen`, the chosen token counts as a top token. The result is NaN for positions without a
    prediction, and -inf if nothing remains. It is computed as log(-expm1(s)), where s is the log-sum-exp of
    the top tokens; this is accurate for small remainders.
    """
    num_rows, widths = top.num_rows, np.diff(top.offsets)
    has_chosen = chosen.offsets[1:] > chosen.offsets[:-1]
    alone = np.full(num_rows, -np.inf)  # the chosen token's logprob where it is not among the top tokens
    alone[has_chosen] = chosen.logprobs
    chosen_ids = np.full(num_rows, -1, np.int64)
    chosen_ids[has_chosen] = chosen.token_ids
    rows = np.repeat(np.arange(num_rows), widths)
    alone[rows[top.token_ids == chosen_ids[rows]]] = -np.inf
    values = top.logprobs.astype(np.float64)
    largest = np.full(num_rows, np.finfo(np.float64).min)
    if with_chosen:
        largest = np.maximum(largest, alone)
    is_filled = widths > 0
    tops = np.maximum.reduceat(values, top.offsets[:-1][is_filled]) if len(values) else values
    largest[is_filled] = np.maximum(largest[is_filled], tops)
    totals = np.zeros(num_rows) + np.bincount(rows, np.exp(values - largest[rows]), num_rows)
    if with_chosen:
        totals += np.exp(alone - largest)
    with np.errstate(divide="ignore"):  # log of a sum or remainder of 0
        rest = np.log(-np.expm1(np.minimum(largest + np.log(totals), 0)))
    if not with_chosen:
        # Rounding may give the top tokens all of the probability; at least the chosen token's remains.
        rest = np.maximum(rest, alone)
    rest[chosen.none_flags()] = np.nan
    return rest.astype(np.float32)


def ranks_of(ranks: list[int]) -> list[int | None]:
    """Return ranks with None where missing."""
    return [None if rank == NO_RANK else rank for rank in ranks] if NO_RANK in ranks else [*ranks]


def texts_of(
    token_ids: Sequence[int], texts: Sequence[str | None] | None, table: TokenTable | None
) -> list[str | None]:
    """Return the text of each entry: the text in `texts`, else the table's, else None."""
    given = list(texts or repeat(None, len(token_ids)))[: len(token_ids)]
    if table is None:
        return given
    read = table.token_text
    return [read(token_id) if text is None else text for token_id, text in zip(token_ids, given, strict=True)]


def with_holes(entries: Entries) -> Entries:
    """Expand at most one entry per position to exactly one, as arrays that are masked where missing."""
    is_hole = entries.offsets[1:] == entries.offsets[:-1]
    if not is_hole.any():
        return entries

    def spread(column: Array, filler: float) -> Array:
        values = np.full(len(is_hole), filler, column.dtype)
        values[~is_hole] = column
        masked: Array = np.ma.MaskedArray(values, is_hole)
        return masked

    return Entries(
        offsets=np.arange(len(is_hole) + 1),
        token_ids=spread(entries.token_ids, 0),
        logprobs=spread(entries.logprobs, np.nan),
        ranks=spread(entries.ranks, 0),
        is_none=entries.is_none,
    )


class RowLists(NamedTuple):
    """Entries of one position as Python values, the chosen token first."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int | None] | list[int]
    texts: list[str | None] | None = None  # None if no text was appended with the entries


class TopLists(NamedTuple):
    """Chosen token and k most likely tokens of one position, as Python values."""

    chosen_id: int
    chosen_logprob: float  # nats
    top_ids: list[int]
    top_logprobs: list[float]  # nats

    def possible(self) -> TopLists:
        """Return a copy without the alternatives whose log-probability is -inf."""
        is_kept = [logprob != -inf for logprob in self.top_logprobs]
        return self._replace(
            top_ids=[*compress(self.top_ids, is_kept)], top_logprobs=[*compress(self.top_logprobs, is_kept)]
        )
