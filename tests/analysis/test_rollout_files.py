"""Stored samples in Parquet files from arbitrary writers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from logprobe.analysis import read_rollouts
from logprobe.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

HONEST: dict[str, Any] = {
    "prompt_token_ids": [[1, 2]],
    "token_ids": [[1, 2, 3]],
    "logprobs": [[-1.0, -2.0, -3.0]],
    "log_kept_mass": [[0.0, -0.5, -0.1]],
    "top_ids": [[[1, 4], [2, 5], [3]]],
    "top_logprobs": [[[-1.0, -1.5], [-2.0, -1.0], [-3.0]]],
}
OFFSETS = pa.py_buffer(np.array([0, 2], np.int32).tobytes())
BYTES = pa.Array.from_buffers(pa.string(), 1, [None, OFFSETS, pa.py_buffer(b"\xff\xfe")])
DAY = pa.array([2**30], pa.int32()).cast(pa.date32())
HOSTILE = [
    *[(name, values) for name in HONEST for values in (BYTES, DAY, ["text"], [[["a"]]], [{"a": 1}], [5])],
    *[(name, [[1, 2, 2**31]]) for name in ("prompt_token_ids", "token_ids")],
    *[(name, [[1, 2, -1]]) for name in ("prompt_token_ids", "token_ids")],
    ("token_ids", pa.array([[1, 2, 2**64 - 1]], pa.list_(pa.uint64()))),
    ("token_ids", [[1, 2, 2.5]]),
    ("token_ids", [[1, 2, float("nan")]]),
    ("logprobs", [[-1.0, -2.0, float("inf")]]),
    ("logprobs", [[-1.0, -2.0]]),
    ("log_kept_mass", [[0.0, 0.0, float("inf")]]),
    ("top_ids", pa.array([[[1, 4], [2, 5], [2**64 - 1]]], pa.list_(pa.list_(pa.uint64())))),
    ("top_ids", [[[1, 4], [2, 5], [-1]]]),
    ("top_ids", [[[1, 4], [2, 5], [None]]]),
    ("top_logprobs", [[[-1.0, -1.5], [-2.0, -1.0], [float("nan")]]]),
    ("top_logprobs", [[[-1.0, -1.5], [-2.0], [-3.0]]]),
]


def test_an_honest_file_is_read(tmp_path: Path) -> None:
    pq.write_table(pa.table(HONEST), tmp_path / "x.parquet")
    (rollout,) = read_rollouts(tmp_path / "x.parquet")
    assert rollout.token_ids.tolist() == [1, 2, 3]
    assert rollout.alternatives is not None
    assert rollout.alternatives.token_ids.tolist() == [1, 4, 2, 5, 3]


@pytest.mark.parametrize("place", range(len(HOSTILE)))
def test_a_column_of_other_values_is_refused_by_the_files_name(tmp_path: Path, place: int) -> None:
    name, values = HOSTILE[place]
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table(HONEST | {name: values}), path)
    with pytest.raises(InputError) as caught:
        list(read_rollouts(path))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("info", [b"{", b"\xff", b"[" * 100_000])
def test_metadata_that_is_damaged_is_refused_by_the_files_name(tmp_path: Path, info: bytes) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table(HONEST).replace_schema_metadata({"logprobe.info": info}), path)
    with pytest.raises(InputError) as caught:
        list(read_rollouts(path))
    assert str(path) in str(caught.value)
