"""Chat `content` entries as JSON bytes, straight from a record's arrays.

Before it: `FlatLogprobs`. After it: a chat reply or one chunk of a stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from logprobe.errors import ParameterError

if TYPE_CHECKING:
    from logprobe.records.columns import Array
    from logprobe.records.flat import FlatLogprobs
    from logprobe.records.values import TokenTable

IMPOSSIBLE = -9999.0  # what JSON says for -inf, as other servers do


class ChatEncoder:
    """Writes OpenAI's `{token, logprob, bytes, top_logprobs}`; a token's own part is encoded once."""

    def __init__(self, table: TokenTable, *, floor: float = IMPOSSIBLE) -> None:
        self._table = table
        self._floor = floor
        self._parts: dict[
            int, tuple[bytes, bytes]
        ] = {}  # token id -> what stands before and after its number

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
        numbers, bounds = self._numbers(top.logprobs), top.offsets.tolist()
        ids, entries = top.token_ids.tolist(), []
        for place, (token_id, number) in enumerate(
            zip(chosen.token_ids.tolist(), self._numbers(chosen.logprobs), strict=True)
        ):
            start, stop = bounds[place], bounds[place + 1]
            stop = stop if num_top is None else min(stop, start + num_top)
            before, after = self._part(token_id)
            listed = b",".join(self._listed(ids[start:stop], numbers[start:stop]))
            entries.append(b'%b%b%b,"top_logprobs":[%b]}' % (before, number, after, listed))
        return b"[" + b",".join(entries) + b"]"

    def _listed(self, ids: list[int], numbers: list[bytes]) -> list[bytes]:
        parts = self._parts
        try:
            return [
                b"%b%b%b}" % (parts[i][0], number, parts[i][1])
                for i, number in zip(ids, numbers, strict=True)
            ]
        except KeyError:
            for token_id in ids:
                self._part(token_id)
            return self._listed(ids, numbers)

    def _part(self, token_id: int) -> tuple[bytes, bytes]:
        part = self._parts.get(token_id)
        if part is None:
            text = msgspec.json.encode(self._table.token_text(token_id))
            own_bytes = msgspec.json.encode(list(self._table.token_bytes(token_id)))
            part = b'{"token":%b,"logprob":' % text, b',"bytes":%b' % own_bytes
            self._parts[token_id] = part
        return part

    def _numbers(self, logprobs: Array) -> list[bytes]:
        finite = np.where(np.isneginf(logprobs), self._floor, logprobs)
        return msgspec.json.encode(finite.tolist())[1:-1].split(b",") if len(finite) else []
