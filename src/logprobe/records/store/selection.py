"""Whole-record readings of what a store holds: the chosen tokens, the k best, the mass outside.

Before it: a store. After it: JSON, Arrow and files, which want arrays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from logprobe.records.store.ragged_rows import Entries
from logprobe.records.store.top_rows import TopRows

if TYPE_CHECKING:
    from logprobe.records.store.columns import Array
    from logprobe.records.store.rows import Store
    from logprobe.records.store.top_columns import TopColumns


def chosen_entries(store: Store, start: int, stop: int) -> Entries:
    """The chosen token of each position that has entries: at most one entry a position."""
    num_none = max(min(stop, store.num_none) - start, 0)
    if isinstance(store, TopRows) and start + num_none < stop:
        rows = store.columns(start + num_none, stop)
        return Entries(
            offsets=np.maximum(np.arange(stop - start + 1) - num_none, 0),
            token_ids=rows.chosen_ids,
            logprobs=rows.chosen_logprobs,
            ranks=rows.chosen_ranks,
        )
    entries = store.entries(start, stop)
    filled = entries.offsets[1:] > entries.offsets[:-1]
    firsts = entries.offsets[:-1][filled]
    return Entries(
        offsets=np.concatenate([[0], np.cumsum(filled)]),
        token_ids=entries.token_ids[firsts],
        logprobs=entries.logprobs[firsts],
        ranks=entries.ranks[firsts],
        texts=None if entries.texts is None else [entries.texts[entry] for entry in firsts.tolist()],
    )


def top_entries(store: Store, start: int, stop: int) -> Entries:
    """The k best of each position by rank, the chosen token among them only where it is one of them."""
    num_none = max(min(stop, store.num_none) - start, 0)
    if isinstance(store, TopRows) and start + num_none < stop:
        rows = store.columns(start + num_none, stop)
        return Entries(
            offsets=np.maximum(np.arange(stop - start + 1, dtype=np.int64) - num_none, 0) * store.k,
            token_ids=rows.top_ids.ravel(),
            logprobs=rows.top_logprobs.ravel(),
            ranks=np.tile(np.arange(1, store.k + 1), len(rows.places)),
        )
    entries = store.entries(start, stop)
    kept = [
        entry
        for row in range(stop - start)
        for entry in _top_of_row(entries, int(entries.offsets[row]), int(entries.offsets[row + 1]))
    ]
    picked = np.array(kept, np.intp)
    rows_of = np.searchsorted(entries.offsets, picked, side="right") - 1
    counts = np.bincount(rows_of, minlength=stop - start)
    return Entries(
        offsets=np.concatenate([[0], np.cumsum(counts)]),
        token_ids=entries.token_ids[picked],
        logprobs=entries.logprobs[picked],
        ranks=entries.ranks[picked],
        texts=None if entries.texts is None else [entries.texts[entry] for entry in kept],
    )


def _top_of_row(entries: Entries, start: int, stop: int) -> list[int]:
    """Entries of one row that are its k best: all but the first, and the first where its place is empty."""
    rest = list(range(start + 1, stop))
    if stop == start or entries.token_ids[start] in entries.token_ids[start + 1 : stop]:
        return rest
    ranks = entries.ranks[start + 1 : stop]
    gap = next((place for place, rank in enumerate(ranks.tolist()) if rank != place + 1), len(rest))
    if gap == len(rest) and entries.ranks[start] != gap + 1:
        return rest
    return [*rest[:gap], start, *rest[gap:]]


def other_logprobs(store: Store, start: int, stop: int) -> Array:
    """Log of the mass outside each position's listed entries, (n,) float32; -inf where nothing is left.

    Taken as log(-expm1(s)) of the log-sum s of the listed entries, which keeps the digits of a small rest.
    A None position lists nothing known: NaN.
    """
    if isinstance(store, TopRows) and start >= store.num_none:
        return _other_of_columns(store.columns(start, stop))
    entries = store.entries(start, stop)
    rest = np.full(stop - start, np.nan, np.float32)
    for row in range(stop - start):
        if entries.is_none is None or not entries.is_none[row]:
            first, last = entries.offsets[row], entries.offsets[row + 1]
            _, kept = np.unique(entries.token_ids[first:last], return_index=True)
            rest[row] = log_of_rest(entries.logprobs[first:last][kept])
    return rest


def _other_of_columns(rows: TopColumns) -> Array:
    is_outside = rows.places == rows.top_ids.shape[1]
    extra = np.where(is_outside, rows.chosen_logprobs, -np.inf)
    listed = np.column_stack([rows.top_logprobs, extra]).astype(np.float64)
    largest = np.maximum(listed.max(axis=1), np.finfo(np.float64).min)
    totals = largest + np.log(np.exp(listed - largest[:, None]).sum(axis=1))
    with np.errstate(divide="ignore"):  # a total of 0 leaves nothing: -inf
        rest: Array = np.log(-np.expm1(np.minimum(totals, 0))).astype(np.float32)
    return rest


def log_of_rest(listed: Array) -> float:
    """Log of the mass that the listed entries (m,) leave, nats."""
    largest = listed.max(initial=-np.inf)
    if largest == -np.inf:
        return 0.0
    total = float(largest) + float(np.log(np.exp(listed.astype(np.float64) - largest).sum()))
    return float(np.log(-np.expm1(total))) if total < 0 else -np.inf
