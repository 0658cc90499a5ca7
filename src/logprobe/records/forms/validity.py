"""Validation of serialized records, which may come from untrusted senders.

Checks the name, type and shape of every column, and that offsets and indices are in range. The checks
allocate no more memory than the data occupies. A record that passes can be read without errors.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final, TypeAlias

import msgspec
import numpy as np

from logprobe.errors import InputError
from logprobe.records.rows import EXTRAS
from logprobe.records.store.entries import NO_RANK

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from logprobe.records.store.columns import Array

MAX_COUNTED: Final = 1 << 20
"""Limit on positions, and on lengths of zero-size columns, that a header claims without any data."""
GROUP: Final = 64  # number of 8-bit values that share one scale

Columns: TypeAlias = dict[str, tuple[str, ...]]
"""Column name → allowed NumPy type strings."""

INTEGERS: Final = ("<u2", "<i4", "<i8")
ROWS: Final[Columns] = {"token_ids": INTEGERS, "logprobs": ("<f4", "<f8", "<f2", "|u1"), "ranks": INTEGERS}
OTHERS: Final[Columns] = {"ends": INTEGERS, "is_none": ("|b1",)}
TEXTS: Final[Columns] = {"texts": INTEGERS}


class ColumnHeader(msgspec.Struct, frozen=True):
    """Location of one column: NumPy type string, shape, and byte offset from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class RowsHeader(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A set of rows without its columns: the numbers of rows, k of the step rows, and the texts."""

    num_rows: int
    num_none: int = 0
    k: int = 0
    repeats_chosen: bool = False
    texts: list[str | None] = []


def require(is_so: object, message: str) -> None:
    """Raise `InputError` with `message` if `is_so` is false."""
    if not is_so:
        raise InputError(f"invalid record: {message}")


def check_places(columns: Sequence[ColumnHeader], num_bytes: int, alignment: int, known: Columns) -> None:
    """Check that columns have known names, each once, with allowed types, and lie within the data.

    Raises:
        InputError: a column does not meet these conditions.
    """
    names = [column.name for column in columns]
    require(len(set(names)) == len(names), "a column is duplicated")
    for name, dtype, shape, offset in ((one.name, one.dtype, one.shape, one.offset) for one in columns):
        require(name in known, f"unknown column {name!r:.40}")
        require(dtype in known[name], f"column {name} has an invalid type {dtype!r:.20}")
        require(len(shape) in {1, 2} and min(shape) >= 0, f"column {name} has an invalid shape {shape!r:.60}")
        size = prod(shape) * np.dtype(dtype).itemsize
        is_within = 0 <= offset <= offset + size <= num_bytes and offset % alignment == 0
        require(is_within, f"column {name} lies outside of the data, which is truncated or altered")
        require(size or max(shape) <= MAX_COUNTED, f"column {name} has an invalid shape {shape!r:.60}")


def known_columns() -> Columns:
    """Return all columns of a record with their allowed types."""
    own = ROWS | OTHERS | TEXTS | {"logprobs.scale": ("<f4",)}
    beside: Columns = {name: (dtype.newbyteorder("<").str,) for name, dtype in EXTRAS.items()}
    beside |= {"kept.offsets": ("<i8",), "kept.token_ids": INTEGERS}
    return own | {f"given.{name}": dtypes for name, dtypes in own.items()} | beside


def check_scale(name: str, codes: Array, scale: Array | None) -> None:
    """Check that 8-bit codes have one (smallest magnitude, step) pair per group, both finite and >= 0.

    Raises:
        InputError: `scale` is missing or invalid.
    """
    num_groups = -(-len(codes) // GROUP)
    is_fitting = scale is not None and scale.shape == (num_groups, 2)
    require(is_fitting, f"column {name} has no scale for its {num_groups} groups")
    assert scale is not None
    require(np.isfinite(scale).all() and (scale >= 0).all(), f"column {name} has an invalid scale")


def check_runs(kept: Sequence[Array], num_rows: int) -> None:
    """Check that the ids kept by masks and truncation, if any, are divided into one list per row by offsets.

    Raises:
        InputError: the offsets do not fit, or an id is negative.
    """
    if not kept:
        return
    require(len(kept) == 2, "a column of the kept ids is missing")
    offsets, ids = kept
    require(offsets.shape == (num_rows + 1,) and ids.ndim == 1, "the kept ids do not have one list per row")
    is_rising = int(offsets[0]) == 0 and (offsets[1:] >= offsets[:-1]).all()
    require(is_rising and int(offsets[-1]) == len(ids), "the offsets of the kept ids do not cover them")
    require(ids.min(initial=0) >= 0, "the kept ids contain a negative number")


def check_rows(header: RowsHeader, columns: Mapping[str, Array]) -> None:
    """Check the columns of a set of rows.

    Raises:
        InputError: the columns and the header are inconsistent.
    """
    has_others = not OTHERS.keys().isdisjoint(columns)
    for name in ROWS | (OTHERS if has_others else {}):
        require(name in columns, f"the column {name} is missing")
    for name, column in columns.items():
        require(name in ROWS or name in OTHERS or name in TEXTS, f"unexpected column {name}")
        require(column.ndim == 1, f"{name} is not one-dimensional")
    none = np.empty(0, np.bool_)
    num_entries = _check_ends(*(columns.get(name, none) for name in OTHERS))
    num_none, num_others = header.num_none, len(columns.get("ends", none))
    num_steps = header.num_rows - num_none - num_others
    require(0 <= num_none <= MAX_COUNTED, f"{num_none} rows have no entries; at most {MAX_COUNTED:,} may")
    require(num_steps >= 0, f"it has {num_none + num_others} rows, but its header says {header.num_rows}")
    require(header.k >= 0 and (num_steps or not header.k), f"k is {header.k} for {num_steps} rows")
    num_ids, num_ranks = num_steps * (header.k + 1) + num_entries, num_steps + num_entries
    for name, number in (("token_ids", num_ids), ("logprobs", num_ids), ("ranks", num_ranks)):
        require(len(columns[name]) == number, f"{name} does not match the number of rows")
    ids, ranks = columns["token_ids"], columns["ranks"]
    for numbers, least in ((ids, 0), (ranks[:num_steps], 0), (ranks, NO_RANK)):
        require(int(numbers.min(initial=0)) >= least, "token_ids or ranks contains a negative number")
    if header.texts or "texts" in columns:
        codes = columns.get("texts", none)
        require(len(codes) == num_ids, "texts does not match the number of entries")
        is_known = not num_ids or (codes.min() >= 0 and codes.max() < len(header.texts))
        require(is_known, "texts contains indices of texts that do not exist")


def _check_ends(ends: Array, is_none: Array) -> int:
    """Check the ends of the rows that are not step rows; return the number of these rows' entries."""
    require(is_none.shape == ends.shape, "is_none does not match the number of rows")
    require(is_none.view(np.uint8).max(initial=0) <= 1, "is_none contains values other than 0 and 1")
    widths = np.diff(ends.astype(np.int64), prepend=0)
    require(widths.min(initial=0) >= 0, "the ends of its rows are not ascending")
    require(not widths[is_none].any(), "a row is None and has entries")
    return int(ends[-1]) if len(ends) else 0
