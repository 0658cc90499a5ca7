"""Regular rows, packed: k best tokens and the chosen one, exact, in the bytes of the entries alone.

The k best stand in a matrix of ids and one of float32. Log-probabilities are never positive, so the sign bits
of the float32 matrix are free: they hold each row's key, which says where the chosen token stands (inside the
k best, or outside with which rank). Chosen tokens outside the k best stand apart, in row order. Rows narrower
than 20 have too few sign bits and keep the key in a column.

Before it: `FlatLogprobs`. After it: readers of one position or of whole columns.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import numpy as np

from logprobe.records.store.columns import Array, Column, narrowest_id_dtype
from logprobe.records.store.ragged_rows import Entries, RowLists
from logprobe.records.store.row_keys import (
    MAX_KEY_BITS,
    RowKey,
    decode_key,
    decode_keys,
    encode_key,
    encode_keys,
    num_sign_bits,
    read_sign,
    read_signs,
    signs_of,
    write_signs,
)
from logprobe.records.store.top_columns import TopColumns, TopLists

MAX_LIST_K = 64  # up to here one row is quicker as Python values than as an array
_LARGEST_ID = {2: (1 << 16) - 1, 4: (1 << 31) - 1, 8: (1 << 63) - 1}  # by bytes of the column's type
_ZERO_AT_LEAST = (0.0).__ge__


class TopRows:
    """Rows of the k best tokens plus the chosen one; leading positions may be None.

    `repeats_chosen` says whether the public columns show a chosen token that is among the k best twice, as
    they were given by `append_fast`, or once.
    """

    __slots__ = (
        "_before",
        "_keys",
        "_magnitudes",
        "_num_bits",
        "_outside_ids",
        "_outside_logprobs",
        "_token_ids",
        "k",
        "num_none",
        "num_outside",
        "num_rows",
        "repeats_chosen",
    )

    def __init__(self, k: int, *, num_none: int = 0, repeats_chosen: bool = False) -> None:
        self.k, self.num_none, self.repeats_chosen = k, num_none, repeats_chosen
        self._token_ids = Column(np.uint16, k)  # (n, k)
        self._magnitudes = Column(np.float32, k)  # (n, k) |logprob|; sign bits hold the key where k allows
        self._keys = None if num_sign_bits(k) else Column(np.uint16)  # (n,) value << 1 | is_outside
        self._outside_ids = Column(np.uint16)  # (m,) chosen tokens outside the k best, in row order
        self._outside_logprobs = Column(np.float32)  # (m,)
        self._before: list[int] = []  # chosen tokens outside the k best, before each block of keys
        self._num_bits = num_sign_bits(k)
        self.num_outside = 0
        self.num_rows = num_none  # published last: a reader that sees a row finds all of it

    @property
    def nbytes(self) -> int:
        """Bytes of the values held."""
        keys = 0 if self._keys is None else self._keys.row_nbytes()
        per_row = self._token_ids.row_nbytes() + self._magnitudes.row_nbytes() + keys
        per_outside = self._outside_ids.row_nbytes() + self._outside_logprobs.row_nbytes()
        return (self.num_rows - self.num_none) * per_row + self.num_outside * per_outside

    def append(self, token_ids: Array, logprobs: Array, ranks: Array) -> bool:
        """Add rows (n, k + 1), column 0 chosen, if this form holds them exactly; say whether it did.

        It does not hold: negative ids, positive or NaN values, a chosen token whose value differs from its
        value among the k best, a rank that contradicts the place there, or a rank too large for the key.
        """
        # As unsigned numbers negative ids are the largest, so one pass finds both bounds.
        largest_id = int(token_ids.view(f"u{token_ids.itemsize}").max(initial=0))
        if np.count_nonzero(logprobs <= 0) < logprobs.size or largest_id > np.iinfo(token_ids.dtype).max:
            return False
        hits = token_ids[:, 1:] == token_ids[:, :1]
        is_inside = hits.any(axis=1)
        keys = encode_keys(hits.argmax(axis=1) if self.k else ranks, is_inside, ranks)
        if keys is None or int(keys.view(np.uint64).max(initial=0)) >> (self._num_bits or MAX_KEY_BITS):
            return False
        if not _agree(logprobs, hits, is_inside):
            return False
        at = self.num_rows - self.num_none
        self._fit_ids(largest_id)
        self._token_ids.write(at, token_ids[:, 1:])
        self._write_keyed(at, logprobs[:, 1:], keys)
        self._write_outside(at, ~is_inside, token_ids[:, 0], logprobs[:, 0])
        self.num_rows += len(token_ids)
        return True

    def append_one(self, token_ids: Array, logprobs: Array, ranks: Array) -> bool:
        """`append` of one narrow row in a few microseconds; False also where `append` should look again."""
        k = self.k
        if self.repeats_chosen or token_ids.shape[1] != k + 1 or k > MAX_LIST_K:
            return False
        ids, values = token_ids[0].tolist(), logprobs[0].tolist()
        largest_id = _LARGEST_ID[self._token_ids.dtype.itemsize]
        if logprobs.dtype != np.float32 or max(ids) > largest_id or min(ids) < 0:
            return False
        key = _key_of_lists(ids, values, int(ranks[0]))
        num_bits = self._num_bits if self._keys is None else 8 * self._keys.dtype.itemsize
        if key is None or key >> num_bits:
            return False
        at = self.num_rows - self.num_none
        self._token_ids.write_one(at, token_ids[0, 1:])
        if self._keys is None:
            self._magnitudes.write_one(at, np.copysign(logprobs[0, 1:], signs_of(key, k)))
        else:
            self._keys.write_one(at, key)
            self._magnitudes.write_one(at, -logprobs[0, 1:])
        if len(self._before) < len(self._key_column().starts):
            self._before.append(self.num_outside)
        if key & 1:
            self._outside_ids.write_one(self.num_outside, ids[0])
            self._outside_logprobs.write_one(self.num_outside, values[0])
            self.num_outside += 1
        self.num_rows += 1
        return True

    def _fit_ids(self, largest_id: int) -> None:
        if largest_id > _LARGEST_ID[self._token_ids.dtype.itemsize]:
            self._token_ids.widen(narrowest_id_dtype(largest_id), self.num_rows - self.num_none)
            self._outside_ids.widen(narrowest_id_dtype(largest_id), self.num_outside)

    def _write_keyed(self, at: int, top_logprobs: Array, keys: Array) -> None:
        magnitudes = np.abs(top_logprobs, dtype=np.float32)
        if self._keys is None:
            write_signs(magnitudes, keys)
        else:
            needed = np.min_scalar_type(int(keys.max(initial=0)))
            if needed.itemsize > self._keys.dtype.itemsize:
                self._keys.widen(needed, at)
            self._keys.write(at, keys)
        self._magnitudes.write(at, magnitudes)

    def _write_outside(self, at: int, is_outside: Array, ids: Array, logprobs: Array) -> None:
        before, starts = self.num_outside, self._key_column().starts
        while len(self._before) < len(starts):
            start = starts[len(self._before)]
            self._before.append(before + int(np.count_nonzero(is_outside[: start - at])))
        places = np.flatnonzero(is_outside)
        if len(places):
            self._outside_ids.write(before, ids[places])
            self._outside_logprobs.write(before, logprobs[places])
            self.num_outside += len(places)

    def key(self, row: int) -> RowKey:
        """Where the chosen token of a row stands."""
        row -= self.num_none
        key = read_sign(self._magnitudes.row(row)) if self._keys is None else int(self._keys.row(row))
        return decode_key(key, self.k)

    def top_row(self, row: int) -> tuple[Array, Array]:
        """The k best of a row: ids (k,), logprobs (k,) float32."""
        ids = self._token_ids.row(row - self.num_none)
        return ids, np.float32(0) - np.abs(self._magnitudes.row(row - self.num_none))

    def outside(self, row: int) -> tuple[int, float]:
        """Id and logprob of the chosen token of a row that lies outside the k best."""
        place = self._num_outside_before(row - self.num_none)
        return int(self._outside_ids.row(place)), float(self._outside_logprobs.row(place))

    def lists(self, row: int) -> TopLists:
        """One row, not None, unpacked."""
        is_outside, place, rank = self.key(row)
        ids, logprobs = (values.tolist() for values in self.top_row(row))
        chosen_id, chosen_logprob = self.outside(row) if is_outside else (ids[place], logprobs[place])
        return TopLists(ids, logprobs, place, chosen_id, chosen_logprob, rank)

    def row(self, row: int) -> RowLists:
        """One row, not None, as Python values."""
        ids, logprobs, place, chosen_id, chosen_logprob, rank = self.lists(row)
        ranks = list(range(1, self.k + 1))
        if not self.repeats_chosen:
            for column in (ids, logprobs, ranks):
                del column[place : place + 1]  # none where it is outside
        return RowLists([chosen_id, *ids], [chosen_logprob, *logprobs], [rank, *ranks], None)

    def columns(self, start: int, stop: int) -> TopColumns:
        """Rows [start, stop), none of them None, unpacked."""
        first, last = start - self.num_none, stop - self.num_none
        top_ids = self._token_ids.read(first, last)
        packed = self._magnitudes.read(first, last)
        is_outside, places, ranks = decode_keys(self._read_keys(first, last), self.k)
        top_logprobs = np.float32(0) - np.abs(packed)
        chosen_ids, chosen_logprobs = (
            np.empty(last - first, top_ids.dtype),
            np.empty(last - first, np.float32),
        )
        inside = np.flatnonzero(~is_outside)
        chosen_ids[inside] = top_ids[inside, places[inside]]
        chosen_logprobs[inside] = top_logprobs[inside, places[inside]]
        before, after = self._num_outside_before(first), self._num_outside_before(last)
        chosen_ids[is_outside] = self._outside_ids.read(before, after)
        chosen_logprobs[is_outside] = self._outside_logprobs.read(before, after)
        return TopColumns(
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            places=places,
            chosen_ids=chosen_ids,
            chosen_logprobs=chosen_logprobs,
            chosen_ranks=ranks,
        )

    def entries(self, start: int, stop: int) -> Entries:
        """The public columns of rows [start, stop)."""
        num_none = max(min(stop, self.num_none) - start, 0)
        rows = self.columns(start + num_none, stop) if stop > start + num_none else None
        if rows is None:
            flat = (np.empty(0, np.uint16), np.empty(0, np.float32), np.empty(0, np.int64))
        else:
            flat = rows.flattened(repeats_chosen=self.repeats_chosen)
        is_none = np.arange(stop - start) < num_none
        return Entries(
            offsets=self.offsets(start, stop) - self.first_entry(start),
            token_ids=flat[0],
            logprobs=flat[1],
            ranks=flat[2],
            is_none=is_none if num_none else None,
        )

    def offsets(self, start: int, stop: int) -> Array:
        """Entry offsets of rows [start, stop), (stop - start + 1,) int64, from the store's first entry."""
        rows = np.maximum(np.arange(start, stop + 1, dtype=np.int64) - self.num_none, 0)
        if self.repeats_chosen:
            return rows * (self.k + 1)
        offsets = rows * self.k
        first, last = int(rows[0]), int(rows[-1])
        offsets += self._num_outside_before(first)
        num_none = len(rows) - 1 - (last - first)
        offsets[num_none + 1 :] += np.cumsum(self._is_outside(first, last))
        return offsets

    def row_of(self, entry: int) -> int:
        """The row that holds entry `entry`."""
        low, high = self.num_none, self.num_rows - 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.first_entry(middle) <= entry else (low, middle - 1)
        return low

    def is_none(self, row: int) -> bool:
        """Whether the position was appended as None."""
        return row < self.num_none

    def first_entry(self, row: int) -> int:
        """Number of entries before a row."""
        row = max(row - self.num_none, 0)
        return row * (self.k + 1) if self.repeats_chosen else row * self.k + self._num_outside_before(row)

    def _key_column(self) -> Column:
        return self._magnitudes if self._keys is None else self._keys

    def _is_outside(self, first: int, last: int) -> Array:
        if self._keys is None:
            parts = [np.signbit(part[:, 0]) for part in self._magnitudes.parts(first, last)]
        else:
            parts = [(part & 1).astype(np.bool_) for part in self._keys.parts(first, last)]
        return np.concatenate(parts) if parts else np.empty(0, np.bool_)

    def _num_outside_before(self, row: int) -> int:
        starts = self._key_column().starts
        number = bisect_right(starts, row, hi=len(self._before)) - 1
        if number < 0:
            return 0
        return self._before[number] + int(np.count_nonzero(self._is_outside(starts[number], row)))

    def _read_keys(self, first: int, last: int) -> Array:
        if self._keys is not None:
            return self._keys.read(first, last).astype(np.int64)
        parts = [read_signs(part) for part in self._magnitudes.parts(first, last)]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    # -- carrying ----------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, int], dict[str, Array]]:
        """Scalars and columns from which `from_state` builds the same store."""
        num_rows = self.num_rows - self.num_none
        num_outside = self._num_outside_before(num_rows)
        columns = {
            "token_ids": self._token_ids.read(0, num_rows),
            "magnitudes": self._magnitudes.read(0, num_rows),
            "outside_ids": self._outside_ids.read(0, num_outside),
            "outside_logprobs": self._outside_logprobs.read(0, num_outside),
        }
        if self._keys is not None:
            columns["keys"] = self._keys.read(0, num_rows)
        return {
            name: getattr(self, name) for name in ("num_rows", "num_none", "k", "repeats_chosen")
        }, columns

    @classmethod
    def from_state(cls, scalars: dict[str, Any], columns: dict[str, Array]) -> TopRows:
        """Build a store on columns that `state` gave, without a copy."""
        store = cls(scalars["k"], num_none=scalars["num_none"], repeats_chosen=scalars["repeats_chosen"])
        store._token_ids = Column.of(columns["token_ids"])
        store._magnitudes = Column.of(columns["magnitudes"])
        store._outside_ids = Column.of(columns["outside_ids"])
        store._outside_logprobs = Column.of(columns["outside_logprobs"])
        store._keys = Column.of(columns["keys"]) if "keys" in columns else None
        store._before = [0 for _ in store._key_column().starts]
        store.num_outside, store.num_rows = len(columns["outside_ids"]), scalars["num_rows"]
        return store

    # -- cutting -----------------------------------------------------------------------------------------

    def view(self, start: int, stop: int) -> TopRows:
        """Rows [start, stop) sharing this store's memory."""
        num_none = max(min(stop, self.num_none) - start, 0)
        part = TopRows(self.k, num_none=num_none, repeats_chosen=self.repeats_chosen)
        first, last = max(start - self.num_none, 0), max(stop - self.num_none, 0)
        before, after = self._num_outside_before(first), self._num_outside_before(last)
        part._token_ids = self._token_ids.view(first, last)
        part._magnitudes = self._magnitudes.view(first, last)
        part._keys = None if self._keys is None else self._keys.view(first, last)
        part._outside_ids = self._outside_ids.view(before, after)
        part._outside_logprobs = self._outside_logprobs.view(before, after)
        part._before = [self._num_outside_before(first + at) - before for at in part._key_column().starts]
        part.num_outside, part.num_rows = after - before, stop - start
        return part

    def take(self, rows: Array) -> TopRows:
        """The rows named, in that order, copied; None rows only in front."""
        kept = rows[rows >= self.num_none] - self.num_none
        part = TopRows(self.k, num_none=len(rows) - len(kept), repeats_chosen=self.repeats_chosen)
        if not len(kept):
            return part
        first, last = int(kept.min()), int(kept.max()) + 1
        kept = kept - first
        is_outside = self._is_outside(first, last)
        before = self._num_outside_before(first)
        places = (np.cumsum(is_outside) - 1)[kept[is_outside[kept]]]
        after = before + int(np.count_nonzero(is_outside))
        part._token_ids = Column.of(self._token_ids.read(first, last)[kept])
        part._magnitudes = Column.of(self._magnitudes.read(first, last)[kept])
        part._keys = None if self._keys is None else Column.of(self._keys.read(first, last)[kept])
        part._outside_ids = Column.of(self._outside_ids.read(before, after)[places])
        part._outside_logprobs = Column.of(self._outside_logprobs.read(before, after)[places])
        part._before, part.num_outside, part.num_rows = [0], len(places), len(rows)
        return part


def _key_of_lists(ids: list[int], values: list[float], rank: int) -> int | None:
    """Key of a row with its chosen token first; None where the row does not pack."""
    if not all(map(_ZERO_AT_LEAST, values)):
        return None
    count = ids.count(ids[0])
    if count == 1:
        return encode_key(None, rank)
    place = ids.index(ids[0], 1)
    return encode_key(place - 1, rank) if count == 2 and values[place] == values[0] else None


def _agree(logprobs: Array, hits: Array, is_inside: Array) -> bool:
    """Whether each chosen token found among the k best stands there once, with the same value."""
    agreeing = hits & (logprobs[:, 1:] == logprobs[:, :1])
    counts = {int(np.count_nonzero(found)) for found in (is_inside, hits, agreeing)}
    return len(counts) == 1
