"""Convert records to Arrow batches and back, without loss.

Each position is one row with the chosen token's values, lists of the k most likely tokens, and byte offsets.
The `given_*` columns hold caller-specified ids. The `entry_*` columns hold all entries of a record if the
other columns cannot, for instance because a position has more than the chosen token and the k most likely.
Unused columns are null.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from logprobe._arrow import pa
from logprobe.errors import InputError, ParameterError
from logprobe.records.forms.arrow_validity import (
    as_input_error,
    check_columns,
    check_names,
    valid_column,
)
from logprobe.records.forms.versions import check_parquet, parquet_metadata
from logprobe.records.info import LogprobsInfo
from logprobe.records.rows import EXTRAS
from logprobe.records.store.entries import NO_RANK, Entries, logs_outside_top
from logprobe.records.store.rows import Rows
from logprobe.records.store.steps import Steps
from logprobe.records.values import IdLists

if TYPE_CHECKING:
    import numpy.typing as npt

    from logprobe.records.store.columns import Array

INFO_KEY = b"logprobe.info"

_CHOSEN = [
    pa.field("request_id", pa.string(), nullable=False),
    pa.field("position", pa.int64(), nullable=False),
    pa.field("token_id", pa.int64()),  # may be set at positions without a prediction; null if unknown
    pa.field("logprob", pa.float32()),  # nats
    pa.field("rank", pa.int64()),  # 1 + number of strictly greater logits
]
_ENTRIES = [
    pa.field("other_logprob", pa.float32()),  # nats, log of the probability outside the chosen and top tokens
    pa.field("outside_top_logprob", pa.float32()),  # nats, log of the probability outside the k most likely
    pa.field("top_ids", pa.list_(pa.int32())),  # the k most likely tokens
    pa.field("top_logprobs", pa.list_(pa.float32())),
    pa.field("byte_start", pa.int64()),
    pa.field("byte_end", pa.int64()),
]
_LISTS = [
    pa.field("given_ids", pa.list_(pa.int64())),
    pa.field("given_logprobs", pa.list_(pa.float64())),
    pa.field("given_ranks", pa.list_(pa.int64())),
    pa.field("kept_ids", pa.list_(pa.int32())),  # kept by masks and truncation; null: not requested
    pa.field("entry_ids", pa.list_(pa.int64())),
    pa.field("entry_logprobs", pa.list_(pa.float64())),
    pa.field("entry_ranks", pa.list_(pa.int64())),
    pa.field("entry_tokens", pa.list_(pa.string())),
]


def all_fields() -> list[pa.Field]:
    """Return the fields of all columns in file order; the columns named in `EXTRAS` may be null."""
    extras = [pa.field(name, pa.from_numpy_dtype(dtype)) for name, dtype in EXTRAS.items()]
    return [*_CHOSEN, *extras, *_ENTRIES, *_LISTS]


def required_fields() -> list[pa.Field]:
    """Return the fields that every file must have: all columns except those named in `EXTRAS`."""
    return [*_CHOSEN, *_ENTRIES, *_LISTS]


def schema(info: LogprobsInfo | None = None) -> pa.Schema:
    """Return the Arrow schema of records; its metadata has the format and, if given, the `info`."""
    about = {} if info is None else {INFO_KEY: info.to_json().encode()}
    return pa.schema(all_fields(), parquet_metadata("records") | about)


def batch_of(
    rows: Rows,
    request_id: str = "",
    *,
    byte_offsets: npt.ArrayLike | None = None,
    token_ids: npt.ArrayLike | None = None,
) -> pa.RecordBatch:
    """Convert a record to a batch of T rows; arguments and errors are those of `records.to_arrow`."""
    length = rows.num_rows
    entries, chosen, top = (
        rows.entries(0, length),
        rows.chosen_entries(0, length),
        rows.top_entries(0, length),
    )
    has_chosen = np.diff(chosen.offsets) > 0
    has_wide_ids = entries.token_ids.max(initial=0) > np.iinfo(np.int32).max
    _, steps, others = rows.split(0, length)
    has_wide_logprobs = steps.logprobs.dtype != np.float32
    is_regular = not (
        others.num_rows or steps.repeats_chosen or entries.texts or has_wide_ids or has_wide_logprobs
    )
    given_rows, kept = rows.given(0, length), rows.kept(0, length)
    given = None if given_rows is None else given_rows.entries(0, length)
    columns = {
        "request_id": pa.repeat(pa.scalar(request_id, pa.string()), length),
        "position": np.arange(length),
        "token_id": _id_column(chosen.token_ids, has_chosen, token_ids),
        "logprob": _spread(chosen.logprobs.astype(np.float32), has_chosen),
        "rank": _spread(chosen.ranks, has_chosen, missing=NO_RANK),
        **{name: pa.array(values, mask=np.isnan(values)) for name, values in rows.extras(0, length).items()},
        "other_logprob": pa.array(logs_outside_top(chosen, top, with_chosen=True), mask=entries.none_flags()),
        **_top_columns(chosen, top),
        **_byte_columns(byte_offsets, length),
        **_list_columns("given", given, length),
        **_kept_column(kept, length),
        **_list_columns("entry", None if is_regular else entries, length),
    }
    target = schema(rows.info)
    return pa.record_batch([_cast(columns.get(field.name), field, length) for field in target], schema=target)


def rows_of(batch: pa.RecordBatch | pa.Table) -> Rows:
    """Convert the rows of one request, as written by `batch_of`, back to the rows of a record.

    Raises:
        InputError: a column is missing or malformed, or the rows belong to several requests.
    """
    check_parquet(batch.schema.metadata, "the record")
    check_names(batch.schema, required_fields())
    fields = [field for field in all_fields() if field.name in batch.schema.names]
    with as_input_error("the record"):
        columns = {field.name: valid_column(batch.column(field.name), field) for field in fields}
        found = set(columns["request_id"].unique().to_pylist())
    if len(found) > 1:
        raise InputError(f"the batch has {len(found)} requests; read_parquet and iter_parquet separate them")
    metadata = batch.schema.metadata or {}
    info = LogprobsInfo.from_json(metadata[INFO_KEY]) if INFO_KEY in metadata else None
    return _rows_of(columns, info)


# -- to Arrow ------------------------------------------------------------------------------------------------


def _spread(values: Array, has_value: Array, missing: int | None = None) -> pa.Array:
    """Expand values to one per position, null where `has_value` is False or the value equals `missing`."""
    spread = np.zeros(len(has_value), values.dtype)
    spread[has_value] = values
    is_null = ~has_value
    if missing is not None:
        is_null |= spread == missing
    return pa.array(spread, mask=is_null)


def _id_column(chosen: Array, has_chosen: Array, token_ids: npt.ArrayLike | None) -> pa.Array:
    if token_ids is None:
        return _spread(chosen, has_chosen)
    ids = np.asarray(token_ids, np.int64)
    if ids.shape != has_chosen.shape or not np.array_equal(ids[has_chosen], chosen):
        raise ParameterError("token_ids", "do not match the tokens of the record; give one id per position")
    return pa.array(ids)


def _kept_column(kept: IdLists | None, length: int) -> dict[str, pa.Array]:
    if kept is None:
        return {}
    return {"kept_ids": lists(kept.offsets, kept.token_ids.astype(np.int32), np.zeros(length, np.bool_))}


def _top_columns(chosen: Entries, top: Entries) -> dict[str, pa.Array]:
    if top.token_ids.max(initial=0) > np.iinfo(np.int32).max:
        return {}  # ids beyond int32 go to the `entry_*` columns only
    outside = logs_outside_top(chosen, top, with_chosen=False)
    return {
        "outside_top_logprob": pa.array(outside, mask=np.diff(top.offsets) == 0),
        "top_ids": lists(top.offsets, top.token_ids.astype(np.int32), top.none_flags()),
        "top_logprobs": lists(top.offsets, top.logprobs.astype(np.float32), top.none_flags()),
    }


def _byte_columns(byte_offsets: npt.ArrayLike | None, length: int) -> dict[str, Array]:
    if byte_offsets is None:
        return {}
    bounds = np.asarray(byte_offsets, np.int64)
    if bounds.shape != (length + 1,):
        raise ParameterError(
            "byte_offsets", f"has shape {bounds.shape}, but {length} positions need shape {(length + 1,)}"
        )
    return {"byte_start": bounds[:-1], "byte_end": bounds[1:]}


def _list_columns(prefix: str, entries: Entries | None, length: int) -> dict[str, pa.Array]:
    if entries is None or not length:
        return {}
    is_none = entries.none_flags()
    ranks = pa.array(entries.ranks, mask=entries.ranks == NO_RANK)
    columns = {
        f"{prefix}_ids": lists(entries.offsets, entries.token_ids.astype(np.int64), is_none),
        f"{prefix}_logprobs": lists(entries.offsets, entries.logprobs.astype(np.float64), is_none),
        f"{prefix}_ranks": lists(entries.offsets, ranks.cast(pa.int64()), is_none),
    }
    if entries.texts is not None:
        columns[f"{prefix}_tokens"] = lists(entries.offsets, pa.array(entries.texts, pa.string()), is_none)
    return columns


def lists(offsets: Array, values: Any, is_none: Array) -> pa.Array:
    """Return a column of lists: list t has values [offsets[t], offsets[t + 1]), or is null."""
    return pa.ListArray.from_arrays(
        pa.array(offsets.astype(np.int32)), pa.array(values), mask=pa.array(is_none)
    )


def _cast(column: Any, field: pa.Field, length: int) -> pa.Array:
    if column is None:
        return pa.nulls(length, field.type)
    array = column if isinstance(column, pa.Array) else pa.array(column)
    return array if array.type == field.type else array.cast(field.type)


# -- from Arrow ----------------------------------------------------------------------------------------------


def _rows_of(columns: dict[str, pa.Array], info: LogprobsInfo | None) -> Rows:
    rows, given, kept = Rows(info), None, None
    has_entries = np.asarray(columns["entry_ids"].is_valid())
    is_none = ~has_entries & np.asarray(columns["top_ids"].is_null())
    check_columns(columns, has_entries, is_none)
    if has_entries.any():
        _append_entries(rows, columns, "entry", is_none)
    else:
        _append_regular(rows, columns, is_none)
    if columns["given_ids"].null_count < len(is_none):
        given = Rows()
        _append_entries(given, columns, "given", np.asarray(columns["given_ids"].is_null()))
    ids = columns["kept_ids"]
    if ids.null_count < len(is_none):
        kept = IdLists(_offsets_of(ids), np.asarray(ids.flatten()))
    extras = {
        name: np.asarray(columns[name].fill_null(np.nan))
        for name in EXTRAS
        if name in columns and columns[name].null_count < len(columns[name])
    }
    rows.set_beside(extras, given, kept)
    return rows


def _offsets_of(lists: pa.Array) -> Array:
    widths = np.asarray(lists.value_lengths().fill_null(0))
    return np.concatenate([[0], np.cumsum(widths, dtype=np.int64)])


def _append_regular(rows: Rows, columns: dict[str, pa.Array], is_none: Array) -> None:
    num_none = int(np.count_nonzero(is_none))
    rows.append_none(num_none)
    num_rows = len(is_none) - num_none
    if not num_rows:
        return

    def matrix(chosen: str, top: str) -> Array:
        flat = np.asarray(columns[top].flatten())
        return np.column_stack([np.asarray(columns[chosen])[num_none:], flat.reshape(num_rows, -1)])

    ids = matrix("token_id", "top_ids").astype(np.int64)
    logprobs = matrix("logprob", "top_logprobs").astype(np.float32)
    rows.append_steps(Steps(ids, logprobs, np.asarray(columns["rank"])[num_none:].astype(np.int64)))


def _append_entries(rows: Rows, columns: dict[str, pa.Array], prefix: str, is_none: Array) -> None:
    ids = columns[f"{prefix}_ids"]
    tokens = columns.get(f"{prefix}_tokens")
    entries = Entries(
        offsets=_offsets_of(ids),
        token_ids=np.asarray(ids.flatten()),
        logprobs=np.asarray(columns[f"{prefix}_logprobs"].flatten()),
        ranks=np.asarray(columns[f"{prefix}_ranks"].flatten().fill_null(NO_RANK)),
        is_none=is_none,
        texts=None if tokens is None or tokens.null_count == len(tokens) else tokens.flatten().to_pylist(),
    )
    num_none = int(np.argmin([*is_none, False]))
    rows.append_none(num_none)
    rows.append_entries(entries.take(np.arange(num_none, len(is_none))))
