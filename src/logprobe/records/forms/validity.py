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
from logprobe.records.store.steps import Steps

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from logprobe.records.store.columns import Array

MAX_COUNTED: Final = 1 << 20
"""Limit on positions, and on lengths of zero-size columns, that a header claims without any data."""
GROUP: Final = 256  # number of 8-bit values that share one scale

Columns: TypeAlias = dict[str, tuple[str, ...]]
"""Column name → allowed NumPy type strings."""

IDS, LOGPROBS = ("<u2", "<i4", "<i8"), ("<f4", "<f2", "|u1")
STEPS: Final[Columns] = {"token_ids": IDS, "logprobs": LOGPROBS, "ranks": IDS}
RAGGED: Final[Columns] = {
    "entry_ids": IDS,
    "entry_logprobs": (*LOGPROBS, "<f8"),
    "entry_ranks": ("<i4", "<i8"),
    "ends": ("<i4", "<i8"),
    "is_none": ("|b1",),
}
TEXTS: Final[Columns] = dict.fromkeys(("text_ids", "text_since", "text_apart"), ("<i8",))
LOSSY: Final = ("logprobs", "entry_logprobs")


class ColumnHeader(msgspec.Struct, frozen=True):
    """Location of one column: NumPy type string, shape, and byte offset from the end of the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class RowsHeader(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Values of a set of rows that are not arrays: numbers of rows, k of the step rows, texts."""

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
        require(dtype in known[name], f"column {name} has the type {dtype!r:.20}")
        require(len(shape) in {1, 2} and min(shape) >= 0, f"column {name} has the shape {shape!r:.60}")
        size = prod(shape) * np.dtype(dtype).itemsize
        is_within = 0 <= offset <= offset + size <= num_bytes and offset % alignment == 0
        require(is_within, f"column {name} lies outside of the data, which is truncated or altered")
        require(size or max(shape) <= MAX_COUNTED, f"column {name} has the shape {shape!r:.60}")


def known_columns() -> Columns:
    """Return all columns of a record with their allowed types."""
    own = STEPS | RAGGED | TEXTS | {f"{name}.scale": ("<f4",) for name in LOSSY}
    beside: Columns = {name: (dtype.newbyteorder("<").str,) for name, dtype in EXTRAS.items()}
    beside |= {"kept.offsets": ("<i8",), "kept.token_ids": IDS}
    return own | {f"given.{name}": dtypes for name, dtypes in own.items()} | beside


def check_scale(name: str, codes: Array, scale: Array | None) -> None:
    """Check that a column of 8-bit codes has one (lowest value, step) pair per group, finite and >= 0.

    Raises:
        InputError: `scale` is missing or invalid.
    """
    num_groups = codes.shape[0] if codes.ndim == 2 else -(-len(codes) // GROUP)
    is_fitting = scale is not None and scale.shape == (num_groups, 2)
    require(is_fitting, f"column {name} has no scale for its {num_groups} groups")
    assert scale is not None
    require(np.isfinite(scale).all() and (scale >= 0).all(), f"column {name} has an invalid scale")


def check_runs(offsets: Array, ids: Array, num_rows: int) -> None:
    """Check that `offsets` divides `ids`, the ids kept by masks and truncation, into one list per row.

    Raises:
        InputError: the offsets do not fit, or an id is negative.
    """
    require(offsets.shape == (num_rows + 1,) and ids.ndim == 1, "the kept ids do not have one run per row")
    is_rising = int(offsets[0]) == 0 and (offsets[1:] >= offsets[:-1]).all()
    require(is_rising and int(offsets[-1]) == len(ids), "the offsets of the kept ids do not cover them")
    require(ids.min(initial=0) >= 0, "the kept ids contain a negative number")


def check_rows(header: RowsHeader, columns: Mapping[str, Array]) -> None:
    """Check the columns of a set of rows; their log-probabilities may be 32-bit or 64-bit.

    Raises:
        InputError: the columns and the header are inconsistent.
    """
    has_ragged = not RAGGED.keys().isdisjoint(columns)
    for name in STEPS | (RAGGED if has_ragged else {}):
        require(name in columns, f"the column {name} is missing")
    for name in columns:
        require(name in STEPS or name in RAGGED or name in TEXTS, f"unexpected column {name}")
    num_none = header.num_none
    require(0 <= num_none <= MAX_COUNTED, f"it claims {num_none} rows without entries")
    widths = [np.zeros(num_none, np.int64), _check_steps(header, columns)]
    if has_ragged:
        widths.append(_check_ragged(columns))
    num_rows = sum(map(len, widths))
    require(header.num_rows == num_rows, f"it has {num_rows} rows, but its header says {header.num_rows}")
    _check_texts(header, columns, np.concatenate(widths))


def _check_steps(header: RowsHeader, columns: Mapping[str, Array]) -> Array:
    """Check the rows of fixed width; return the number of entries of each row."""
    ids, logprobs, ranks = (columns[name] for name in STEPS)
    require(ids.ndim == 2 and ids.shape[1] == header.k + 1 > 0, f"k is {header.k}, but ids are {ids.shape}")
    require(logprobs.shape == ids.shape, f"logprobs of shape {logprobs.shape} for ids {ids.shape}")
    require(logprobs.dtype == np.float32, f"logprobs of type {logprobs.dtype}")
    require(ranks.shape == ids.shape[:1], f"{len(ids)} rows, but ranks of shape {ranks.shape}")
    for name in ("token_ids", "ranks"):
        require(columns[name].min(initial=0) >= 0, f"{name} contains a negative number")
    return Steps(ids, logprobs, ranks, header.repeats_chosen).widths()


def _check_ragged(columns: Mapping[str, Array]) -> Array:
    """Check the rows of varying width; return the number of entries of each row."""
    ids, ends, is_none = columns["entry_ids"], columns["ends"], columns["is_none"]
    require(ids.ndim == ends.ndim == 1, "the entries are not one-dimensional")
    for name in ("entry_logprobs", "entry_ranks"):
        require(columns[name].shape == ids.shape, f"{name} does not match the entries in number")
    require(is_none.shape == ends.shape, "is_none does not match the rows in number")
    widths = np.diff(ends, prepend=ends.dtype.type(0))
    last = int(ends[-1]) if len(ends) else 0
    is_rising = ends.min(initial=0) >= 0 and (ends[1:] >= ends[:-1]).all()
    require(is_rising and last == len(ids), "the ends of its rows do not cover the entries")
    require(is_none.view(np.uint8).max(initial=0) <= 1, "is_none contains values other than 0 and 1")
    require(not widths[is_none].any(), "a row is None and has entries")
    for name, least in (("entry_ids", 0), ("entry_ranks", NO_RANK)):
        require(columns[name].min(initial=0) >= least, f"{name} contains a negative number")
    return widths


def _check_texts(header: RowsHeader, columns: Mapping[str, Array], widths: Array) -> None:
    names = TEXTS.keys() & columns.keys()
    require(len(names) in {0, len(TEXTS)}, "a text column is missing")
    if not names:
        require(not header.texts, "it has texts, but no text columns")
        return
    ids, since, apart = (columns[name] for name in TEXTS)
    is_fitting = ids.ndim == since.ndim == 1 and apart.ndim == 2 and apart.shape[1] == 2
    require(is_fitting, "the text columns have wrong shapes")
    require(len(ids) == len(since) and len(np.unique(ids)) == len(ids), "the texts' ids are not unique")
    require(len(header.texts) == len(ids) + len(apart), f"{len(header.texts)} texts do not fit the columns")
    require(all(text is not None for text in header.texts[: len(ids)]), "a token's text is missing")
    farthest = max(-int(since.min(initial=0)), int(since.max(initial=0)))
    require(farthest <= np.iinfo(np.int32).max, "the first row of a text is out of range")
    rows, places = apart.T
    is_rising = (rows[1:] >= rows[:-1]).all() and apart.min(initial=0) >= 0
    is_within = is_rising and rows.max(initial=-1) < len(widths) and (places < widths[rows]).all()
    require(is_within, "a text belongs to an entry that does not exist")
