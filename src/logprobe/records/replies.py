"""Replies of a server as Arrow streams and Parquet files.

The rows are those of `records.to_arrow`, without the columns that a reply does not use, with top-k lists of
fixed size, and with the text of each generated token. The column `request_id` names the record of a row:
choice c of a reply has the records `c`, `c/processed` (with `logprobs_mode="both"`) and, if it is the first
choice of its prompt, `c/prompt`. Everything else in the reply is JSON under the metadata key
`logprobe.reply`. A whole reply has this key in its schema's metadata, a stream in that of its last batch.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import numpy as np

from logprobe._arrow import pa, pq
from logprobe.errors import InputError, ParameterError, shortened
from logprobe.records.flat import FlatLogprobs
from logprobe.records.forms.arrow import INFO_KEY, all_fields, lists, required_fields, rows_of, schema
from logprobe.records.forms.arrow_validity import as_input_error, check_counts, check_names, valid_column
from logprobe.records.forms.validity import require
from logprobe.records.forms.versions import check_parquet
from logprobe.records.info import LogprobsInfo

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from logprobe.records.store.columns import Array
    from logprobe.records.store.rows import Rows

REPLY_KEY: Final = b"logprobe.reply"  # JSON of the reply without rows
ERROR_KEY: Final = b"logprobe.error"  # JSON of the error that ended a stream
END_OF_STREAM: Final = b"\xff\xff\xff\xff\0\0\0\0"
PARQUET_MAGIC: Final = b"PAR1"
IRREGULAR: Final = "positions have different numbers of alternatives; accept application/json"
_BARE: Final = ("request_id", "position", "token_id")
_SCORED: Final = ("logprob", "rank")
_GIVEN: Final = ("given_ids", "given_logprobs", "given_ranks")


class Part(NamedTuple):
    """Consecutive rows of one record of a reply."""

    request_id: str
    rows: Rows | None  # None: log-probabilities were not requested
    start: int
    token_ids: Sequence[int]  # of positions from `start`
    texts: Sequence[str] | None  # of the tokens; None for prompts


class ReplySchema:
    """The schema of one reply, and the batches of its rows.

    Args:
        infos: info of the records, by the part of their names after the slash: `""`, `processed` or `prompt`.
        widths: the numbers of alternatives per position that occur in the records; empty without records.
        extras: the names of requested extra columns.
        has_given: True if the rows have entries of requested token ids.
        reply: JSON of the reply without rows, if it is known already.
        is_complete: if True, include all columns of `records.to_arrow`, unused ones filled with nulls, so
            that `read_parquet` can read the file too.
    """

    def __init__(
        self,
        infos: Mapping[str, LogprobsInfo | None],
        widths: set[int],
        extras: Sequence[str] = (),
        *,
        has_given: bool = False,
        reply: bytes | None = None,
        is_complete: bool = False,
    ) -> None:
        has_top = is_complete or widths not in ({0}, set())
        names = {*_BARE, *(_SCORED if widths else ()), *extras, *(_GIVEN if has_given else ())}
        names |= {"top_ids", "top_logprobs"} if has_top else set()
        # None: lists of different lengths
        self._k = max(widths) if len(widths) == 1 and not is_complete else None
        whole = schema(infos.get("") or infos.get("prompt"))
        fields = [self._fixed(field) for field in whole if is_complete or field.name in names]
        metadata: dict[bytes | str, bytes | str] = {
            _info_key(name): info.to_json() for name, info in infos.items() if name and info is not None
        }
        if reply is not None:
            metadata[REPLY_KEY] = reply
        self.arrow = pa.schema([*fields, pa.field("text", pa.string())], whole.metadata | metadata)

    def _fixed(self, field: pa.Field) -> pa.Field:
        if self._k is None or not field.name.startswith("top_"):
            return field
        return pa.field(field.name, pa.list_(field.type.value_type, self._k))

    def batches(self, parts: Iterable[Part]) -> list[pa.RecordBatch]:
        """Return one batch of rows per part.

        Raises:
            ParameterError: positions of a record have different numbers of alternatives.
        """
        return [self._batch(part) for part in parts]

    def _batch(self, part: Part) -> pa.RecordBatch:
        length = len(part.token_ids)
        columns: dict[str, Any] = {
            "request_id": pa.repeat(part.request_id, length),
            "position": np.arange(part.start, part.start + length),
            "token_id": np.asarray(part.token_ids, np.int64),
        }
        if part.texts is not None:
            columns["text"] = pa.array(part.texts, pa.string())
        if part.rows is not None:
            columns |= self._scored(part.rows, part.start, part.start + length)
        arrays = [self._array(columns.get(field.name), field.type, length) for field in self.arrow]
        return pa.record_batch(arrays, schema=self.arrow)

    @staticmethod
    def _array(column: Any, kind: pa.DataType, length: int) -> pa.Array:
        if column is None:
            return pa.nulls(length, kind)
        return column if isinstance(column, pa.Array) else pa.array(column, kind)

    def _scored(self, rows: Rows, start: int, stop: int) -> dict[str, Any]:
        num_none, steps, others = rows.split(start, stop)
        if others.num_rows or steps.repeats_chosen:
            raise ParameterError("logprobs", IRREGULAR)
        is_none = np.zeros(stop - start, np.bool_)
        is_none[:num_none] = True
        mask = is_none if num_none else None
        columns: dict[str, Any] = {
            "logprob": pa.array(_after(num_none, steps.logprobs[:, 0].astype(np.float32)), mask=mask),
            "rank": pa.array(_after(num_none, steps.ranks.astype(np.int64)), mask=mask),
        }
        if "top_ids" in self.arrow.names:
            ids, logprobs = steps.token_ids[:, 1:].astype(np.int32), steps.logprobs[:, 1:].astype(np.float32)
            columns |= {"top_ids": self._top(ids, is_none), "top_logprobs": self._top(logprobs, is_none)}
        for name, extra in rows.extras(start, stop).items():
            columns[name] = pa.array(extra, mask=np.isnan(extra))
        given = rows.given(start, stop)
        if given is not None and "given_ids" in self.arrow.names:
            entries = given.entries(0, stop - start)
            values = (entries.token_ids.astype(np.int64), entries.logprobs.astype(np.float64), entries.ranks)
            for name, value in zip(_GIVEN, values, strict=True):
                columns[name] = lists(entries.offsets, value, entries.none_flags())
        return columns

    def _top(self, values: Array, is_none: Array) -> pa.Array:
        num_none, k = int(np.count_nonzero(is_none)), values.shape[1]
        if self._k is None:
            offsets = np.maximum(np.arange(len(is_none) + 1) - num_none, 0) * k
            return lists(offsets, values.ravel(), is_none)
        if len(values) and k != self._k:
            raise ParameterError("logprobs", IRREGULAR)
        padded = _after(num_none * self._k, values.ravel())
        mask = pa.array(is_none) if num_none else None
        return pa.FixedSizeListArray.from_arrays(pa.array(padded), self._k, mask=mask)

    # -- bytes -----------------------------------------------------------------------------------------------

    def whole_stream(self, batches: Iterable[pa.RecordBatch]) -> bytes:
        """Return an Arrow stream of batches."""
        return b"".join([self.opening(), *(_message(batch) for batch in batches), END_OF_STREAM])

    def parquet(self, batches: Sequence[pa.RecordBatch]) -> bytes:
        """Return a zstd-compressed Parquet file of batches."""
        sink = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_batches(batches, self.arrow), sink, compression="zstd")
        data: bytes = sink.getvalue().to_pybytes()
        return data

    def opening(self) -> bytes:
        """Return the beginning of a stream."""
        data: bytes = self.arrow.serialize().to_pybytes()
        return data

    def step(self, batches: Sequence[pa.RecordBatch]) -> bytes:
        """Return the rows of one step of a stream, merged into one batch."""
        if len(batches) > 1:
            batches = pa.Table.from_batches(batches, self.arrow).combine_chunks().to_batches()
        return b"".join(map(_message, batches))

    def closing(self, metadata: Mapping[bytes, bytes]) -> bytes:
        """Return the end of a stream: a batch without rows, with `metadata` as its custom metadata."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self.arrow) as writer:
            writer.write_batch(pa.RecordBatch.from_pylist([], self.arrow), custom_metadata=dict(metadata))
        data: bytes = sink.getvalue().to_pybytes()
        return data[len(self.opening()) :]


@dataclass(frozen=True, slots=True)
class ReplyRows:
    """A reply that was sent as an Arrow stream or Parquet file."""

    reply: dict[str, Any]  # what a JSON reply would say, without log-probabilities; {} if a stream was cut
    records: dict[str, FlatLogprobs]  # by name: "0", "0/processed", "0/prompt" and so on for other choices
    texts: dict[str, str]  # text of each choice, by name
    token_ids: dict[str, Array]  # (T,) int64, by name


def read_reply(source: bytes | str | Path) -> ReplyRows:
    """Read a reply to `Accept: application/vnd.apache.arrow.stream` or `application/vnd.apache.parquet`.

    Args:
        source: the body of the reply, or a file with it.

    Raises:
        InputError: the source is not such a reply, or the server reported an error at the end of a stream.
    """
    data = source if isinstance(source, bytes) else Path(source).read_bytes()
    if not data.startswith(PARQUET_MAGIC):
        return read_stream(data)
    with as_input_error("the reply"):
        return _reply_of(*_parquet_batches(data))


def read_stream(data: bytes) -> ReplyRows:
    """Read an Arrow stream as `read_reply` does; safe for data of an untrusted server.

    Raises:
        InputError: the data is not such a stream, or the server reported an error at its end.
    """
    with as_input_error("the reply"):
        return _reply_of(*_batches(data))


def _reply_of(batches: Sequence[pa.RecordBatch], metadata: Mapping[bytes, bytes]) -> ReplyRows:
    if ERROR_KEY in metadata:
        raise InputError(f"the server ended the stream: {_message_of(metadata[ERROR_KEY])}")
    parts: dict[str, list[pa.RecordBatch]] = {}
    for batch in batches:
        check_names(batch.schema, [pa.field(name, pa.null()) for name in _BARE])
        batch.validate(full=True)
        for name, part in _by_record(batch):
            parts.setdefault(name, []).append(part)
    tables = {name: pa.Table.from_batches(own) for name, own in parts.items()}
    scored = {name: table for name, table in tables.items() if "rank" in table.schema.names}
    return ReplyRows(
        reply=_object(metadata.get(REPLY_KEY, b"{}"), REPLY_KEY),
        records={name: _record(name, table) for name, table in scored.items()},
        texts={name: _text(table) for name, table in tables.items() if "/" not in name},
        token_ids={name: _token_ids(table) for name, table in tables.items()},
    )


def _info_key(kind: str) -> bytes:
    return INFO_KEY + (f".{kind}".encode() if kind else b"")


def _after(num_before: int, values: Array) -> Array:
    """Return values preceded by `num_before` zeros."""
    return np.concatenate([np.zeros(num_before, values.dtype), values]) if num_before else values


def _message(batch: pa.RecordBatch) -> bytes:
    data: bytes = batch.serialize().to_pybytes()
    return data


# -- reading -------------------------------------------------------------------------------------------------


def _parquet_batches(data: bytes) -> tuple[list[pa.RecordBatch], dict[bytes, bytes]]:
    file = pq.ParquetFile(pa.BufferReader(data))
    check_parquet(file.schema_arrow.metadata, "the reply")
    check_counts(file.metadata.num_rows, len(data))
    return list(file.iter_batches()), dict(file.schema_arrow.metadata or {})


def _batches(data: bytes) -> tuple[list[pa.RecordBatch], dict[bytes, bytes]]:
    """Return the batches of an Arrow stream, and its metadata: the schema's and the last batch's."""
    for message in pa.ipc.MessageReader.open_stream(data):
        # A compressed body may expand to any size.
        require(not _is_compressed(message), "the stream is compressed, though this was not requested")
    batches: list[pa.RecordBatch] = []
    reader = pa.ipc.open_stream(data)
    check_parquet(reader.schema.metadata, "the reply")
    _check_types(reader.schema)
    metadata = dict(reader.schema.metadata or {})
    # pyarrow also ends at the end of the data; a stream that was cut has no REPLY_KEY in its last batch.
    is_complete = REPLY_KEY not in metadata or data.endswith(END_OF_STREAM)
    require(is_complete, "the reply is incomplete; request it again")
    num_rows = 0
    while True:
        try:
            batch, own = reader.read_next_batch_with_custom_metadata()
        except StopIteration:
            return batches, metadata
        num_rows += batch.num_rows
        check_counts(num_rows, len(data))
        metadata |= {} if own is None else dict(own.items())
        if batch.num_rows:
            batches.append(batch)


def _check_types(schema: pa.Schema) -> None:
    """Check that all columns have the types that servers write.

    With other types, a small reply could expand to any size: dictionaries may be compressed, and lists of
    nulls need no data.
    """
    types = {field.name: field.type for field in all_fields()} | {"text": pa.string()}
    require(len(set(schema.names)) == len(schema.names), "a column is duplicated")
    for field in schema:
        kind = field.type
        if pa.types.is_fixed_size_list(kind):
            kind = pa.list_(kind.value_type)
        problem = f"the column {field.name[:60]!r} has an invalid type {str(field.type)[:60]!r}"
        require(types.get(field.name) == kind, problem)


def _is_compressed(message: Any) -> bool:
    """Return True if a record batch has the field `compression` (format/Message.fbs of Arrow)."""
    data = message.metadata
    view = memoryview(data)

    def field(table: int, number: int) -> int:
        """Return the position of a field of a flatbuffers table; 0 if the field is absent."""
        vtable = table - struct.unpack_from("<i", view, table)[0]
        if 4 + 2 * number >= struct.unpack_from("<H", view, vtable)[0]:
            return 0
        offset = struct.unpack_from("<H", view, vtable + 4 + 2 * number)[0]
        return table + offset if offset else 0

    try:
        header = field(struct.unpack_from("<I", view, 0)[0], 2)
        batch = header + struct.unpack_from("<I", view, header)[0]
        return message.type == "record batch" and field(batch, 3) != 0
    except struct.error as error:
        raise InputError("a message of the stream is damaged") from error


def _by_record(batch: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
    """Yield (record name, rows) for each run of rows of one record."""
    start = 0
    for name, run in groupby(batch.column("request_id").to_pylist()):
        length = sum(1 for _ in run)
        yield str(name), batch.slice(start, length)
        start += length


def _record(name: str, table: pa.Table) -> FlatLogprobs:
    """Return the record of rows, after adding the columns that the reply does not use."""
    metadata = table.schema.metadata or {}
    kind = name.partition("/")[2]
    for field in required_fields():
        if field.name not in table.schema.names:
            table = table.append_column(field, _unused(field, table))
    rows = rows_of(table)
    if kind and _info_key(kind) in metadata:
        rows.info = LogprobsInfo.from_json(metadata[_info_key(kind)])
    return FlatLogprobs.of(rows)


def _unused(field: pa.Field, table: pa.Table) -> pa.Array:
    if not field.name.startswith("top_"):
        return pa.nulls(len(table), field.type)
    is_none = table.column("rank").combine_chunks().is_null().to_numpy(zero_copy_only=False)
    return lists(np.zeros(len(table) + 1, np.int64), pa.array([], field.type.value_type), is_none)


def _text(table: pa.Table) -> str:
    if "text" not in table.schema.names:
        return ""
    return "".join(filter(None, map(str, table.column("text").drop_null().to_pylist())))


def _token_ids(table: pa.Table) -> Array:
    ids = valid_column(table.column("token_id"), pa.field("token_id", pa.int64()))
    require(ids.null_count == 0, "token_id has a null value")
    values: Array = ids.to_numpy()
    return values


def _message_of(data: bytes) -> str:
    """Return the message of an error of a server, as printable text of limited length."""
    error = _object(data, ERROR_KEY).get("error")
    message = str(error.get("message")) if isinstance(error, dict) else "it gave no reason"
    return shortened("".join(char if char.isprintable() else repr(char)[1:-1] for char in message), 300)


def _object(data: bytes, key: bytes) -> dict[str, Any]:
    try:
        reply: dict[str, Any] = msgspec.json.decode(data, type=dict[str, Any])
    except (ValueError, RecursionError) as error:
        raise InputError(f"the metadata {key.decode()} is not a JSON object: {error}") from error
    return reply
