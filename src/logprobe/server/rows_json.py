"""Rows of log-probabilities → the JSON shapes of the routes, straight from the records' arrays.

Before it: pieces and records. After it: replies and chunks. No NaN and no infinity is ever written.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from logprobe.records.forms.json import IMPOSSIBLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.models import Vocabulary
    from logprobe.records import FlatLogprobs
    from logprobe.records.forms.json import ChatEncoder
    from logprobe.records.store.entries import Entries


def finite(values: Any) -> list[float | None]:
    """Values that JSON has: -inf becomes -9999.0, NaN becomes null."""
    floored = np.where(np.isneginf(values), IMPOSSIBLE, values)
    return [None if value != value else value for value in floored.tolist()]  # noqa: PLR0124 - NaN


def content(
    encoder: ChatEncoder, record: FlatLogprobs, rows: Sequence[int], num_top: int | None
) -> msgspec.Raw:
    """Chat entries of the rows named, in order."""
    parts = [encoder.entries(record, start, stop, num_top) for start, stop in _runs(rows)]
    return msgspec.Raw(b"[" + b",".join(parts) + b"]")


def legacy(record: FlatLogprobs, vocabulary: Vocabulary) -> dict[str, list[Any]]:
    """`token_logprobs` and `top_logprobs` of all rows of a record; null where nothing predicts the token.

    A map holds the chosen token and the k best; of two tokens with one text the later is `token_id:N`.
    """
    chosen, top = record.rows.store.chosen_entries(0, len(record)), record.top_entries()
    numbers = finite(chosen.logprobs)
    token_logprobs: list[float | None] = []
    maps: list[dict[str, float | None] | None] = []
    bests = _row_lists(top)
    for (first, last), best in zip(pairwise(chosen.offsets.tolist()), bests, strict=True):
        if first == last:
            token_logprobs.append(None)
            maps.append(None)
            continue
        own = int(chosen.token_ids[first])
        token_logprobs.append(numbers[first])
        outside = [] if any(token_id == own for token_id, _ in best) else [(own, numbers[first])]
        maps.append(_text_map([*best, *outside], vocabulary))
    return {"token_logprobs": token_logprobs, "top_logprobs": maps}


def token_rows(record: FlatLogprobs, vocabulary: Vocabulary) -> list[list[dict[str, Any]] | None]:
    """Every entry of every row with id, rank and bytes, the chosen token first; null for a row without."""
    entries = record.entries()
    numbers, ranks, ids = finite(entries.logprobs), entries.rank_list(), entries.token_ids.tolist()
    items = [
        token_item(token_id, vocabulary) | {"logprob": logprob, "rank": rank}
        for token_id, logprob, rank in zip(ids, numbers, ranks, strict=True)
    ]
    is_none = [False] * len(record) if entries.is_none is None else entries.is_none.tolist()
    spans = pairwise(entries.offsets.tolist())
    return [None if none else items[start:stop] for none, (start, stop) in zip(is_none, spans, strict=True)]


def prompt_rows(record: FlatLogprobs, vocabulary: Vocabulary) -> list[dict[str, Any] | None]:
    """One object a prompt position: the token's own numbers and its k best alternatives."""
    chosen = _cut(record.rows.store.chosen_entries(0, len(record)), vocabulary)
    tops = _cut(record.top_entries(), vocabulary)
    return [{**own[0], "top_logprobs": top} if own else None for own, top in zip(chosen, tops, strict=True)]


def token_item(token_id: int, vocabulary: Vocabulary) -> dict[str, Any]:
    """A token's identity: id, text, exact bytes."""
    return {
        "token_id": token_id,
        "token": vocabulary.token_text(token_id),
        "bytes": list(vocabulary.token_bytes(token_id)),
    }


def _cut(entries: Entries, vocabulary: Vocabulary) -> list[list[dict[str, Any]]]:
    numbers, ranks, ids = finite(entries.logprobs), entries.rank_list(), entries.token_ids.tolist()
    items = [
        token_item(token_id, vocabulary) | {"logprob": logprob, "rank": rank}
        for token_id, logprob, rank in zip(ids, numbers, ranks, strict=True)
    ]
    return [items[start:stop] for start, stop in pairwise(entries.offsets.tolist())]


def _row_lists(entries: Entries) -> list[list[tuple[int, float | None]]]:
    pairs = list(zip(entries.token_ids.tolist(), finite(entries.logprobs), strict=True))
    return [pairs[start:stop] for start, stop in pairwise(entries.offsets.tolist())]


def _text_map(row: Sequence[tuple[int, float | None]], vocabulary: Vocabulary) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for token_id, logprob in row:
        key = vocabulary.token_text(token_id)
        while key in found:
            # A token may itself be written `token_id:5`; the next form is free then.
            key = f"token_id:{token_id}" if not key.startswith("token_id:") else f"{key}'"
        found[key] = logprob
    return found


def _runs(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Consecutive numbers as half-open ranges."""
    if not rows:
        return []
    if rows[-1] - rows[0] + 1 == len(rows):
        return [(rows[0], rows[-1] + 1)]
    breaks = [place for place in range(1, len(rows)) if rows[place] != rows[place - 1] + 1]
    edges = [0, *breaks, len(rows)]
    return [(rows[start], rows[stop - 1] + 1) for start, stop in pairwise(edges)]
