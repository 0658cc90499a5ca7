"""Replies in Arrow come from a server that may be faulty: its data is checked before it is used."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np
import pytest

from logprobe.errors import InputError, ParameterError
from logprobe.records import FlatLogprobs
from refusals import raises

pa = pytest.importorskip("pyarrow")

from logprobe.records.replies import (  # noqa: E402 - needs pyarrow
    ERROR_KEY,
    REPLY_KEY,
    Part,
    ReplySchema,
    read_reply,
    read_stream,
)
from logprobe.records.store.rows import Rows  # noqa: E402

BARE: dict[str, Any] = {"request_id": ["0", "0"], "position": [0, 1], "token_id": [5, 6]}
ROWS = 100_000


def stream_of(table: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    data: bytes = sink.getvalue().to_pybytes()
    return data


def whole() -> tuple[list[bytes], bytes]:
    """Return the parts of a reply of two choices without log-probabilities, and the whole reply."""
    schema = ReplySchema({"": None}, set(), reply=b'{"id": "x"}')
    batches = schema.batches(Part(name, None, 0, [5, 6], ["a", "b"]) for name in "01")
    data = schema.whole_stream(batches)
    return [schema.opening(), *(batch.serialize().to_pybytes() for batch in batches)], data


@pytest.mark.parametrize("num_bytes", [8 * ROWS, 4 * ROWS + 4, 4 * ROWS, ROWS // 8])
def test_data_shorter_than_its_columns_is_refused(num_bytes: int) -> None:
    """Values of integers, offsets of strings, values of floats, and flags of nulls."""
    columns = {name: pa.repeat(values[0], ROWS) for name, values in BARE.items()}
    columns["text"] = pa.repeat("a", ROWS)
    if num_bytes in {4 * ROWS, ROWS // 8}:
        columns["logprob"] = pa.repeat(pa.scalar(-1, pa.float32()), ROWS)
        columns["rank"] = pa.array(np.ones(ROWS, np.int64), mask=np.arange(ROWS) < 1)
    data = stream_of(pa.table(columns))
    size, shorter = struct.pack("<q", num_bytes), struct.pack("<q", 8)
    assert size in data[: data.index(b"00000000")]
    with pytest.raises(InputError, match="too small"):
        read_stream(data.replace(size, shorter))


def test_null_token_ids_are_refused() -> None:
    table = pa.table(BARE | {"token_id": pa.array([5, None], pa.int64())})
    with pytest.raises(InputError, match="token_id"):
        read_stream(stream_of(table))


@pytest.mark.parametrize(
    "change",
    [
        {"text": pa.array(["a" * 9999, ""]).dictionary_encode()},
        {"top_ids": pa.nulls(1, pa.list_(pa.null(), 2**31 - 1))},
        {"top_ids": pa.array([[], []], pa.list_(pa.null()))},
        {"token_id": pa.array([5, 6], pa.int32())},
        {"unknown": [1, 2]},
    ],
    ids=["dictionary", "nulls of fixed size", "nulls", "int32", "unknown"],
)
def test_columns_of_other_types_are_refused(change: dict[str, Any]) -> None:
    columns = {name: values[:1] for name, values in (BARE | change).items()}
    data = stream_of(pa.table(columns))
    with pytest.raises(InputError, match=f"column '{next(iter(change))}'"):
        read_stream(data)


def test_only_files_of_the_caller_may_be_parquet() -> None:
    schema = ReplySchema({"": None}, set(), reply=b"{}", is_complete=True)
    data = schema.parquet(schema.batches([Part("0", Rows(), 0, [], [])]))
    assert read_reply(data).reply == {}
    with pytest.raises(InputError):
        read_stream(data)


def test_a_whole_reply_that_was_cut_between_batches_is_refused() -> None:
    parts, data = whole()
    assert read_stream(data).texts == {"0": "ab", "1": "ab"}
    for end in range(1, len(parts) + 1):
        with pytest.raises(InputError, match="incomplete"):
            read_stream(b"".join(parts[:end]))


def test_the_error_of_a_server_is_printable_and_short() -> None:
    schema = ReplySchema({}, set())
    for error in ({"message": "\x1b[31m" + "x" * 5000}, "x", None):
        closing = schema.closing({ERROR_KEY: json.dumps({"error": error}).encode()})
        with pytest.raises(InputError, match="ended the stream") as caught:
            read_stream(schema.opening() + closing)
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 500
    with pytest.raises(InputError, match=r"logprobe\.error"):
        read_stream(schema.opening() + schema.closing({ERROR_KEY: b"["}))
    assert REPLY_KEY not in schema.arrow.metadata


def test_positions_with_different_numbers_of_alternatives_are_the_requests_error() -> None:
    record = FlatLogprobs()
    record.append_rows([[5, 6]], [[-1.0, -2.0]], [1])
    schema = ReplySchema({"": None}, {2})
    with raises(ParameterError, parameter="logprobs"):
        schema.batches([Part("0", record.rows, 0, [5], ["a"])])
