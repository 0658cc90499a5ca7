"""Validation of Arrow columns, which may come from untrusted files, before `arrow` converts them."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from logprobe._arrow import pa, pc
from logprobe.errors import InputError
from logprobe.records.forms.validity import require

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from logprobe.records.store.columns import Array

# Limit on the rows that a file may claim: columns compress, but logprobs of chosen tokens hardly repeat.
MAX_ROWS_A_BYTE: Final = 8
ALWAYS_ROWS: Final = 1 << 20
UNREADABLE: Final = (OSError, pa.ArrowException, UnicodeDecodeError)
"""Errors that pyarrow raises for damaged files; `UnicodeDecodeError` comes from column names."""


@contextmanager
def as_input_error(source: object) -> Iterator[None]:
    """Convert pyarrow's errors about damaged data to `InputError`, and prefix `source` to every `InputError`.

    An `OSError` with an errno, such as a missing file, is not converted.
    """
    try:
        yield
    except InputError as error:
        raise InputError(f"{source}: {error}") from error
    except UNREADABLE as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise InputError(f"{source} cannot be read: {' '.join(str(error).split())[:300]}") from error


def check_names(schema: pa.Schema, fields: Iterable[pa.Field]) -> None:
    """Check that each of the given columns is present exactly once.

    Raises:
        InputError: a column is missing or duplicated.
    """
    missing = [field.name for field in fields if schema.names.count(field.name) != 1]
    if missing:
        raise InputError(f"not a record: the columns {', '.join(missing)} are missing or duplicated")


def check_counts(num_rows: int, num_bytes: int) -> None:
    """Check that a Parquet file does not claim more positions than its size can hold.

    Only the footer's row count is used: pyarrow crashes the process if the column metadata is damaged.

    Raises:
        InputError: the file claims more positions.
    """
    is_little = num_rows <= max(MAX_ROWS_A_BYTE * num_bytes, ALWAYS_ROWS)
    require(is_little, f"it claims {num_rows} positions in {num_bytes} bytes")


def python_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return the rows of a batch as Python values.

    Raises:
        ArrowInvalid: a string is not UTF-8, or a value, such as a time, has no Python equivalent.
    """
    try:
        rows: list[dict[str, Any]] = batch.to_pylist()
    except (ValueError, OverflowError, RecursionError) as error:
        raise pa.ArrowInvalid(str(error)) from error
    return rows


def valid_column(column: Any, field: pa.Field) -> pa.Array:
    """Validate a column and return it as one array of the field's type.

    Raises:
        ArrowInvalid: the column's offsets or strings are invalid, or its type cannot be cast.
    """
    column.validate(full=True)
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return array if array.type == field.type else array.cast(field.type)


def check_columns(columns: Mapping[str, pa.Array], has_entries: Array, is_none: Array) -> None:
    """Check that parallel lists have equal lengths, and that values are present where positions need them.

    Raises:
        InputError: the columns are inconsistent.
    """
    _check_lists(columns, "top_ids", "top_logprobs")
    for prefix in ("given", "entry"):
        _check_lists(columns, f"{prefix}_ids", f"{prefix}_logprobs", f"{prefix}_ranks")
    _check_lists(columns, "kept_ids")
    tokens, widths = columns["entry_tokens"], columns["entry_ids"].value_lengths()
    are_texts = tokens.null_count == len(tokens) or tokens.value_lengths().equals(widths)
    require(are_texts, "entry_tokens and entry_ids have different lengths")
    if has_entries.any():
        require((has_entries | is_none).all(), "some positions have entries and some do not")
    elif not is_none.all():
        _check_regular(columns, is_none)


def _check_lists(columns: Mapping[str, pa.Array], *names: str) -> None:
    widths = columns[names[0]].value_lengths()
    for name in names:
        require(columns[name].value_lengths().equals(widths), f"{name} and {names[0]} have different lengths")
        values = columns[name].flatten()
        require(values.null_count == 0 or name.endswith("ranks"), f"{name} has a null value")
        require(pa.types.is_floating(values.type) or _least(values) >= 0, f"{name} has a negative number")


def _check_regular(columns: Mapping[str, pa.Array], is_none: Array) -> None:
    num_none = int(np.count_nonzero(is_none))
    require(is_none[:num_none].all(), "a position without entries follows one with some")
    widths = columns["top_ids"].value_lengths().slice(num_none)
    require(len(widths.unique()) == 1, "its positions have different numbers of tokens")
    for name in ("token_id", "logprob", "rank"):
        values = columns[name].slice(num_none)
        require(values.null_count == 0, f"{name} has a null value")
        require(name == "logprob" or _least(values) >= 0, f"{name} has a negative number")


def _least(values: pa.Array) -> int:
    least = pc.min(values).as_py()
    return 0 if least is None else int(least)
