from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING, Any

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from logprobe.errors import InputError, ParameterError
from logprobe.records import (
    FlatLogprobs,
    Logprob,
    LogprobsInfo,
    ParquetWriter,
    from_arrow,
    iter_parquet,
    read_parquet,
    to_arrow,
    write_parquet,
)

if TYPE_CHECKING:
    from pathlib import Path

INFO = LogprobsInfo(
    stages=("processed",), num_logprobs=20, temperature=0.5, generator="philox4x64-10", model="m"
)


def every_kind(step: Any) -> dict[str, FlatLogprobs]:
    records = {
        name: FlatLogprobs([None], info=INFO) for name in ("packed", "narrow", "chosen", "side", "fast")
    }
    records["packed"].append_rows(*step(700, 20, 90))
    records["narrow"].append_rows(*step(9, 3, 90, num_levels=3))
    records["chosen"].append_rows(*step(9, 0, 90))
    records["side"].append_rows(*step(2, 3, 90), entropy=[1.5, 2.5], given=([0, 1, 1], [7], [-3.0], [4]))
    records["side"].append_rows(*step(2, 3, 90))
    records["fast"].append_fast([7, 7, 8], [-1.0, -1.0, -1.25], [3, 1, 2], repeat(None))
    records["wide"] = FlatLogprobs(info=INFO)
    records["wide"].append_rows([[2**31, 5]], [[-1.0, -0.5]], [2])
    odd = {2**40: Logprob(-0.1, None, "ü"), 3: Logprob(-np.inf, 2), 4: Logprob(np.float64(-2.1), 7, "")}
    records["odd"] = FlatLogprobs([{}, odd, None, {1: Logprob(-1.0, 1)}], info=INFO)
    records["none"] = FlatLogprobs([None, None], info=INFO)
    records["empty dict"] = FlatLogprobs([{}], info=INFO)
    return records


KINDS = ["packed", "narrow", "chosen", "side", "fast", "wide", "odd", "none", "empty dict"]


def assert_same(back: FlatLogprobs, record: FlatLogprobs) -> None:
    assert back == record
    for name in ("start_indices", "end_indices", "token_ids", "logprobs", "ranks", "decoded_tokens"):
        assert getattr(back, name) == getattr(record, name)
    assert back.info == record.info
    assert back.given == record.given
    assert (back.entropy is None) == (record.entropy is None)
    if record.entropy is not None:
        np.testing.assert_array_equal(back.entropy, record.entropy)


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_comes_back_exactly_from_a_batch(step: Any, kind: Any) -> None:
    record = every_kind(step)[kind]
    batch = to_arrow(record, "r")
    batch.validate(full=True)
    back = from_arrow(batch)
    assert_same(back, record)
    assert_same(from_arrow(pa.Table.from_batches([batch[:1], batch[1:]])), record)
    if kind in {"packed", "narrow", "chosen", "side"}:
        assert back.nbytes == record.nbytes


def test_an_empty_record_has_no_rows() -> None:
    assert len(to_arrow(FlatLogprobs())) == 0
    assert from_arrow(to_arrow(FlatLogprobs())) == []


def test_the_columns_are_named_and_typed_as_documented(step: Any) -> None:
    batch = to_arrow(every_kind(step)["packed"], "r", byte_offsets=np.arange(702) * 4)
    types = {field.name: str(field.type) for field in batch.schema}
    assert list(types)[:15] == [
        "request_id", "position", "token_id", "logprob", "rank",
        "entropy", "log_kept_mass", "varentropy", "margin", "other_logprob", "outside_top_logprob",
        "top_ids", "top_logprobs", "byte_start", "byte_end",
    ]  # fmt: skip
    assert types["logprob"] == "float"
    assert types["top_ids"].startswith("list<")
    assert types["top_ids"].endswith("int32>")
    assert types["top_logprobs"].endswith("float>")
    assert LogprobsInfo.from_json(batch.schema.metadata[b"logprobe.info"]) == INFO
    assert batch.column("byte_end")[5].as_py() == 24
    assert batch.column("token_id")[0].as_py() is None


def test_rows_say_what_the_record_says(step: Any) -> None:
    ids, logprobs, ranks = step(50, 20, 90)
    record = FlatLogprobs()
    record.append_rows(ids, logprobs, ranks)
    for row, (line, rest) in enumerate(
        zip(to_arrow(record, "r").to_pylist(), record.other_logprob, strict=True)
    ):
        assert line["position"] == row
        assert line["token_id"] == ids[row, 0]
        assert line["rank"] == ranks[row]
        assert np.float32(line["logprob"]) == logprobs[row, 0]
        assert line["top_ids"] == ids[row, 1:].tolist()
        assert line["top_logprobs"] == logprobs[row, 1:].tolist()
        assert np.float32(line["other_logprob"]) == rest
    outside = [line["outside_top_logprob"] for line in to_arrow(record, "r").to_pylist()]
    assert outside == record.outside_top_logprob.tolist()
    masses = np.exp(logprobs[:, 1:].astype(np.float64)).sum(axis=1) + np.exp(outside)
    np.testing.assert_allclose(masses, 1, atol=3e-7)


def test_a_token_that_nothing_predicts_stands_in_the_file_where_it_is_given(
    step: Any, tmp_path: Path
) -> None:
    record = every_kind(step)["packed"]
    ids = [7, *record.chosen_entries().token_ids[1:].tolist()]
    batch = to_arrow(record, "r", token_ids=ids)
    assert batch.column("token_id").to_pylist() == ids
    assert batch.column("logprob")[0].as_py() is None
    assert_same(from_arrow(batch), record)
    with ParquetWriter(tmp_path / "t.parquet") as writer:
        writer.write("r", record, token_ids=np.array(ids, np.int32))
    assert pq.read_table(tmp_path / "t.parquet")["token_id"].to_pylist() == ids
    assert_same(read_parquet(tmp_path / "t.parquet")["r"], record)
    for wrong in (ids[1:], [7, 8, *ids[2:]]):
        with pytest.raises(ParameterError, match="token_ids: do not match"):
            to_arrow(record, "r", token_ids=wrong)


def test_a_file_gives_every_record_back(step: Any, tmp_path: Path) -> None:
    records = every_kind(step)
    write_parquet(tmp_path / "a.parquet", records)
    back = read_parquet(tmp_path / "a.parquet")
    assert list(back) == list(records)
    for kind, record in records.items():
        assert_same(back[kind], record)
    meta = pq.read_metadata(tmp_path / "a.parquet")
    assert meta.row_group(0).column(0).compression == "ZSTD"


def record_of(info: LogprobsInfo | None) -> FlatLogprobs:
    return FlatLogprobs([{1: Logprob(-1.0, 1)}], info=info)


RAW = LogprobsInfo(model="m")


@pytest.mark.parametrize("infos", [(INFO, RAW), (INFO, None), (None, INFO)])
def test_records_of_other_metadata_are_refused(
    infos: tuple[LogprobsInfo | None, LogprobsInfo | None], tmp_path: Path
) -> None:
    records = {"a": record_of(infos[0]), "b": record_of(infos[0]), "c": record_of(infos[1])}
    with pytest.raises(ParameterError, match=r"'c' differs .* in info .*stages.*; write one file") as caught:
        write_parquet(tmp_path / "a.parquet", records)
    assert caught.value.parameter == "records"
    assert not (tmp_path / "a.parquet").exists()  # no file with a part of the records
    with ParquetWriter(tmp_path / "b.parquet") as writer:
        writer.write("a", record_of(infos[0]))
        with pytest.raises(ParameterError, match=r"'c' differs .* in info") as caught:
            writer.write("c", record_of(infos[1]))
    assert caught.value.parameter == "record"


def test_the_metadata_of_a_file_may_be_given_for_records_without_any(tmp_path: Path) -> None:
    with ParquetWriter(tmp_path / "a.parquet", INFO) as writer:
        writer.write("a", record_of(None))
        writer.write("b", record_of(INFO))
        with pytest.raises(ParameterError, match="info"):
            writer.write("c", record_of(RAW))
    assert [record.info for record in read_parquet(tmp_path / "a.parquet").values()] == [INFO, INFO]
    with ParquetWriter(tmp_path / "b.parquet", INFO):
        pass
    assert LogprobsInfo.from_json(pq.read_schema(tmp_path / "b.parquet").metadata[b"logprobe.info"]) == INFO


def test_duckdb_and_polars_open_the_file_with_no_help(step: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "a.parquet")
    record = every_kind(step)["packed"]
    write_parquet(path, {"r": record})
    total = float(record.chosen_entries().logprobs.sum(dtype=np.float64))
    with duckdb.connect() as connection:
        found = connection.execute(
            "select count(*), sum(logprob::double), sum(len(top_ids)) from read_parquet(?)", [path]
        ).fetchone()
    assert found == (701, pytest.approx(total), 700 * 20)
    frame = pl.read_parquet(path)
    assert frame["logprob"].cast(pl.Float64).sum() == pytest.approx(total)
    assert frame["top_ids"].dtype == pl.List(pl.Int32)


def test_requests_longer_than_a_row_group_and_many_short_ones_stream_through(
    step: Any, tmp_path: Path
) -> None:
    long = FlatLogprobs(info=INFO)
    for _ in range(40):
        long.append_rows(*step(1000, 1, 20))
    short = FlatLogprobs(info=INFO)
    short.append_rows(*step(3, 1, 20))
    with ParquetWriter(tmp_path / "a.parquet", INFO) as writer:
        writer.write("first", short)
        writer.write("long", long)
        for number in range(500):
            writer.write(f"{number}", short)
    found = list(iter_parquet(tmp_path / "a.parquet"))
    assert [request_id for request_id, _ in found] == ["first", "long", *map(str, range(500))]
    assert_same(found[1][1], long)
    assert all(record == short for _, record in found[2:])
    assert pq.ParquetFile(tmp_path / "a.parquet").num_row_groups == 2


def test_a_batch_of_two_requests_is_refused(step: Any) -> None:
    record = every_kind(step)["narrow"]
    with pytest.raises(InputError, match="2 requests"):
        from_arrow(pa.Table.from_batches([to_arrow(record, "a"), to_arrow(record, "b")]))


def test_a_table_without_the_columns_is_refused() -> None:
    with pytest.raises(InputError, match="request_id"):
        from_arrow(pa.table({"position": [1]}))


def test_one_request_in_two_places_is_refused(step: Any, tmp_path: Path) -> None:
    record = every_kind(step)["narrow"]
    batches = [to_arrow(record, request_id) for request_id in ("a", "b", "a")]
    pq.write_table(pa.Table.from_batches(batches), tmp_path / "a.parquet")
    with pytest.raises(InputError, match="'a' are not contiguous"):
        read_parquet(tmp_path / "a.parquet")


@pytest.mark.parametrize("request_id", ["a", "b", 5, None])
def test_a_request_id_must_be_a_new_string(request_id: Any, tmp_path: Path) -> None:
    with ParquetWriter(tmp_path / "a.parquet") as writer:
        writer.write("a", record_of(INFO))
        writer.write("b", record_of(INFO))
        with pytest.raises(ParameterError) as caught:
            writer.write(request_id, record_of(INFO))
    assert caught.value.parameter == "request_id"
    assert {name: len(record) for name, record in read_parquet(tmp_path / "a.parquet").items()} == {
        "a": 1,
        "b": 1,
    }


def test_nothing_is_written_after_the_end(tmp_path: Path) -> None:
    writer = ParquetWriter(tmp_path / "a.parquet")
    writer.write("a", record_of(INFO))
    writer.close()
    writer.close()
    with pytest.raises(ParameterError, match=r"'b' is written after close\(\)") as caught:
        writer.write("b", record_of(INFO))
    assert caught.value.parameter == "request_id"
    assert list(read_parquet(tmp_path / "a.parquet")) == ["a"]


@pytest.mark.parametrize(
    "records",
    [record_of(INFO), [record_of(INFO)], {"a": None}, {"a": [None]}, {"a": record_of(INFO), "b": 5}],
)
def test_only_a_map_of_records_is_written(records: Any, tmp_path: Path) -> None:
    with pytest.raises(ParameterError) as caught:
        write_parquet(tmp_path / "a.parquet", records)
    assert caught.value.parameter == "records"
    assert not (tmp_path / "a.parquet").exists()


def test_an_id_that_is_no_text_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", {"a": record_of(INFO)})
    records: Any = {"b": record_of(INFO), 3: record_of(INFO)}
    with pytest.raises(ParameterError) as caught:
        write_parquet(tmp_path / "a.parquet", records)
    assert caught.value.parameter == "request_id"
    assert list(read_parquet(tmp_path / "a.parquet")) == ["a"]


def test_offsets_of_another_length_are_refused(step: Any) -> None:
    with pytest.raises(ParameterError, match="byte_offsets"):
        to_arrow(every_kind(step)["narrow"], byte_offsets=[0, 1])
