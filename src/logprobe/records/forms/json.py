"""Encode records as JSON from their arrays: chat entries, legacy completion maps, and vLLM's maps by id.

Used for replies, stream chunks and `--json`. Infinities and NaN are written as in `finite`.
"""

from __future__ import annotations

from functools import partial
from itertools import groupby, pairwise
from math import inf
from operator import add
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from logprobe.errors import ParameterError
from logprobe.records.forms.finite import IMPOSSIBLE, finite

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from logprobe.records.flat import FlatLogprobs
    from logprobe.records.store.columns import Array
    from logprobe.records.store.entries import Entries, TopLists
    from logprobe.records.store.rows import Rows
    from logprobe.records.values import TokenTable

FEW_ROWS = 8  # up to this many rows, encoding them one by one is faster than with arrays


class ChatEncoder:
    """Encoder of OpenAI's `{token, bytes, logprob, top_logprobs}`; caches each token's encoded text.

    Args:
        table: texts and bytes of tokens. With None, the texts stored in the record are used, and their
            UTF-8 encodings as bytes.
        floor: number written for -inf.
        has_bytes: if False, leave out `bytes`, as in the events of OpenAI's Responses API.
    """

    def __init__(
        self, table: TokenTable | None = None, *, floor: float = IMPOSSIBLE, has_bytes: bool = True
    ) -> None:
        self._floor = floor
        self._floor_json = msgspec.json.encode(float(np.float32(floor)))
        self._has_bytes = has_bytes
        self._parts = None if table is None else _Parts(table, has_bytes=has_bytes)

    def content(
        self, record: FlatLogprobs, num_top: int | None = None, *, has_impossible: bool = True
    ) -> bytes:
        """Return a JSON array with one entry per position; -inf is written as `floor`, NaN as null.

        Args:
            record: the record.
            num_top: maximum number of alternatives per position; None for all of them.
            has_impossible: if False, leave out alternatives whose log-probability is -inf.

        Raises:
            ParameterError: a position has no chosen token, a token has no text, or `num_top` is negative.
        """
        return b"[" + self.entries(record, 0, len(record), num_top, has_impossible=has_impossible) + b"]"

    def rows(
        self,
        record: FlatLogprobs,
        rows: Sequence[int],
        num_top: int | None = None,
        *,
        has_impossible: bool = True,
        parts: Mapping[int, bytes] | None = None,
    ) -> msgspec.Raw:
        """Return a JSON array with the entries of the positions in `rows`, in that order, as in `content`.

        `parts` maps a position to the bytes to write instead of all bytes of its token, for tokens of which
        only a part belongs to the text. With `parts`, the encoder must have a table.

        Raises:
            ParameterError: a position has no chosen token, or `num_top` is negative.
        """
        write = partial(self.entries, record, num_top=num_top, has_impossible=has_impossible)
        if not parts:
            return _array(write(start, stop) for start, stop in runs(rows))
        written: list[bytes] = []
        for is_part, group in groupby(rows, parts.__contains__):
            if is_part:
                written += [self._of_part(write(row, row + 1), record, row, parts[row]) for row in group]
            else:
                written += [write(start, stop) for start, stop in runs([*group])]
        return _array(written)

    def _of_part(self, entry: bytes, record: FlatLogprobs, row: int, own_bytes: bytes) -> bytes:
        """Return the encoded entry of a position with its token's bytes replaced with `own_bytes`."""
        lists, parts = record.rows.top_lists(row), self._parts
        assert lists is not None, "the position has an entry"
        assert parts is not None, "the encoder has a table"
        return parts.head(lists.chosen_id, own_bytes) + entry.removeprefix(parts[lists.chosen_id])

    def entries(
        self,
        record: FlatLogprobs,
        start: int,
        stop: int,
        num_top: int | None = None,
        *,
        has_impossible: bool = True,
    ) -> bytes:
        """Return the entries of positions [start, stop) as in `content`, without the brackets.

        Raises:
            ParameterError: a position has no chosen token, or `num_top` is negative.
        """
        if num_top is not None and num_top < 0:
            raise ParameterError("num_top", f"{num_top} is negative; 0 leaves the top lists empty")
        rows, parts = record.rows, self._parts
        if parts is None:  # a token's text may differ between positions
            entries = [
                self._entry(lists, num_top, _Parts(_OwnTexts(record, row), has_bytes=self._has_bytes))
                for row, lists in enumerate(_lists(rows, start, stop, has_impossible), start)
            ]
            return b",".join(entries)
        if stop - start <= FEW_ROWS:
            lists = _lists(rows, start, stop, has_impossible)
            return b",".join([self._entry(one, num_top, parts) for one in lists])
        top = rows.top_entries(start, stop)
        top = top if has_impossible else top.possible()
        return self._joined(rows.chosen_entries(start, stop), top, num_top, parts)

    def _entry(self, lists: TopLists, num_top: int | None, parts: _Parts) -> bytes:
        """Encode one entry from Python values; for a single row, this is faster than one NumPy call."""
        values = (lists.chosen_logprob, *lists.top_logprobs[:num_top])
        numbers = msgspec.json.encode(values)[1:-1].split(b",")
        if b"null" in numbers:
            pairs = zip(numbers, values, strict=True)
            numbers = [self._floor_json if value == -inf else number for number, value in pairs]
        tokens = map(parts.__getitem__, (lists.chosen_id, *lists.top_ids[:num_top]))
        own, *best = map(add, tokens, numbers)
        return b'%b,"top_logprobs":[%b%b]}' % (own, b"},".join(best), b"}" if best else b"")

    def _joined(self, chosen: Entries, top: Entries, num_top: int | None, parts: _Parts) -> bytes:
        if len(chosen.token_ids) != len(top.offsets) - 1:
            raise _no_chosen_token()
        pieces, bounds = self._pieces(top, parts), top.offsets.tolist()
        stops = bounds[1:] if num_top is None else [start + num_top for start in bounds[:-1]]
        lists = [
            b"},".join(pieces[start : min(stop, end)])
            for start, stop, end in zip(bounds[:-1], stops, bounds[1:], strict=True)
        ]
        return b",".join(
            b'%b,"top_logprobs":[%b%b]}' % (piece, listed, b"}" if listed else b"")
            for piece, listed in zip(self._pieces(chosen, parts), lists, strict=True)
        )

    def _pieces(self, entries: Entries, parts: _Parts) -> list[bytes]:
        """Encode each entry as a JSON object without its closing brace."""
        tokens = map(parts.__getitem__, entries.token_ids.tolist())
        return list(map(add, tokens, self._numbers(entries.logprobs)))

    def _numbers(self, logprobs: Array) -> list[bytes]:
        finite = np.where(np.isneginf(logprobs), self._floor, logprobs)
        return msgspec.json.encode(finite.tolist())[1:-1].split(b",") if len(finite) else []


def _lists(rows: Rows, start: int, stop: int, has_impossible: bool) -> Iterator[TopLists]:
    for row in range(start, stop):
        lists = rows.top_lists(row)
        if lists is None:
            raise _no_chosen_token()
        yield lists if has_impossible else lists.possible()


def _no_chosen_token() -> ParameterError:
    return ParameterError("record", "a position has no chosen token; slice off a prompt's first position")


class IdTexts:
    """Token table with ids as texts, as in vLLM (`token_id:5`), and the real bytes of each token."""

    def __init__(self, table: TokenTable) -> None:
        self._table = table

    def token_text(self, token_id: int) -> str:
        """Return the text `token_id:<id>`."""
        return f"token_id:{token_id}"

    def token_bytes(self, token_id: int) -> bytes:
        """Return the exact bytes of the token."""
        return self._table.token_bytes(token_id)


class _OwnTexts:
    """Token table for one position, made from the texts stored with its entries."""

    def __init__(self, record: FlatLogprobs, row: int) -> None:
        self._texts = {token_id: entry.decoded_token for token_id, entry in (record[row] or {}).items()}

    def token_text(self, token_id: int) -> str:
        text = self._texts[token_id]
        if text is None:
            raise ParameterError("table", f"token {token_id} has no text; pass a token table")
        return text

    def token_bytes(self, token_id: int) -> bytes:
        return self.token_text(token_id).encode()


class _Parts(dict[int, bytes]):
    """Cache from token id to the encoded start of its JSON object, up to and including `"logprob":`."""

    def __init__(self, table: TokenTable, *, has_bytes: bool) -> None:
        super().__init__()
        self._table = table
        self._has_bytes = has_bytes

    def __missing__(self, token_id: int) -> bytes:
        self[token_id] = part = self.head(token_id, self._table.token_bytes(token_id))
        return part

    def head(self, token_id: int, own_bytes: bytes) -> bytes:
        """Encode the start of a token's JSON object, with `own_bytes` as the value of `bytes`."""
        text = msgspec.json.encode(self._table.token_text(token_id))
        if not self._has_bytes:
            return b'{"token":%b,"logprob":' % text
        return b'{"token":%b,"bytes":%b,"logprob":' % (text, msgspec.json.encode(list(own_bytes)))


# -- plain values --------------------------------------------------------------------------------------------


def token_item(token_id: int, table: TokenTable) -> dict[str, Any]:
    """Return a dict with the id, text and exact bytes of a token."""
    return {
        "token_id": token_id,
        "token": table.token_text(token_id),
        "bytes": list(table.token_bytes(token_id)),
    }


def entry_rows(record: FlatLogprobs, table: TokenTable) -> list[list[dict[str, Any]] | None]:
    """Return each position's entries as dicts, the chosen token first; None without a prediction."""
    entries = record.arrays
    rows = _items(entries, table)
    if entries.is_none is None:
        return [*rows]
    return [None if is_none else row for is_none, row in zip(entries.is_none.tolist(), rows, strict=True)]


def position_rows(
    record: FlatLogprobs, table: TokenTable, *, has_impossible: bool = True
) -> list[dict[str, Any] | None]:
    """Return one dict per position with the chosen token and `top_logprobs`; None without a prediction.

    `has_impossible=False` leaves out alternatives whose log-probability is -inf.
    """
    rows = record.rows
    chosen, top = rows.chosen_entries(0, len(record)), rows.top_entries(0, len(record))
    best = _items(top if has_impossible else top.possible(), table)
    pairs = zip(_items(chosen, table), best, strict=True)
    return [{**own[0], "top_logprobs": others} if own else None for own, others in pairs]


def id_rows(record: FlatLogprobs, table: TokenTable) -> list[dict[str, dict[str, Any]] | None]:
    """Return vLLM's map for each position: from id to logprob, rank and text; None without a prediction.

    The chosen token comes first.
    """
    names = {"logprob": "logprob", "rank": "rank", "decoded_token": "token"}
    return [
        None
        if row is None
        else {
            str(one["token_id"]): {name: one[own] for name, own in names.items()}
            for one in (row, *row["top_logprobs"])
        }
        for row in position_rows(record, table)
    ]


def legacy_rows(
    record: FlatLogprobs, table: TokenTable, *, has_impossible: bool = True
) -> dict[str, list[Any]]:
    """Return `token_logprobs` and `top_logprobs` as in OpenAI's legacy completions API.

    Each map in `top_logprobs` goes from text to logprob and holds the k most likely tokens (those at -inf
    only with `has_impossible`) and the chosen token. If two tokens have the same text, the key of the
    second is `token_id:N`. Positions without a prediction are None.
    """
    token_logprobs: list[float | None] = []
    maps: list[dict[str, float | None] | None] = []
    for row in position_rows(record, table, has_impossible=has_impossible):
        if row is None:
            token_logprobs.append(None)
            maps.append(None)
            continue
        best = row["top_logprobs"]
        is_among = any(entry["token_id"] == row["token_id"] for entry in best)
        token_logprobs.append(row["logprob"])
        maps.append(_text_map(best if is_among else [*best, row]))
    return {"token_logprobs": token_logprobs, "top_logprobs": maps}


def _items(entries: Entries, table: TokenTable) -> list[list[dict[str, Any]]]:
    columns = (entries.token_ids.tolist(), finite(entries.logprobs), entries.rank_list())
    items = [
        token_item(token_id, table) | {"logprob": logprob, "rank": rank}
        for token_id, logprob, rank in zip(*columns, strict=True)
    ]
    return [items[start:stop] for start, stop in pairwise(entries.offsets.tolist())]


def _text_map(row: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    numbers: dict[str, float | None] = {}
    for entry in row:
        key: str = entry["token"]
        while key in numbers:
            # If a token's text is itself `token_id:5`, append an apostrophe.
            key = f"token_id:{entry['token_id']}" if not key.startswith("token_id:") else f"{key}'"
        numbers[key] = entry["logprob"]
    return numbers


def runs(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Group consecutive numbers into half-open ranges."""
    if not rows:
        return []
    if rows[-1] - rows[0] + 1 == len(rows):
        return [(rows[0], rows[-1] + 1)]
    breaks = [place for place in range(1, len(rows)) if rows[place] != rows[place - 1] + 1]
    edges = [0, *breaks, len(rows)]
    return [(rows[start], rows[stop - 1] + 1) for start, stop in pairwise(edges)]


def _array(entries: Iterable[bytes]) -> msgspec.Raw:
    return msgspec.Raw(b"[" + b",".join(entries) + b"]")
