"""Records as version 2 of the bytes laid them out, read as they are laid out now.

Its rows had one of two forms: `top`, the k best with the chosen token's place among them or, apart, the
chosen tokens that are none of them; or `ragged`, entries end to end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from logprobe.records.forms.validity import IDS, LOGPROBS, TEXTS, RowsHeader, require, with_others

if TYPE_CHECKING:
    from logprobe.records.forms.validity import Columns
    from logprobe.records.store.columns import Array

VERSION: Final = 2
TOP: Final = ("token_ids", "logprobs", "places", "ranks", "outside_ids", "outside_logprobs")
RAGGED: Final = ("token_ids", "logprobs", "ends", "first_ranks")
_KNOWN: Final[Columns] = {
    "token_ids": IDS,
    "logprobs": (*LOGPROBS, "<f8"),
    "places": ("|u1", "<u2", "<u4"),
    "ranks": IDS,
    "outside_ids": IDS,
    "outside_logprobs": LOGPROBS,
    "ends": ("<i4", "<i8"),
    "first_ranks": ("<i4",),
    "is_none": ("|b1",),
    **TEXTS,
}


def known_columns() -> Columns:
    """All columns of such a record, each with the types that it may have."""
    return with_others(_KNOWN, ("logprobs", "outside_logprobs"))


def as_now(header: RowsHeader, columns: dict[str, Array]) -> tuple[RowsHeader, dict[str, Array]]:
    """The same rows in the columns of today, which are still to be checked.

    Raises:
        InputError: the columns do not fit one another.
    """
    require(header.form, "its rows have no form")
    wanted, may = (RAGGED, {"ranks", "is_none", *TEXTS}) if header.form == "ragged" else (TOP, {*TEXTS})
    for name in wanted:
        require(name in columns, f"the column {name} is missing")
    for name in columns:
        require(name in wanted or name in may, f"rows of the form {header.form!r} have no column {name}")
    require(0 <= header.num_none <= header.num_rows, f"{header.num_none} of {header.num_rows} rows are None")
    kept = {name: columns[name] for name in TEXTS if name in columns}
    if header.form == "ragged":
        return msgspec.structs.replace(header, num_none=0, k=0), kept | _ragged(header, columns)
    return header, kept | _steps(header.k, columns)


def _steps(k: int, columns: dict[str, Array]) -> dict[str, Array]:
    ids, logprobs, places = columns["token_ids"], columns["logprobs"], columns["places"]
    require(places.ndim == 1, f"places of shape {places.shape}")
    shape = (len(places), k)
    require(ids.shape == logprobs.shape == shape, f"{len(places)} rows of {k}, but ids {ids.shape}")
    require(places.max(initial=0) <= k, f"a chosen token stands beyond place {k}")
    is_apart, inside = places == k, np.flatnonzero(places < k)
    own_ids, own_logprobs = np.empty(len(places), ids.dtype), np.empty(len(places), logprobs.dtype)
    own_ids[inside], own_logprobs[inside] = ids[inside, places[inside]], logprobs[inside, places[inside]]
    for own, name in ((own_ids, "outside_ids"), (own_logprobs, "outside_logprobs")):
        num_apart = int(np.count_nonzero(is_apart))
        require(
            columns[name].shape == (num_apart,), f"{num_apart} stand apart, but {name} is of another shape"
        )
        own[is_apart] = columns[name]
    require(columns["outside_ids"].dtype == ids.dtype, "its ids are of two types")
    return {
        "token_ids": np.column_stack([own_ids, ids]),
        "logprobs": np.column_stack([own_logprobs, logprobs]),
        "ranks": columns["ranks"],
    }


def _ragged(header: RowsHeader, columns: dict[str, Array]) -> dict[str, Array]:
    ends, ids = columns["ends"], columns["token_ids"]
    is_rising = ends.ndim == ids.ndim == 1 and ends.min(initial=0) >= 0 and (ends[1:] >= ends[:-1]).all()
    last = int(ends[-1]) if is_rising and len(ends) else 0
    require(is_rising and last == len(ids), "its rows do not cover the entries one after the other")
    require(columns["first_ranks"].shape == ends.shape, "first_ranks of another number than the rows")
    if "ranks" in columns:  # NO_RANK is below nothing
        require(columns["ranks"].dtype.kind == "i", f"ranks of type {columns['ranks'].dtype}")
    is_none = columns.get("is_none", np.zeros(len(ends), np.bool_))
    require(is_none.shape == ends.shape, "is_none of another number than the rows")
    require(np.count_nonzero(is_none) == header.num_none, f"{header.num_none} rows are not None")
    none = np.empty((0, 1), np.uint16)
    return {
        "token_ids": none,
        "logprobs": none.astype(np.float32),
        "ranks": none[:, 0],
        "entry_ids": ids,
        "entry_logprobs": columns["logprobs"],
        "entry_ranks": columns.get("ranks", _implied_ranks(ends, columns["first_ranks"])),
        "ends": ends,
        "is_none": is_none,
    }


def _implied_ranks(ends: Array, first_ranks: Array) -> Array:
    """Ranks (N,) int32 of rows whose entries after the first have ranks 1, 2, ..."""
    starts = np.concatenate([np.zeros(1, np.int64), ends])[:-1]
    widths = ends - starts
    ranks: Array = (np.arange(int(widths.sum())) - np.repeat(starts, widths)).astype(np.int32)
    ranks[starts[widths > 0]] = first_ranks[widths > 0]
    return ranks
