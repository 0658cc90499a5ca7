"""Parquet output and input by rows."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from logprobe._arrow import pa, pq
from logprobe.records.forms.arrow import INFO_KEY
from logprobe.records.forms.arrow_validity import python_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

# Rows decoded at once; few, because texts may be large, and a small file may repeat one large text many
# times.
ROWS_A_BATCH = 64

__all__ = ["INFO_KEY", "parquet_rows", "parquet_writer"]


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
