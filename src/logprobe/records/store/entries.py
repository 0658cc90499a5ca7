"""The shapes in which rows enter a store and leave it: as arrays of many, as Python values of one."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import compress, repeat
from math import inf
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.records.store.columns import Array
    from logprobe.records.values import TokenTable

NO_RANK = -1  # in the typed rank columns only; readers see None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """Entries of n positions, N in all, as arrays; a position's chosen token comes first."""

    offsets: Array  # (n + 1,) int64: position i owns entries [offsets[i], offsets[i + 1])
    token_ids: Array  # (N,) unsigned or signed integers
    logprobs: Array  # (N,) float32 or float64, nats
    ranks: Array  # (N,) integers; NO_RANK where none was given
    is_none: Array | None = None  # (n,) bool: positions appended as None; None where there are none
    texts: list[str | None] | None = None  # N texts given with the entries; None where none was

    @classmethod
    def none(cls, count: int) -> Entries:
        """Positions that read as None."""
        return cls(
            offsets=np.zeros(count + 1, np.int64),
            token_ids=np.empty(0, np.uint16),
            logprobs=np.empty(0, np.float32),
            ranks=np.empty(0, np.int32),
            is_none=np.ones(count, np.bool_),
        )

    @classmethod
    def joined(cls, runs: Sequence[Entries]) -> Entries:
        """Runs of positions, none with texts, one after another; what one of them alone has is not copied."""
        if len(runs) == 1:
            return runs[0]
        if not runs:
            return cls.none(0)
        widths = np.concatenate([np.diff(run.offsets) for run in runs])
        filled = [run for run in runs if len(run.token_ids)] or runs[:1]

        def column(name: str) -> Array:
            parts = [getattr(run, name) for run in filled]
            return parts[0] if len(parts) == 1 else np.concatenate(parts)

        return cls(
            offsets=np.concatenate([np.zeros(1, np.int64), np.cumsum(widths)]),
            token_ids=column("token_ids"),
            logprobs=column("logprobs"),
            ranks=column("ranks"),
            is_none=np.concatenate(
                [
                    np.zeros(len(run.offsets) - 1, np.bool_) if run.is_none is None else run.is_none
                    for run in runs
                ]
            ),
        )

    def take(self, rows: Array) -> Entries:
        """The rows named, in that order."""
        widths = np.diff(self.offsets)[rows]
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(widths, out=offsets[1:])
        picked = np.arange(offsets[-1]) + np.repeat(self.offsets[rows] - offsets[:-1], widths)
        return Entries(
            offsets=offsets,
            token_ids=self.token_ids[picked],
            logprobs=self.logprobs[picked],
            ranks=self.ranks[picked],
            is_none=None if self.is_none is None else self.is_none[rows],
            texts=None if self.texts is None else [self.texts[entry] for entry in picked.tolist()],
        )

    def possible(self) -> Entries:
        """The same positions without the entries that are -inf."""
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
        """False where a position holds NaN, (n,) bool."""
        is_valid = np.ones(len(self.offsets) - 1, np.bool_)
        wrong = np.flatnonzero(np.isnan(self.logprobs))
        is_valid[np.searchsorted(self.offsets, wrong, side="right") - 1] = False
        return is_valid

    def rank_list(self) -> list[int | None]:
        """Ranks as Python values, None where none was given."""
        ranks: list[int | None] = self.ranks.tolist()
        return [None if rank == NO_RANK else rank for rank in ranks] if NO_RANK in ranks else ranks

    def text_list(self, table: TokenTable | None) -> list[str | None]:
        """Texts as Python values, None where none is known."""
        return texts_of(self.token_ids.tolist(), self.texts, table)


def texts_of(
    token_ids: Sequence[int], texts: Sequence[str | None] | None, table: TokenTable | None
) -> list[str | None]:
    """The text of each entry: the one given with it, else the table's, else None."""
    given = list(texts or repeat(None, len(token_ids)))[: len(token_ids)]
    if table is None:
        return given
    read = table.token_text
    return [read(token_id) if text is None else text for token_id, text in zip(token_ids, given, strict=True)]


def with_holes(entries: Entries) -> Entries:
    """Entries of at most one a position as exactly one; masked where there is none, over NaN or 0."""
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
    """The entries of one position as Python values, the chosen token first."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int | None] | list[int]
    texts: list[str | None] | None = None  # None where no text was given with the entries


class TopLists(NamedTuple):
    """The chosen token of one position and its k best, as Python values."""

    chosen_id: int
    chosen_logprob: float  # nats
    top_ids: list[int]
    top_logprobs: list[float]  # nats

    def possible(self) -> TopLists:
        """The same without alternatives that are -inf."""
        is_kept = [logprob != -inf for logprob in self.top_logprobs]
        return self._replace(
            top_ids=[*compress(self.top_ids, is_kept)], top_logprobs=[*compress(self.top_logprobs, is_kept)]
        )
