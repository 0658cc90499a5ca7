"""Parquet and JSON Lines output, durable writes, and I/O errors that name the file."""

from __future__ import annotations

import json
import math
import os
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from logprobe.errors import InputError, LogprobeError, OutputError
from logprobe.private_files import claim, sync
from logprobe.records.forms.arrow import INFO_KEY
from logprobe.records.forms.arrow_validity import UNREADABLE, python_rows
from logprobe.records.forms.finite import finite_fields

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

# Rows decoded at once; few, because texts may be large, and a small file may repeat one large text many
# times.
ROWS_A_BATCH = 64
_MESSAGE_CHARS = 300  # pyarrow's messages may be pages long

__all__ = ["INFO_KEY", "json_line", "parquet_rows", "parquet_writer", "reading", "write_durably", "writing"]


def json_line(row: dict[str, Any]) -> str:
    """Return a row as JSON, with -inf as -9999 and +inf (the perplexity of an impossible text) as null."""
    bounded = {name: None if value == math.inf else value for name, value in row.items()}
    return json.dumps(finite_fields(bounded), ensure_ascii=False)


@contextmanager
def parquet_writer(
    path: str | Path, schema: pa.Schema, info: bytes | None = None
) -> Iterator[Callable[[pa.Table], None]]:
    """Open a zstd-compressed Parquet file and yield a function that writes a table as a row group.

    The file has the metadata of `schema`, and `info`, a `LogprobsInfo` as JSON.
    """
    whole = schema.with_metadata((schema.metadata or {}) | ({} if info is None else {INFO_KEY: info}))
    with pq.ParquetWriter(path, whole, compression="zstd") as writer:

        def write(table: pa.Table) -> None:
            writer.write_table(table.replace_schema_metadata(whole.metadata))
            pa.default_memory_pool().release_unused()  # otherwise the pool keeps each group's memory

        yield write


def parquet_rows(file: pq.ParquetFile, columns: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet file as Python values, decoding `ROWS_A_BATCH` rows at a time."""
    for batch in file.iter_batches(batch_size=ROWS_A_BATCH, columns=list(columns)):
        yield from python_rows(batch)


@contextmanager
def reading(path: str | Path, remedy: str = "use another file") -> Iterator[None]:
    """Convert an exception that says the file is damaged or unreadable to an `InputError` that names it."""
    try:
        yield
    except LogprobeError:
        raise
    except (*UNREADABLE, ValueError, RecursionError) as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise InputError(f"{path}: cannot be read ({reason:.{_MESSAGE_CHARS}}); {remedy}") from error


@contextmanager
def writing(path: str | Path, remedy: str = "free disk space, or use another path") -> Iterator[None]:
    """Convert an `OSError` within the block to an `OutputError` that names the output."""
    try:
        yield
    except LogprobeError:
        raise
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error  # pyarrow's own text is longer
        raise OutputError(f"{path}: cannot be written ({reason}); {remedy}") from error


def write_durably(path: Path, write: Callable[[Path], object]) -> None:
    """Write to a temporary file, flush it to disk, and rename it to `path`.

    On failure the temporary file is deleted.
    """
    unfinished = path.with_name(f"{path.name}.tmp")
    try:
        claim(unfinished)
        write(unfinished)
        sync(unfinished)
        unfinished.replace(path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise
    sync(path.parent)
