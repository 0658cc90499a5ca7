"""Records as Arrow batches and Parquet files, which DuckDB and polars can read directly."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Self

from logprobe._arrow import pa, pq
from logprobe.errors import InputError, require
from logprobe.records.flat import FlatLogprobs
from logprobe.records.forms.arrow import batch_of, required_fields, rows_of, schema
from logprobe.records.forms.arrow_validity import as_input_error, check_counts, check_names
from logprobe.records.forms.versions import check_parquet
from logprobe.records.info import check_same_info

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import TracebackType

    import numpy.typing as npt

    from logprobe.records.info import LogprobsInfo

ROWS_A_GROUP = 16_384


def to_arrow(
    record: FlatLogprobs,
    request_id: str = "",
    *,
    byte_offsets: npt.ArrayLike | None = None,
    token_ids: npt.ArrayLike | None = None,
) -> pa.RecordBatch:
    """Convert a record to an Arrow batch of T rows, one per position.

    Args:
        record: the record.
        request_id: value of the `request_id` column in every row.
        byte_offsets: (T + 1,); the text of position t is bytes [byte_offsets[t], byte_offsets[t + 1]) of the
            reply.
        token_ids: (T,); ids of all tokens, even at positions without a prediction, such as a prompt's first.

    Raises:
        ParameterError: `request_id` is not a string, `byte_offsets` or `token_ids` has the wrong length, or
            the ids differ from the record's.
    """
    _check_request_id(request_id)
    _check_record("record", record)
    return batch_of(record.copy().rows, request_id, byte_offsets=byte_offsets, token_ids=token_ids)


def from_arrow(batch: pa.RecordBatch | pa.Table) -> FlatLogprobs:
    """Convert the rows of one request to a record.

    Raises:
        InputError: a column is missing or malformed, or the rows belong to several requests.
    """
    return FlatLogprobs.of(rows_of(batch))


def write_parquet(path: str | Path, records: Mapping[str, FlatLogprobs]) -> None:
    """Write a map from request id to record to a zstd-compressed Parquet file.

    The file's metadata holds the `info` of the records.

    Raises:
        ParameterError: `records` is not a map of records, or the records differ in `info`; an existing file
            stays as it was.
    """
    is_map = isinstance(records, Mapping)
    require(is_map, "records", "must map request ids to records; write one as {'request-1': record}")
    infos = []
    for request_id, record in records.items():  # before the file is replaced
        _check_request_id(request_id)
        _check_record("records", record, f"the value of {request_id!r} ")
        infos.append(record.info)
        check_same_info("records", f"the record of {request_id!r}", record.info, infos[0])
    with ParquetWriter(path) as writer:
        for request_id, record in records.items():
            writer.write(request_id, record)


def read_parquet(path: str | Path) -> dict[str, FlatLogprobs]:
    """Read all records in a file into a dict by request id.

    Raises:
        InputError: the file is not a Parquet file of records, or the rows of one request are not contiguous.
    """
    records: dict[str, FlatLogprobs] = {}
    for request_id, record in iter_parquet(path):
        if request_id in records:
            raise InputError(f"{path}: the rows of request {request_id!r} are not contiguous")
        records[request_id] = record
    return records


def iter_parquet(path: str | Path) -> Iterator[tuple[str, FlatLogprobs]]:
    """Yield (request id, record) for each record in a file, holding one row group and one record in memory.

    Raises:
        InputError: the file is not a Parquet file, or its columns are not those of records.
    """
    waiting: list[pa.RecordBatch] = []
    with as_input_error(path), pq.ParquetFile(path) as file:
        check_parquet(file.schema_arrow.metadata, "the file")
        check_names(file.schema_arrow, required_fields())
        check_counts(file.metadata.num_rows, Path(path).stat().st_size)
        for batch in file.iter_batches(batch_size=ROWS_A_GROUP):
            for request_id, part in _split(batch):
                if waiting and waiting[0].column("request_id")[0].as_py() != request_id:
                    yield _joined(waiting)
                    waiting = []
                waiting.append(part)
        if waiting:
            yield _joined(waiting)


class ParquetWriter:
    """Writes records to a zstd-compressed Parquet file, buffering about one row group and the request ids.

    Args:
        path: the file.
        info: metadata for the file. Every record must have the same, or none. None: the metadata of the first
            record, which every other record must have too.
    """

    def __init__(self, path: str | Path, info: LogprobsInfo | None = None) -> None:
        self._info = info
        self._is_info_given = info is not None
        self._request_ids: set[str] = set()
        self._sink = pa.OSFile(str(path), "wb")
        # Opened at the first flush: pyarrow needs the metadata, which may come from the first record.
        self._file: pq.ParquetWriter | None = None
        self._waiting: list[pa.RecordBatch] = []
        self._num_waiting = 0

    def write(
        self,
        request_id: str,
        record: FlatLogprobs,
        *,
        byte_offsets: npt.ArrayLike | None = None,
        token_ids: npt.ArrayLike | None = None,
    ) -> None:
        """Add one request's record; an empty record adds no rows.

        `byte_offsets` and `token_ids` are as in `to_arrow`. Pass the ids of a prompt to store its first
        token too.

        Raises:
            ParameterError: `request_id` is not a string or was written before, the file is closed,
                `byte_offsets` or `token_ids` has the wrong length, the ids differ from the record's, or the
                record's `info` differs from the file's.
        """
        batch = to_arrow(record, request_id, byte_offsets=byte_offsets, token_ids=token_ids)
        is_open, is_new = not self._sink.closed, request_id not in self._request_ids
        require(is_open, "request_id", f"{request_id!r} is written after close(); open another file for it")
        require(
            is_new, "request_id", f"{request_id!r} was written before; use a different id for each record"
        )
        if not self._request_ids and not self._is_info_given:
            self._info = record.info
        if record.info is not None or not self._is_info_given:
            check_same_info("record", f"the record of {request_id!r}", record.info, self._info)
        self._request_ids.add(request_id)
        self._waiting.append(batch)
        self._num_waiting += len(batch)
        if self._num_waiting >= ROWS_A_GROUP:
            self._flush()

    def close(self) -> None:
        """Write buffered rows and the file's footer; do nothing if the file is closed."""
        if self._sink.closed:
            return
        self._flush().close()
        self._sink.close()

    def _flush(self) -> pq.ParquetWriter:
        """Write buffered rows and return the open file."""
        whole = schema(self._info)
        if self._file is None:
            self._file = pq.ParquetWriter(self._sink, whole, compression="zstd")
        if self._num_waiting:
            batches = [batch.replace_schema_metadata(whole.metadata) for batch in self._waiting]
            self._file.write_table(pa.Table.from_batches(batches, whole))
        self._waiting, self._num_waiting = [], 0
        return self._file

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _check_request_id(request_id: object) -> None:
    is_text = isinstance(request_id, str)
    require(is_text, "request_id", "must be a string; convert it with str()", got=request_id)


def _check_record(parameter: str, record: object, name: str = "") -> None:
    remedy = "generate with logprobs or prompt_logprobs" if record is None else "pass a FlatLogprobs"
    is_record = isinstance(record, FlatLogprobs)
    require(is_record, parameter, f"{name}must be a record, not {type(record).__name__}; {remedy}")


def _split(batch: pa.RecordBatch) -> Iterable[tuple[str, pa.RecordBatch]]:
    """Yield (request id, rows) for each group of consecutive rows that belong to one request."""
    start = 0
    for request_id, run in groupby(batch.column("request_id").to_pylist()):
        length = sum(1 for _ in run)
        yield request_id, batch.slice(start, length)
        start += length


def _joined(parts: list[pa.RecordBatch]) -> tuple[str, FlatLogprobs]:
    return parts[0].column("request_id")[0].as_py(), from_arrow(pa.Table.from_batches(parts))
