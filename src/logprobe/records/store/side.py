"""Optional data per position of a record: extra columns, caller-specified ids, ids kept by truncation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from logprobe.errors import ParameterError
from logprobe.records.rows import EXTRAS
from logprobe.records.store.columns import Column
from logprobe.records.store.rows import Rows

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from logprobe.records.info import LogprobsInfo
    from logprobe.records.store.columns import Array
    from logprobe.records.store.entries import Entries


class IdRuns:
    """A list of ascending token ids per position, stored as one column of ids and one of offsets."""

    __slots__ = ("_offsets", "_token_ids", "length")

    def __init__(self, offsets: Array | None = None, token_ids: Array | None = None) -> None:
        self._offsets = Column(np.zeros(1, np.int64))
        self._token_ids = Column(np.empty(0, np.uint16))
        self.length = 0
        if offsets is not None and token_ids is not None:
            self.append(offsets, token_ids)

    def append(self, offsets: npt.ArrayLike, token_ids: npt.ArrayLike) -> None:
        """Add n positions; position i gets token_ids[offsets[i] - offsets[0] : offsets[i + 1] - offsets[0]].

        Raises:
            ParameterError: the difference of the last and first offset is not the number of ids.
        """
        bounds, ids = _checked_runs(offsets, token_ids)
        self._token_ids.append(ids)
        self._offsets.append(bounds[1:] - bounds[0] + self._end(self.length))
        self.length += len(bounds) - 1

    def _end(self, num_positions: int) -> int:
        return int(self._offsets.read(num_positions, num_positions + 1)[0])

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, position: int) -> Array:
        """Return the ids of one position, ascending."""
        place = range(self.length)[position]
        return self._token_ids.read(self._end(place), self._end(place + 1))

    def arrays(self, num_positions: int | None = None) -> tuple[Array, Array]:
        """Return the offsets (T + 1,) int64 and the ids of the first `num_positions` positions, or of all."""
        length = self.length if num_positions is None else num_positions
        offsets = self._offsets.read(0, length + 1)
        return offsets, self._token_ids.read(0, int(offsets[-1]))

    def cut(self, places: range) -> IdRuns:
        """Select positions."""
        runs = [self[place] for place in places]
        return IdRuns(np.cumsum([0, *map(len, runs)]), np.concatenate([np.empty(0, np.uint16), *runs]))


def _checked_runs(offsets: npt.ArrayLike, token_ids: npt.ArrayLike) -> tuple[Array, Array]:
    """Return both as copied arrays; raise `ParameterError` if the offsets do not fit the number of ids."""
    bounds, ids = np.array(offsets, np.int64), np.array(token_ids)
    if bounds.ndim != 1 or ids.ndim != 1:
        raise ParameterError("kept", f"needs flat arrays, got shapes {bounds.shape} and {ids.shape}")
    if len(ids) != (num_ids := int(bounds[-1] - bounds[0])):
        raise ParameterError("kept", f"the offsets cover {num_ids} ids, but there are {len(ids)}")
    return bounds, ids


class Parts(NamedTuple):
    """Data of a record for serialization: everything except its token table."""

    rows: Rows
    extras: dict[str, Array]  # columns named in `EXTRAS`, (T,) each
    given: Rows | None
    kept: tuple[Array, Array] | None  # offsets (T + 1,), and the ids that masks and truncation kept
    info: LogprobsInfo | None


class Side:
    """Optional data that accompanies the rows of one record, with one entry per row."""

    __slots__ = ("_extras", "given", "is_empty", "kept")

    def __init__(
        self,
        extras: Mapping[str, Array] | None = None,
        given: Rows | None = None,
        kept: IdRuns | None = None,
    ) -> None:
        self._extras = {name: Column(values) for name, values in (extras or {}).items()}
        self.given = given  # caller-specified ids per position; None if there were none so far
        self.kept = kept  # ids that truncation and masks kept; None if there were none so far
        self.is_empty = not self._extras and given is None and kept is None

    def column(self, name: str, length: int) -> Array | None:
        """Return the extra column `name` for the first `length` positions; None if it has no values."""
        column = self._extras.get(name)
        return None if column is None else column.read(0, length)

    def extras(self, length: int) -> dict[str, Array]:
        """Return the extra columns that have values, for the first `length` positions."""
        present = self._extras.copy()  # a concurrent writer may add a column
        return {name: present[name].read(0, length) for name in EXTRAS if name in present}

    def columns(self, length: int) -> tuple[dict[str, Array], Rows | None, tuple[Array, Array] | None]:
        """Return the extra columns, caller-specified ids and kept ids of the first `length` positions."""
        given = None if self.given is None else self.given.cut(range(length))
        return self.extras(length), given, None if self.kept is None else self.kept.arrays(length)

    def nbytes(self, length: int) -> int:
        """Return the size of the values of the first `length` positions, in bytes."""
        extras, given, kept = self.columns(length)
        own = sum(int(array.nbytes) for array in [*extras.values(), *(kept or ())])
        return own if given is None else own + given.nbytes

    def append(
        self,
        at: int,
        num_new: int,
        extras: Mapping[str, npt.ArrayLike | None],
        given: Entries | None = None,
        kept: tuple[npt.ArrayLike, npt.ArrayLike] | None = None,
    ) -> None:
        """Add the data of `num_new` positions starting at `at`; None means that they have no such data.

        Raises:
            ParameterError: a column is unknown or does not have `num_new` values. Nothing is added then.
        """
        for name in extras.keys() - EXTRAS.keys():
            raise ParameterError(name, f"unknown column; known: {', '.join(EXTRAS)}")
        values = {
            name: np.array(column, EXTRAS[name]) for name, column in extras.items() if column is not None
        }
        for name, column in values.items():
            if column.shape != (num_new,):
                raise ParameterError(name, f"has shape {column.shape}, but there are {num_new} positions")
        ends = {"given": None if given is None else given.offsets, "kept": None if kept is None else kept[0]}
        for name, offsets in ends.items():
            if offsets is not None and len(np.asarray(offsets)) != num_new + 1:
                raise ParameterError(
                    name,
                    f"has {len(np.asarray(offsets))} offsets, but {num_new} positions need {num_new + 1}",
                )
        if kept is not None:
            kept = _checked_runs(*kept)
        self.is_empty = self.is_empty and not values and given is None and kept is None
        self._append_extras(at, num_new, values)
        if given is not None or self.given is not None:
            named = self.given or Rows()
            named.append_none(at + (num_new if given is None else 0) - named.num_rows)
            if given is not None:
                named.append_entries(given)
            self.given = named
        if kept is not None or self.kept is not None:
            runs = self.kept or IdRuns()
            num_missing = at + (num_new if kept is None else 0) - len(runs)
            runs.append(np.zeros(num_missing + 1, np.int64), np.empty(0, np.uint16))
            if kept is not None:
                runs.append(*kept)
            self.kept = runs

    def _append_extras(self, at: int, num_new: int, values: Mapping[str, Array]) -> None:
        for name in self._extras.keys() | values.keys():
            column = self._extras.get(name) or Column(np.full(at, np.nan, EXTRAS[name]))
            column.append(values.get(name, np.full(num_new, np.nan, EXTRAS[name])))
            self._extras[name] = column

    def cut(self, places: range, length: int) -> Side:
        """Return the data of the selected positions, which must be below `length`."""
        picked = np.array(places, np.intp)
        return Side(
            {name: values[picked] for name, values in self.extras(length).items()},
            None if self.given is None else self.given.cut(places),
            None if self.kept is None else self.kept.cut(places),
        )


NOTHING: Final = Side()
"""Shared empty instance, used by most records; nothing is ever added to it."""
