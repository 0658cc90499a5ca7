"""Chat `content` entries as JSON bytes, straight from a record's arrays.

Before it: `FlatLogprobs`. After it: a chat reply or one chunk of a stream.
"""

from __future__ import annotations

from operator import add
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from logprobe.errors import ParameterError

if TYPE_CHECKING:
    from logprobe.records.columns import Array
    from logprobe.records.flat import FlatLogprobs
    from logprobe.records.ragged_rows import Entries
    from logprobe.records.values import TokenTable

IMPOSSIBLE = -9999.0  # what JSON says for -inf, as other servers do


class ChatEncoder:
    """Writes OpenAI's `{token, bytes, logprob, top_logprobs}`; a token's own part is encoded once."""

    def __init__(self, table: TokenTable, *, floor: float = IMPOSSIBLE) -> None:
        self._table = table
        self._floor = floor
        self._parts: dict[int, bytes] = {}  # token id -> all that stands before its number

    def content(self, record: FlatLogprobs, num_top: int | None = None) -> bytes:
        """A JSON array, one entry a position; `num_top` cuts the k best further, None keeps them all.

        -inf is written as `floor`, NaN as null.

        Raises:
            ParameterError: a position without a chosen token, or a negative num_top.
        """
        if num_top is not None and num_top < 0:
            raise ParameterError("num_top", f"{num_top} is negative; 0 leaves the top lists empty")
        chosen, top = record.chosen_entries(), record.top_entries()
        if len(chosen.token_ids) != len(record):
            raise ParameterError("record", "a position has no chosen token; slice the prompt's first one off")
        pieces, bounds = self._pieces(top), top.offsets.tolist()
        stops = bounds[1:] if num_top is None else [start + num_top for start in bounds[:-1]]
        lists = [
            b"},".join(pieces[start : min(stop, end)])
            for start, stop, end in zip(bounds[:-1], stops, bounds[1:], strict=True)
        ]
        entries = [
            b'%b,"top_logprobs":[%b%b]}' % (piece, listed, b"}" if listed else b"")
            for piece, listed in zip(self._pieces(chosen), lists, strict=True)
        ]
        return b"[" + b",".join(entries) + b"]"

    def _pieces(self, entries: Entries) -> list[bytes]:
        """Each entry as a JSON object that is still open."""
        ids, numbers = entries.token_ids.tolist(), self._numbers(entries.logprobs)
        parts = self._parts
        for token_id in set(ids).difference(parts):
            parts[token_id] = self._part(token_id)
        return list(map(add, map(parts.__getitem__, ids), numbers))

    def _part(self, token_id: int) -> bytes:
        text = msgspec.json.encode(self._table.token_text(token_id))
        own_bytes = msgspec.json.encode(list(self._table.token_bytes(token_id)))
        return b'{"token":%b,"bytes":%b,"logprob":' % (text, own_bytes)

    def _numbers(self, logprobs: Array) -> list[bytes]:
        finite = np.where(np.isneginf(logprobs), self._floor, logprobs)
        return msgspec.json.encode(finite.tolist())[1:-1].split(b",") if len(finite) else []
