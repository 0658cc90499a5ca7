"""An additional column is declared in one table, which records, bytes, files and tables use."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from logprobe.errors import ParameterError
from logprobe.records import (
    FlatLogprobs,
    Logprob,
    from_arrow,
    read_parquet,
    to_arrow,
    to_padded,
    write_parquet,
)
from logprobe.records.rows import EXTRAS

if TYPE_CHECKING:
    from pathlib import Path

NOVELTIES = np.float32([0.5, 2.5, np.nan])


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> FlatLogprobs:
    """Two positions with a made-up column, and one without."""
    monkeypatch.setitem(EXTRAS, "novelty", np.dtype(np.float32))
    flat = FlatLogprobs()
    flat.append_rows([[7, 1], [8, 2]], [[-1.0, -0.5], [-3.0, -0.5]], [2, 2], novelty=[0.5, 2.5])
    flat.append_rows([[9, 3]], [[-3.0, -0.5]], [2], entropy=[1.5])
    return flat


def test_records_hold_it_beside_the_others(record: FlatLogprobs) -> None:
    assert list(record.extras) == ["entropy", "novelty"]
    np.testing.assert_array_equal(record.extras["novelty"], NOVELTIES)
    np.testing.assert_array_equal(record.extras["entropy"], np.float32([np.nan, np.nan, 1.5]))
    np.testing.assert_array_equal(record[1::-1].extras["novelty"], [2.5, 0.5])
    np.testing.assert_array_equal((record + record).extras["novelty"], [*NOVELTIES, *NOVELTIES])


def test_bytes_and_files_carry_it(record: FlatLogprobs, tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", {"r": record})
    for back in (
        FlatLogprobs.from_bytes(record.to_bytes()),
        from_arrow(to_arrow(record)),
        read_parquet(tmp_path / "a.parquet")["r"],
    ):
        assert back == record
        np.testing.assert_array_equal(back.extras["novelty"], NOVELTIES)


def test_a_record_or_file_may_lack_it(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = FlatLogprobs()
    flat.append_rows([[7, 1]], [[-1.0, -0.5]], [2])
    data, batch = flat.to_bytes(), to_arrow(flat)
    monkeypatch.setitem(EXTRAS, "novelty", np.dtype(np.float32))
    for back in (FlatLogprobs.from_bytes(data), from_arrow(batch)):
        assert back == flat
        assert back.extras == {}


def test_tables_and_tensors_show_it(record: FlatLogprobs) -> None:
    assert [row["novelty"] for row in record.to_dict()["positions"]] == [0.5, 2.5, None]
    assert [row["novelty"] for row in msgspec.json.decode(record.to_json())["positions"]] == [0.5, 2.5, None]
    assert to_padded([record[:2], record[:1]]).extras["novelty"].tolist() == [[0.5, 2.5], [0.5, 0.0]]


def test_json_has_no_infinity(record: FlatLogprobs) -> None:
    record.append_rows([[9, 3]], [[-np.inf, -0.5]], [2], novelty=[np.inf], entropy=[-np.inf])
    last = json.loads(record.to_json(), parse_constant=pytest.fail)["positions"][-1]
    assert (last["logprob"], last["novelty"], last["entropy"]) == (-9999.0, 9999.0, -9999.0)
    np.testing.assert_array_equal(from_arrow(to_arrow(record)).extras["novelty"], [*NOVELTIES, np.inf])


def test_records_are_equal_by_their_positions_alone(record: FlatLogprobs) -> None:
    assert record == [*record]
    bare = FlatLogprobs([*record])
    assert record == bare
    assert bare.extras == {}


def test_a_column_that_is_in_no_table_is_refused_by_name() -> None:
    flat = FlatLogprobs()
    with pytest.raises(ParameterError) as error:
        flat.append_rows([[7, 1]], [[-1.0, -0.5]], [2], novelties=[0.5])
    assert error.value.parameter == "novelties"
    assert len(flat) == 0


@pytest.mark.parametrize("is_first", [False, True])
def test_kept_ids_of_another_number_are_refused_and_nothing_is_added(is_first: bool) -> None:
    record, rows = FlatLogprobs(), ([[7, 1]], [[-1.0, -0.5]], [2])
    beside = {"entropy": [1.5], "given": ([0, 1], [7], [-3.0], [4])}
    if not is_first:
        record.append_rows(*rows, kept=([0, 2], [1, 9]), **beside)
    before = record.to_bytes()
    with pytest.raises(ParameterError, match="kept"):
        record.append_rows(*rows, kept=([0, 2], [1]), **beside)
    assert record.to_bytes() == before
    record.append_rows(*rows, kept=([0, 1], [1]), **beside)
    assert len(record.given or ()) == len(record.kept or ()) == len(record.extras["entropy"]) == len(record)


@pytest.mark.parametrize("step", [1, -1, 2])
def test_a_slice_has_what_stands_beside_its_positions(step: int) -> None:
    record, rows = FlatLogprobs([None]), ([[7, 1]], [[-1.0, -0.5]], [2])
    entropies, kept, given = [np.nan], [[]], [None]
    for position in range(8):
        if position in {2, 3, 5}:
            beside = {"kept": ([0, 2], [position, 9]), "given": ([0, 1], [position], [-3.0], [4])}
            record.append_rows(*rows, entropy=[position], **beside)
            entropies.append(position)
            kept.append([position, 9])
            given.append({position: Logprob(-3.0, 4)})
        else:
            record.append_rows(*rows)
            entropies.append(np.nan)
            kept.append([])
            given.append(None)
    for start in range(10):
        for stop in range(10):
            place = slice(start, stop, step)
            part = record[place]
            assert part.kept is not None
            np.testing.assert_array_equal(part.extras["entropy"], np.float32(entropies[place]))
            assert [ids.tolist() for ids in part.kept] == kept[place]
            assert part.given == given[place]
