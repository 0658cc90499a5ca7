"""Chat `content` entries as JSON bytes, straight from a record's arrays.

Before it: `FlatLogprobs`. After it: a chat reply or one chunk of a stream.
"""

from __future__ import annotations

from math import inf
from operator import add
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from logprobe.errors import ParameterError

if TYPE_CHECKING:
    from logprobe.records.flat import FlatLogprobs
    from logprobe.records.store.columns import Array
    from logprobe.records.store.entries import Entries
    from logprobe.records.store.rows import Store
    from logprobe.records.values import TokenTable

IMPOSSIBLE = -9999.0  # what JSON says for -inf, as other servers do
FEW_ROWS = 8  # up to here rows one by one are quicker than arrays of all of them


class ChatEncoder:
    """Writes OpenAI's `{token, bytes, logprob, top_logprobs}`; a token's own part is encoded once.

    Without `has_bytes` the entries have no `bytes`, as in the events of `/v1/responses`.
    """

    def __init__(self, table: TokenTable, *, floor: float = IMPOSSIBLE, has_bytes: bool = True) -> None:
        self._floor = floor
        self._floor_json = msgspec.json.encode(float(np.float32(floor)))
        self._parts = _Parts(table, has_bytes=has_bytes)

    def content(self, record: FlatLogprobs, num_top: int | None = None) -> bytes:
        """A JSON array, one entry a position; `num_top` cuts the k best further, None keeps them all.

        -inf is written as `floor`, NaN as null.

        Raises:
            ParameterError: a position without a chosen token, or a negative num_top.
        """
        return b"[" + self.entries(record, 0, len(record), num_top) + b"]"

    def entries(self, record: FlatLogprobs, start: int, stop: int, num_top: int | None = None) -> bytes:
        """The entries of positions [start, stop) as `content` writes them, without the brackets.

        Raises:
            ParameterError: a position without a chosen token, or a negative num_top.
        """
        if num_top is not None and num_top < 0:
            raise ParameterError("num_top", f"{num_top} is negative; 0 leaves the top lists empty")
        store = record.rows.store
        if stop - start <= FEW_ROWS:
            return b",".join([self._entry(store, row, num_top) for row in range(start, stop)])
        return self._joined(store, start, stop, num_top)

    def _entry(self, store: Store, row: int, num_top: int | None) -> bytes:
        """One entry from Python values: each numpy call of the joined form costs as much as all of it."""
        lists = None if store.is_none(row) else store.top_lists(row)
        if lists is None:
            raise _no_chosen_token()
        values = (lists.chosen_logprob, *lists.top_logprobs[:num_top])
        numbers = msgspec.json.encode(values)[1:-1].split(b",")
        if b"null" in numbers:
            pairs = zip(numbers, values, strict=True)
            numbers = [self._floor_json if value == -inf else number for number, value in pairs]
        parts = map(self._parts.__getitem__, (lists.chosen_id, *lists.top_ids[:num_top]))
        own, *best = map(add, parts, numbers)
        return b'%b,"top_logprobs":[%b%b]}' % (own, b"},".join(best), b"}" if best else b"")

    def _joined(self, store: Store, start: int, stop: int, num_top: int | None) -> bytes:
        chosen, top = store.chosen_entries(start, stop), store.top_entries(start, stop)
        if len(chosen.token_ids) != stop - start:
            raise _no_chosen_token()
        pieces, bounds = self._pieces(top), top.offsets.tolist()
        stops = bounds[1:] if num_top is None else [start + num_top for start in bounds[:-1]]
        lists = [
            b"},".join(pieces[start : min(stop, end)])
            for start, stop, end in zip(bounds[:-1], stops, bounds[1:], strict=True)
        ]
        return b",".join(
            b'%b,"top_logprobs":[%b%b]}' % (piece, listed, b"}" if listed else b"")
            for piece, listed in zip(self._pieces(chosen), lists, strict=True)
        )

    def _pieces(self, entries: Entries) -> list[bytes]:
        """Each entry as a JSON object that is still open."""
        parts = map(self._parts.__getitem__, entries.token_ids.tolist())
        return list(map(add, parts, self._numbers(entries.logprobs)))

    def _numbers(self, logprobs: Array) -> list[bytes]:
        finite = np.where(np.isneginf(logprobs), self._floor, logprobs)
        return msgspec.json.encode(finite.tolist())[1:-1].split(b",") if len(finite) else []


def _no_chosen_token() -> ParameterError:
    return ParameterError("record", "a position has no chosen token; slice the prompt's first one off")


class _Parts(dict[int, bytes]):
    """Token id → all that stands before its number, encoded when first asked for."""

    def __init__(self, table: TokenTable, *, has_bytes: bool) -> None:
        super().__init__()
        self._table = table
        self._has_bytes = has_bytes

    def __missing__(self, token_id: int) -> bytes:
        text = msgspec.json.encode(self._table.token_text(token_id))
        part = b'{"token":%b,"logprob":' % text
        if self._has_bytes:
            own_bytes = msgspec.json.encode(list(self._table.token_bytes(token_id)))
            part = b'{"token":%b,"bytes":%b,"logprob":' % (text, own_bytes)
        self[token_id] = part
        return part
