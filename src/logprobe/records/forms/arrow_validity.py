"""What Arrow columns must be before a record is made of them: the file may come from anywhere.

Before it: batches and Parquet files as pyarrow reads them. After it: `arrow`, which trusts them.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from logprobe.errors import InputError
from logprobe.records.forms.validity import require

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from logprobe.records.store.columns import Array

# Positions that a file may count: columns may repeat, but the numbers of chosen tokens hardly ever do.
MAX_ROWS_A_BYTE: Final = 8
ALWAYS_ROWS: Final = 1 << 20
UNREADABLE: Final = (OSError, pa.ArrowException, UnicodeDecodeError)
"""Errors of pyarrow for a file that is damaged; the last one for names of columns."""


@contextmanager
def as_input_error(source: object) -> Iterator[None]:
    """Raise `InputError` for what pyarrow finds wrong with bytes; no file at all stays an `OSError`.

    An `InputError` of what the bytes say gets the name of their source.
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
    """All columns of a record.

    Raises:
        InputError: one is missing, or stands twice.
    """
    missing = [field.name for field in fields if schema.names.count(field.name) != 1]
    if missing:
        raise InputError(f"no record: the columns {', '.join(missing)} are missing, or stand twice")


def check_counts(num_rows: int, num_bytes: int) -> None:
    """Refuse a Parquet file that counts more positions than its bytes can stand for.

    What the footer says of columns is not asked: pyarrow ends the process where that is damaged.

    Raises:
        InputError: it counts more.
    """
    is_little = num_rows <= max(MAX_ROWS_A_BYTE * num_bytes, ALWAYS_ROWS)
    require(is_little, f"it counts {num_rows} positions in {num_bytes} bytes")


def python_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return the rows of a batch as Python values.

    Raises:
        ArrowInvalid: it holds a text that is not UTF-8, or a time that Python has no value for.
    """
    try:
        rows: list[dict[str, Any]] = batch.to_pylist()
    except (ValueError, OverflowError, RecursionError) as error:
        raise pa.ArrowInvalid(str(error)) from error
    return rows


def valid_column(column: Any, field: pa.Field) -> pa.Array:
    """A column of the right type in one piece, whose offsets and texts hold what they say.

    Raises:
        ArrowInvalid: they do not, or another type cannot be made this one.
    """
    column.validate(full=True)
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return array if array.type == field.type else array.cast(field.type)


def check_columns(columns: Mapping[str, pa.Array], has_entries: Array, is_none: Array) -> None:
    """Columns that fit each other: lists of one length, numbers where positions have them.

    Raises:
        InputError: they do not.
    """
    _check_lists(columns, "top_ids", "top_logprobs")
    for prefix in ("given", "entry"):
        _check_lists(columns, f"{prefix}_ids", f"{prefix}_logprobs", f"{prefix}_ranks")
    _check_lists(columns, "kept_ids")
    tokens, widths = columns["entry_tokens"], columns["entry_ids"].value_lengths()
    are_texts = tokens.null_count == len(tokens) or tokens.value_lengths().equals(widths)
    require(are_texts, "entry_tokens of other lengths than entry_ids")
    if has_entries.any():
        require((has_entries | is_none).all(), "some positions have entries and some have not")
    elif not is_none.all():
        _check_regular(columns, is_none)


def _check_lists(columns: Mapping[str, pa.Array], *names: str) -> None:
    widths = columns[names[0]].value_lengths()
    for name in names:
        require(columns[name].value_lengths().equals(widths), f"{name} of other lengths than {names[0]}")
        values = columns[name].flatten()
        require(values.null_count == 0 or name.endswith("ranks"), f"{name} has a gap")
        require(pa.types.is_floating(values.type) or _least(values) >= 0, f"{name} holds a negative number")


def _check_regular(columns: Mapping[str, pa.Array], is_none: Array) -> None:
    num_none = int(np.count_nonzero(is_none))
    require(is_none[:num_none].all(), "a position without entries follows one with some")
    widths = columns["top_ids"].value_lengths().slice(num_none)
    require(len(widths.unique()) == 1, "its positions list different numbers of tokens")
    for name in ("token_id", "logprob", "rank"):
        values = columns[name].slice(num_none)
        require(values.null_count == 0, f"{name} has a gap")
        require(name == "logprob" or _least(values) >= 0, f"{name} holds a negative number")


def _least(values: pa.Array) -> int:
    least = pc.min(values).as_py()
    return 0 if least is None else int(least)
