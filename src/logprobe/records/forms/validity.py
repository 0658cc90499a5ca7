"""What the bytes of a record must be before anything is made of them: their sender may have made them up.

Every column has a name, a type and a length that follow from the others, and its values must point where
there is something. Nothing is allocated that the bytes do not hold; a record that passes can be read whole.

Before it: the header and columns that `wire` found. After it: the stores, which trust them.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from logprobe.errors import InputError
from logprobe.records.rows import EXTRAS
from logprobe.records.store.entries import NO_RANK

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from logprobe.records.forms.headers import ColumnHeader, StoreHeader
    from logprobe.records.store.columns import Array

MAX_COUNTED: Final = 1 << 20
"""Leading positions without entries, or places of no rows, that a header may count: they take no bytes."""
GROUP: Final = 256  # scalars that share one scale

Columns: TypeAlias = dict[str, tuple[str, ...]]
"""The columns of a form, each with the types that it may have."""

IDS, COUNTS, LOGPROBS = ("<u2", "<i4", "<i8"), ("<u2", "<i4", "<i8"), ("<f4", "<f2", "|u1")
TOP: Final[Columns] = {
    "token_ids": IDS,
    "logprobs": LOGPROBS,
    "places": ("|u1", "<u2", "<u4"),
    "ranks": COUNTS,
    "outside_ids": IDS,
    "outside_logprobs": LOGPROBS,
}
RAGGED: Final[Columns] = {
    "token_ids": IDS,
    "logprobs": (*LOGPROBS, "<f8"),
    "ends": ("<i4", "<i8"),
    "first_ranks": ("<i4",),
}
RAGGED_MAY: Final[Columns] = {"ranks": ("<i4", "<i8"), "is_none": ("|b1",)}
TEXTS: Final[Columns] = dict.fromkeys(("text_ids", "text_since", "text_apart"), ("<i8",))
FORMS: Final[dict[str, Columns]] = {"top": TOP, "ragged": RAGGED}
SCALED: Final = ("logprobs", "outside_logprobs")


def require(is_so: object, message: str) -> None:
    """Refuse a record.

    Raises:
        InputError: it is not so.
    """
    if not is_so:
        raise InputError(f"the record contradicts itself: {message}")


def check_places(columns: Sequence[ColumnHeader], num_bytes: int, alignment: int) -> None:
    """Each column once, under a known name, within the bytes that there are.

    Raises:
        InputError: it is not so.
    """
    known = _known_columns()
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


def _known_columns() -> Columns:
    store: Columns = {}
    for columns in (TOP, RAGGED, RAGGED_MAY, TEXTS):
        for name, dtypes in columns.items():
            store[name] = tuple({*store.get(name, ()), *dtypes})
    store |= {f"{name}.scale": ("<f4",) for name in SCALED}
    beside: Columns = {name: (dtype.newbyteorder("<").str,) for name, dtype in EXTRAS.items()}
    beside |= {"kept.offsets": ("<i8",), "kept.token_ids": IDS}
    return store | {f"given.{name}": dtypes for name, dtypes in store.items()} | beside


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


def check_rows(header: StoreHeader, columns: Mapping[str, Array]) -> None:
    """The columns of one store, as `wire` gives them to it: with 32-bit or 64-bit log-probabilities.

    Raises:
        InputError: it is not so.
    """
    wanted = FORMS[header.form]
    may = (RAGGED_MAY if header.form == "ragged" else {}) | TEXTS
    for name in wanted:
        require(name in columns, f"the column {name} is missing")
    for name in columns:
        require(name in wanted or name in may, f"a store of form {header.form!r} has no column {name}")
    require(0 <= header.num_none <= header.num_rows, f"{header.num_none} of {header.num_rows} rows are None")
    num_entries = _check_top(header, columns) if header.form == "top" else _check_ragged(header, columns)
    _check_texts(header, columns, num_entries)


def _check_top(header: StoreHeader, columns: Mapping[str, Array]) -> int:
    k, num_rows = header.k, header.num_rows - header.num_none
    require(header.num_none <= MAX_COUNTED, f"it counts {header.num_none} rows that take no bytes")
    places = columns["places"]
    require(places.shape == (num_rows,), f"{header.num_rows} rows, but places of shape {places.shape}")
    for name in ("token_ids", "logprobs"):
        shape = columns[name].shape
        require(shape == (num_rows, k), f"{num_rows} rows of {k}, but {name} of shape {shape}")
    require(places.dtype == np.min_scalar_type(k), f"places of type {places.dtype} for rows of {k}")
    require(places.max(initial=0) <= k, f"a chosen token stands beyond place {k}")
    num_outside = int(np.count_nonzero(places == k))
    for name in ("outside_ids", "outside_logprobs"):
        shape = columns[name].shape
        require(shape == (num_outside,), f"{num_outside} tokens stand apart, but {name} has shape {shape}")
    require(columns["outside_ids"].dtype == columns["token_ids"].dtype, "its ids are of two types")
    require(columns["ranks"].shape == (num_rows,), f"{num_rows} rows, but ranks of another number")
    for name in ("token_ids", "outside_ids", "ranks"):
        require(columns[name].min(initial=0) >= 0, f"{name} holds a negative number")
    return num_rows * (k + 1) if header.repeats_chosen else num_rows * k + num_outside


def _check_ragged(header: StoreHeader, columns: Mapping[str, Array]) -> int:
    ids, ends = columns["token_ids"], columns["ends"]
    require(ids.ndim == 1, "the entries are no run")
    for name in {"logprobs", "ranks"} & columns.keys():
        require(columns[name].shape == ids.shape, f"{name} of another number than the entries")
    for name in {"ends", "first_ranks", "is_none"} & columns.keys():
        require(columns[name].shape == (header.num_rows,), f"{name} of another number than the rows")
    widths = np.diff(ends, prepend=ends.dtype.type(0))
    last = int(ends[-1]) if len(ends) else 0
    is_rising = ends.min(initial=0) >= 0 and (ends[1:] >= ends[:-1]).all()
    require(is_rising and last == len(ids), "its rows do not cover the entries one after the other")
    is_none = columns.get("is_none")
    num_none = 0
    if is_none is not None:
        require(is_none.view(np.uint8).max(initial=0) <= 1, "is_none holds what is neither 0 nor 1")
        num_none = int(np.count_nonzero(is_none))
        require(not widths[is_none].any(), "a row is None and has entries")
    require(num_none == header.num_none, f"{num_none} rows are None, and {header.num_none} are said to be")
    for name, least in (("token_ids", 0), ("first_ranks", NO_RANK), ("ranks", NO_RANK)):
        if name in columns:
            require(columns[name].min(initial=0) >= least, f"{name} holds a negative number")
    return len(ids)


def _check_texts(header: StoreHeader, columns: Mapping[str, Array], num_entries: int) -> None:
    names = TEXTS.keys() & columns.keys()
    require(len(names) in {0, len(TEXTS)}, "a column of texts is missing")
    if not names:
        require(not header.texts, "it has texts of no entries")
        return
    ids, since, apart = (columns[name] for name in TEXTS)
    require(ids.ndim == since.ndim == apart.ndim == 1, "the columns of texts are no runs")
    require(len(ids) == len(since) and len(np.unique(ids)) == len(ids), "the texts' ids are not different")
    require(len(header.texts) == len(ids) + len(apart), f"{len(header.texts)} texts for other entries")
    require(all(text is not None for text in header.texts[: len(ids)]), "a token's text is missing")
    farthest = max(-int(since.min(initial=0)), int(since.max(initial=0)))
    require(farthest <= np.iinfo(np.int32).max, "a text counts from an entry beyond all")
    is_rising = (apart[1:] > apart[:-1]).all() and apart.min(initial=0) >= 0
    require(is_rising and apart.max(initial=-1) < num_entries, "a text belongs to an entry that is not there")
