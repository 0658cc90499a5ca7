"""What the bytes of a record must be before anything is made of them: their sender may have made them up.

Every column has a name, a type and a length that follow from the others, and its values must point where
there is something. Nothing is allocated that the bytes do not hold; a record that passes can be read whole.
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
"""Leading positions without entries, or places of no rows, that a header may count: they take no bytes."""
GROUP: Final = 256  # scalars that share one scale

Columns: TypeAlias = dict[str, tuple[str, ...]]
"""The columns of a form, each with the types that it may have."""

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
    """Where one column lies: bytes from the end of the header, NumPy type string, shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class RowsHeader(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The scalars of some rows: the first None ones, the width of the steps' rows, how these are read."""

    num_rows: int
    num_none: int = 0
    k: int = 0
    repeats_chosen: bool = False
    texts: list[str | None] = []


def require(is_so: object, message: str) -> None:
    """Refuse a record.

    Raises:
        InputError: it is not so.
    """
    if not is_so:
        raise InputError(f"the record contradicts itself: {message}")


def check_places(columns: Sequence[ColumnHeader], num_bytes: int, alignment: int, known: Columns) -> None:
    """Each column once, under a known name, within the bytes that there are.

    Raises:
        InputError: it is not so.
    """
    names = [column.name for column in columns]
    require(len(set(names)) == len(names), "a column stands twice")
    for name, dtype, shape, offset in ((one.name, one.dtype, one.shape, one.offset) for one in columns):
        require(name in known, f"there is no column {name!r:.40}")
        require(dtype in known[name], f"column {name} is of type {dtype!r:.20}")
        require(len(shape) in {1, 2} and min(shape) >= 0, f"column {name} has the shape {shape!r:.60}")
        size = prod(shape) * np.dtype(dtype).itemsize
        is_within = 0 <= offset <= offset + size <= num_bytes and offset % alignment == 0
        require(is_within, f"column {name} lies outside of the record, which is cut short or altered")
        require(size or max(shape) <= MAX_COUNTED, f"column {name} has the shape {shape!r:.60}")


def known_columns() -> Columns:
    """All columns of a record, each with the types that it may have."""
    own = STEPS | RAGGED | TEXTS | {f"{name}.scale": ("<f4",) for name in LOSSY}
    beside: Columns = {name: (dtype.newbyteorder("<").str,) for name, dtype in EXTRAS.items()}
    beside |= {"kept.offsets": ("<i8",), "kept.token_ids": IDS}
    return own | {f"given.{name}": dtypes for name, dtypes in own.items()} | beside


def check_scale(name: str, codes: Array, scale: Array | None) -> None:
    """One finite pair (least, step) for each group of 8-bit codes.

    Raises:
        InputError: it is not so.
    """
    num_groups = codes.shape[0] if codes.ndim == 2 else -(-len(codes) // GROUP)
    is_fitting = scale is not None and scale.shape == (num_groups, 2)
    require(is_fitting, f"column {name} has no scale for its {num_groups} groups")
    assert scale is not None
    require(np.isfinite(scale).all() and (scale >= 0).all(), f"column {name} has a scale of no numbers")


def check_runs(offsets: Array, ids: Array, num_rows: int) -> None:
    """Ids position by position, one run after the other.

    Raises:
        InputError: it is not so.
    """
    require(offsets.shape == (num_rows + 1,) and ids.ndim == 1, "kept ids of another number than the rows")
    is_rising = int(offsets[0]) == 0 and (offsets[1:] >= offsets[:-1]).all()
    require(is_rising and int(offsets[-1]) == len(ids), "its rows do not cover the kept ids one by one")
    require(ids.min(initial=0) >= 0, "the kept ids hold a negative number")


def check_rows(header: RowsHeader, columns: Mapping[str, Array]) -> None:
    """The columns of some rows, with 32-bit or 64-bit log-probabilities.

    Raises:
        InputError: it is not so.
    """
    has_ragged = not RAGGED.keys().isdisjoint(columns)
    for name in STEPS | (RAGGED if has_ragged else {}):
        require(name in columns, f"the column {name} is missing")
    for name in columns:
        require(name in STEPS or name in RAGGED or name in TEXTS, f"rows have no column {name}")
    num_none = header.num_none
    require(0 <= num_none <= MAX_COUNTED, f"it counts {num_none} rows that take no bytes")
    widths = [np.zeros(num_none, np.int64), _check_steps(header, columns)]
    if has_ragged:
        widths.append(_check_ragged(columns))
    num_rows = sum(map(len, widths))
    require(header.num_rows == num_rows, f"{num_rows} rows, and {header.num_rows} are said to be")
    _check_texts(header, columns, np.concatenate(widths))


def _check_steps(header: RowsHeader, columns: Mapping[str, Array]) -> Array:
    """The steps' rows; how many entries are read of each."""
    ids, logprobs, ranks = (columns[name] for name in STEPS)
    require(ids.ndim == 2 and ids.shape[1] == header.k + 1 > 0, f"rows of {header.k}, but ids {ids.shape}")
    require(logprobs.shape == ids.shape, f"logprobs of shape {logprobs.shape} for ids {ids.shape}")
    require(logprobs.dtype == np.float32, f"logprobs of type {logprobs.dtype}")
    require(ranks.shape == ids.shape[:1], f"{len(ids)} rows, but ranks of shape {ranks.shape}")
    for name in ("token_ids", "ranks"):
        require(columns[name].min(initial=0) >= 0, f"{name} holds a negative number")
    return Steps(ids, logprobs, ranks, header.repeats_chosen).widths()


def _check_ragged(columns: Mapping[str, Array]) -> Array:
    """Rows of any width; how many entries each has."""
    ids, ends, is_none = columns["entry_ids"], columns["ends"], columns["is_none"]
    require(ids.ndim == ends.ndim == 1, "the entries are no run")
    for name in ("entry_logprobs", "entry_ranks"):
        require(columns[name].shape == ids.shape, f"{name} of another number than the entries")
    require(is_none.shape == ends.shape, "is_none of another number than the rows")
    widths = np.diff(ends, prepend=ends.dtype.type(0))
    last = int(ends[-1]) if len(ends) else 0
    is_rising = ends.min(initial=0) >= 0 and (ends[1:] >= ends[:-1]).all()
    require(is_rising and last == len(ids), "its rows do not cover the entries one after the other")
    require(is_none.view(np.uint8).max(initial=0) <= 1, "is_none holds what is neither 0 nor 1")
    require(not widths[is_none].any(), "a row is None and has entries")
    for name, least in (("entry_ids", 0), ("entry_ranks", NO_RANK)):
        require(columns[name].min(initial=0) >= least, f"{name} holds a negative number")
    return widths


def _check_texts(header: RowsHeader, columns: Mapping[str, Array], widths: Array) -> None:
    names = TEXTS.keys() & columns.keys()
    require(len(names) in {0, len(TEXTS)}, "a column of texts is missing")
    if not names:
        require(not header.texts, "it has texts of no entries")
        return
    ids, since, apart = (columns[name] for name in TEXTS)
    is_fitting = ids.ndim == since.ndim == 1 and apart.ndim == 2 and apart.shape[1] == 2
    require(is_fitting, "the columns of texts are no runs")
    require(len(ids) == len(since) and len(np.unique(ids)) == len(ids), "the texts' ids are not different")
    require(len(header.texts) == len(ids) + len(apart), f"{len(header.texts)} texts for other entries")
    require(all(text is not None for text in header.texts[: len(ids)]), "a token's text is missing")
    farthest = max(-int(since.min(initial=0)), int(since.max(initial=0)))
    require(farthest <= np.iinfo(np.int32).max, "a text counts from a row beyond all")
    rows, places = apart.T
    is_rising = (rows[1:] >= rows[:-1]).all() and apart.min(initial=0) >= 0
    is_within = is_rising and rows.max(initial=-1) < len(widths) and (places < widths[rows]).all()
    require(is_within, "a text belongs to an entry that is not there")
