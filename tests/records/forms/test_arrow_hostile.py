"""Malformed Arrow columns and Parquet files are refused, or read as a usable record."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuzzing import fuzz
from logprobe.errors import InputError
from logprobe.records import FlatLogprobs, Logprob, from_arrow, read_parquet, to_arrow, write_parquet
from logprobe.records.forms.arrow import schema

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def regular() -> FlatLogprobs:
    record = FlatLogprobs([None])
    record.append_rows([[1, 2, 3], [9, 4, 5]], [[-3.0, -0.5, -1.0], [-4.0, -0.5, -1.0]], [3, 7])
    return record


def odd() -> FlatLogprobs:
    return FlatLogprobs([{}, {7: Logprob(-0.1, None, "a"), 8: Logprob(-0.2, 3, "b")}, None])


def column(name: str, values: list[Any]) -> Callable[[pa.RecordBatch], pa.RecordBatch]:
    """Replace the values of a column of the record's type."""

    def alter(batch: pa.RecordBatch) -> pa.RecordBatch:
        place = batch.schema.get_field_index(name)
        kind = batch.schema.field(name).type
        return batch.set_column(place, name, pa.array(values, kind))

    return alter


def twice(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.append_column("rank", batch.column("rank"))


def torn_offsets(batch: pa.RecordBatch) -> pa.RecordBatch:
    good = batch.column("top_ids")
    offsets = pa.array([0, 2**30, 2, 4], pa.int32())
    buffers = [None, offsets.buffers()[1]]
    torn = pa.Array.from_buffers(good.type, 3, buffers, children=[good.values])
    return batch.set_column(batch.schema.get_field_index("top_ids"), "top_ids", torn)


HOSTILE: dict[str, tuple[Callable[[], FlatLogprobs], Callable[[pa.RecordBatch], pa.RecordBatch]]] = {
    "lists of two lengths": (regular, column("top_ids", [None, [2], [4, 5]])),
    "lists of different lengths": (regular, column("top_logprobs", [None, [-1.0], [-1.0, -2.0]])),
    "a gap in a list": (regular, column("top_ids", [None, [2, None], [4, 5]])),
    "a rank that is missing": (regular, column("rank", [None, None, 1])),
    "a token that is missing": (regular, column("token_id", [None, None, 1])),
    "an id below nothing": (regular, column("token_id", [None, -1, 1])),
    "a None row between": (regular, column("top_ids", [[1, 2], None, [4, 5]])),
    "entries of other lengths": (odd, column("entry_logprobs", [[], [-1.0], None])),
    "ranks of other lengths": (odd, column("entry_ranks", [[], [1, 2, 3], None])),
    "texts of other lengths": (odd, column("entry_tokens", [[], ["a"], None])),
    "named ids without numbers": (regular, column("given_ids", [[1], [], []])),
    "a column twice": (regular, twice),
    "offsets beyond the values": (regular, torn_offsets),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_columns_that_contradict_each_other_are_refused(name: str) -> None:
    make, alter = HOSTILE[name]
    with pytest.raises(InputError):
        from_arrow(alter(to_arrow(make())))


def test_other_types_of_the_same_columns_are_read() -> None:
    batch = to_arrow(regular())
    wide = pa.schema(
        [
            pa.field(
                field.name, pa.large_list(field.type.value_type) if field.name == "top_ids" else field.type
            )
            for field in batch.schema
        ]
    )
    assert from_arrow(pa.Table.from_batches([batch]).cast(wide)) == regular()


@pytest.mark.parametrize("data", [b"", b"PAR1", b"PAR1" + bytes(40) + b"PAR1", b"x" * 100])
def test_what_is_no_parquet_file_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    path.write_bytes(data)
    with pytest.raises(InputError):
        read_parquet(path)


def test_a_file_that_is_not_there_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_parquet(tmp_path / "nothing.parquet")


def test_other_columns_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), tmp_path / "x.parquet")
    with pytest.raises(InputError, match="missing"):
        read_parquet(tmp_path / "x.parquet")


def test_a_small_file_that_counts_many_positions_is_refused(tmp_path: Path) -> None:
    num_rows, path = 1 << 22, tmp_path / "x.parquet"
    columns = [pa.nulls(num_rows, field.type) for field in schema()]
    columns[0] = pa.array([""]).take(pa.array([0] * num_rows, pa.int8()))
    columns[1] = pa.array([0]).take(pa.array([0] * num_rows, pa.int8()))
    table = pa.table(columns, schema=schema())
    pq.write_table(table, path, compression="zstd")
    assert path.stat().st_size < num_rows // 8
    with pytest.raises(InputError, match="claims"):
        read_parquet(path)


def test_a_footer_that_is_damaged_does_not_end_the_process(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    write_parquet(path, {"a": regular(), "b": odd()})
    whole = path.read_bytes()
    for place in range(len(whole) - int.from_bytes(whole[-8:-4], "little") - 8, len(whole) - 8, 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with suppress(InputError):  # a crash would fail the whole run
            read_parquet(path)


@pytest.mark.fuzz
@fuzz()
@given(alterations=st.lists(st.tuples(st.integers(0, 10**5), st.binary(min_size=1, max_size=6)), max_size=4))
def test_an_altered_file_is_read_or_refused(tmp_path: Path, alterations: list[tuple[int, bytes]]) -> None:
    path = tmp_path / "honest.parquet"
    if not path.exists():
        write_parquet(path, {"a": regular(), "b": odd()})
    data = bytearray(path.read_bytes())
    for place, value in alterations:
        at = place % len(data)
        data[at : at + len(value)] = value
    altered = tmp_path / "altered.parquet"
    altered.write_bytes(data)
    try:
        records = read_parquet(altered)
    except InputError:
        return
    for record in records.values():
        assert len(list(record)) == len(record)
        FlatLogprobs.from_bytes(record.to_bytes())
