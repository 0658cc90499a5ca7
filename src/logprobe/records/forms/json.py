"""Rows of log-probabilities as JSON, straight from a record's arrays: chat entries, legacy maps, rows by id.

Infinity and NaN are written as `finite` has them.
Before it: `FlatLogprobs`. After it: replies, chunks of a stream, `--json`.
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

FEW_ROWS = 8  # up to here rows one by one are quicker than arrays of all of them


class ChatEncoder:
    """Writes OpenAI's `{token, bytes, logprob, top_logprobs}`; a token's own part is encoded once.

    Without a table a record's own texts are written, those of its table or given with its entries, and their
    UTF-8 as bytes. Without `has_bytes` the entries have no `bytes`, as in OpenAI's events of responses.
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
        """A JSON array, one entry a position; `num_top` cuts the k best further, None keeps them all.

        -inf is written as `floor`, NaN as null. Without `has_impossible` alternatives that are -inf are left
        out.

        Raises:
            ParameterError: a position without a chosen token, a token without a text, or a negative num_top.
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
        """A JSON array of the positions named, in order, as `content` writes them.

        `parts` has the bytes of positions of which not all of a token counts; the encoder has a table.

        Raises:
            ParameterError: a position without a chosen token, or a negative num_top.
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
        """The entry of a position with these bytes in place of its token's."""
        lists, parts = record.rows.top_lists(row), self._parts
        assert lists is not None, "it has an entry"
        assert parts is not None, "the token's bytes are a table's"
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
        """The entries of positions [start, stop) as `content` writes them, without the brackets.

        Raises:
            ParameterError: a position without a chosen token, or a negative num_top.
        """
        if num_top is not None and num_top < 0:
            raise ParameterError("num_top", f"{num_top} is negative; 0 leaves the top lists empty")
        rows, parts = record.rows, self._parts
        if parts is None:  # a token's text may differ from place to place
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
        """One entry from Python values: each numpy call of the joined form costs as much as all of it."""
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
        """Each entry as a JSON object that is still open."""
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
    return ParameterError("record", "a position has no chosen token; slice the prompt's first one off")


class IdTexts:
    """A table whose texts are ids, as vLLM writes them (`token_id:5`); their bytes stay the tokens' own."""

    def __init__(self, table: TokenTable) -> None:
        self._table = table

    def token_text(self, token_id: int) -> str:
        """The id as a text."""
        return f"token_id:{token_id}"

    def token_bytes(self, token_id: int) -> bytes:
        """The token's own bytes."""
        return self._table.token_bytes(token_id)


class _OwnTexts:
    """The table of one position: the texts that came with its entries."""

    def __init__(self, record: FlatLogprobs, row: int) -> None:
        self._texts = {token_id: entry.decoded_token for token_id, entry in (record[row] or {}).items()}

    def token_text(self, token_id: int) -> str:
        text = self._texts[token_id]
        if text is None:
            raise ParameterError("table", f"the token {token_id} came without a text; give a table of texts")
        return text

    def token_bytes(self, token_id: int) -> bytes:
        return self.token_text(token_id).encode()


class _Parts(dict[int, bytes]):
    """Token id → all that stands before its number, encoded when first asked for."""

    def __init__(self, table: TokenTable, *, has_bytes: bool) -> None:
        super().__init__()
        self._table = table
        self._has_bytes = has_bytes

    def __missing__(self, token_id: int) -> bytes:
        self[token_id] = part = self.head(token_id, self._table.token_bytes(token_id))
        return part

    def head(self, token_id: int, own_bytes: bytes) -> bytes:
        """A token's own part, where these are its bytes."""
        text = msgspec.json.encode(self._table.token_text(token_id))
        if not self._has_bytes:
            return b'{"token":%b,"logprob":' % text
        return b'{"token":%b,"bytes":%b,"logprob":' % (text, msgspec.json.encode(list(own_bytes)))


# -- plain values --------------------------------------------------------------------------------------------


def token_item(token_id: int, table: TokenTable) -> dict[str, Any]:
    """A token's identity: id, text, exact bytes."""
    return {
        "token_id": token_id,
        "token": table.token_text(token_id),
        "bytes": list(table.token_bytes(token_id)),
    }


def entry_rows(record: FlatLogprobs, table: TokenTable) -> list[list[dict[str, Any]] | None]:
    """Every entry of every position with id, logprob and rank, the chosen token first; None for None."""
    entries = record.arrays
    rows = _items(entries, table)
    if entries.is_none is None:
        return [*rows]
    return [None if is_none else row for is_none, row in zip(entries.is_none.tolist(), rows, strict=True)]


def position_rows(
    record: FlatLogprobs, table: TokenTable, *, has_impossible: bool = True
) -> list[dict[str, Any] | None]:
    """One object a position: the chosen token's numbers and the k best; None where nothing predicts it.

    Without `has_impossible` alternatives that are -inf are left out.
    """
    rows = record.rows
    chosen, top = rows.chosen_entries(0, len(record)), rows.top_entries(0, len(record))
    best = _items(top if has_impossible else top.possible(), table)
    pairs = zip(_items(chosen, table), best, strict=True)
    return [{**own[0], "top_logprobs": others} if own else None for own, others in pairs]


def id_rows(record: FlatLogprobs, table: TokenTable) -> list[dict[str, dict[str, Any]] | None]:
    """A map a position, as vLLM has it: id → logprob, rank, text, the chosen token first; None for None."""
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
    """`token_logprobs` and `top_logprobs` of all positions; None where nothing predicts the token.

    A map holds the k best, without those that are -inf where `has_impossible` says so, and the chosen token;
    of two tokens with one text the later is `token_id:N`.
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
            # A token may itself be written `token_id:5`; the next form is free then.
            key = f"token_id:{entry['token_id']}" if not key.startswith("token_id:") else f"{key}'"
        numbers[key] = entry["logprob"]
    return numbers


def runs(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Consecutive numbers as half-open ranges."""
    if not rows:
        return []
    if rows[-1] - rows[0] + 1 == len(rows):
        return [(rows[0], rows[-1] + 1)]
    breaks = [place for place in range(1, len(rows)) if rows[place] != rows[place - 1] + 1]
    edges = [0, *breaks, len(rows)]
    return [(rows[start], rows[stop - 1] + 1) for start, stop in pairwise(edges)]


def _array(entries: Iterable[bytes]) -> msgspec.Raw:
    return msgspec.Raw(b"[" + b",".join(entries) + b"]")
