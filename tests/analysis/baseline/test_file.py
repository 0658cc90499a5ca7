"""The baseline file format: what is written can be read, and altered files are refused."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest

from logprobe.analysis.baseline import file as files
from logprobe.analysis.baseline.file import (
    MAGIC,
    MAX_HEAD,
    BaselineReader,
    BaselineWriter,
    Block,
    End,
    Header,
    Run,
    max_bytes,
    rows_a_block,
)
from logprobe.errors import InputError, OutputError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

SIZE = 1500
HEADER = Header(vocabulary_size=SIZE, vocabulary="v", model="m", weights=None, weight_version=None, lora=None)


def rows_of(num_rows: int, size: int = SIZE) -> NDArray[np.float32]:
    logits = np.random.default_rng(num_rows).normal(0, 3, (num_rows, size))
    rows = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return rows.astype(np.float32)


def written(path: Path, counts: tuple[int, ...] = (7, 5)) -> Path:
    """Write blocks of these sizes; a text begins at the first row, and another within the first block."""
    writer = BaselineWriter(path, HEADER)
    for number, count in enumerate(counts):
        rows = rows_of(count)
        ids = np.arange(count, dtype=np.int32) + 10 * number
        starts = [(0, 3, 0), (4, 9, 2)] if number == 0 else []
        writer.write(rows, ids, rows[np.arange(count), ids].astype(np.float64), starts)
    writer.finish()
    return path


def all_runs(path: Path) -> list[Run]:
    with closing(BaselineReader(path)) as reader:
        return list(reader.runs())


def test_what_is_written_is_read_text_by_text(tmp_path: Path) -> None:
    path = written(tmp_path / "a.lpkl")
    with closing(BaselineReader(path)) as reader:
        assert reader.header == HEADER
    runs = all_runs(path)
    assert [run.is_first for run in runs] == [True, True, False]
    assert [run.text_index for run in runs] == [0, 2, 2]
    assert [run.context.tolist() for run in runs] == [[3], [9], [9, 4, 5, 6]]
    assert [run.token_ids.tolist() for run in runs] == [[0, 1, 2, 3], [4, 5, 6], [10, 11, 12, 13, 14]]
    first, second = rows_of(7), rows_of(5)
    logprobs = np.concatenate([run.logprobs for run in runs])
    assert logprobs.tolist() == [
        *first[np.arange(7), np.arange(7)].tolist(),
        *second[np.arange(5), np.arange(10, 15)].tolist(),
    ]
    best = np.concatenate([run.best_ids for run in runs])
    assert best.tolist() == [*first.argmax(axis=1).tolist(), *second.argmax(axis=1).tolist()]
    for row, kl in enumerate(runs[2].kept.against(row, second[row]) for row in range(5)):
        assert abs(kl.kl) < 5 * kl.kl_error, row


def test_a_block_takes_a_tenth_of_llama_cpps_bytes(tmp_path: Path) -> None:
    size, num_rows = 32_000, 20
    writer = BaselineWriter(tmp_path / "a.lpkl", msgspec.structs.replace(HEADER, vocabulary_size=size))
    before = writer._file.tell()
    rows = rows_of(num_rows, size)
    writer.write(rows, np.zeros(num_rows, np.int32), rows[:, 0].astype(np.float64), [(0, 1, 0)])
    taken = writer._file.tell() - before
    writer.finish()
    # Its rows take 2 bytes per entry, padded to an even number of entries, and two floats.
    assert taken <= num_rows * (2 * size + 8) / 10
    assert taken > 0.8 * max_bytes(num_rows, size)


def test_a_name_that_is_taken_or_cannot_be_is_refused_and_nothing_half_stays(tmp_path: Path) -> None:
    path = written(tmp_path / "a.lpkl")
    with pytest.raises(InputError, match="exists"):
        BaselineWriter(path, HEADER)
    with pytest.raises(InputError, match="must end in"):
        BaselineWriter(tmp_path / "a.parquet", HEADER)
    with pytest.raises(OutputError, match="cannot be written"):
        BaselineWriter(tmp_path / "none" / "a.lpkl", HEADER)
    writer = BaselineWriter(tmp_path / "b.lpkl", HEADER)
    writer.leave()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.lpkl"]


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        BaselineReader(tmp_path / "none.lpkl")
    for data in (b"", b"LPK", b"PAR1" + bytes(50)):
        (tmp_path / "a.lpkl").write_bytes(data)
        with pytest.raises(InputError, match="is not a baseline"):
            BaselineReader(tmp_path / "a.lpkl")
    for head in (b"[]", b"\xff", b'{"version":1}', b"[" * 5000):
        (tmp_path / "a.lpkl").write_bytes(MAGIC + len(head).to_bytes(4, "little") + head)
        with pytest.raises(InputError, match="a header cannot be read"):
            BaselineReader(tmp_path / "a.lpkl")
    (tmp_path / "a.lpkl").write_bytes(MAGIC + (MAX_HEAD + 1).to_bytes(4, "little"))
    with pytest.raises(InputError, match="invalid length of a head"):
        BaselineReader(tmp_path / "a.lpkl")
    (tmp_path / "a.lpkl").write_bytes(with_head(msgspec.structs.replace(HEADER, version=2)))
    with pytest.raises(InputError, match="has format version 2"):
        BaselineReader(tmp_path / "a.lpkl")
    for size in (0, -1, 1 << 23):
        (tmp_path / "a.lpkl").write_bytes(with_head(msgspec.structs.replace(HEADER, vocabulary_size=size)))
        with pytest.raises(InputError, match="invalid vocabulary size"):
            BaselineReader(tmp_path / "a.lpkl")


def with_head(*heads: msgspec.Struct) -> bytes:
    parts = [msgspec.json.encode(head) for head in heads]
    return MAGIC + b"".join(len(part).to_bytes(4, "little") + part for part in parts)


BLOCK = Block(num_rows=1, num_starts=1, scale=10, num_length_bytes=1, num_plane_bytes=0)


@pytest.mark.parametrize(
    "change",
    [
        {"num_rows": 0},
        {"num_rows": -1},
        {"num_rows": 1 << 40},
        {"num_starts": 2},
        {"num_starts": -1},
        {"scale": 0},
        {"scale": 1 << 15},
        {"num_length_bytes": -1},
        {"num_plane_bytes": 1 << 50},
    ],
)
def test_a_block_that_counts_what_cannot_be_is_refused_before_it_is_read(
    tmp_path: Path, change: dict[str, int]
) -> None:
    path = tmp_path / "a.lpkl"
    path.write_bytes(with_head(HEADER, msgspec.structs.replace(BLOCK, **change)))
    with pytest.raises(InputError, match="is damaged"):
        all_runs(path)


def test_a_file_that_is_cut_short_or_goes_on_is_refused_wherever_that_is(tmp_path: Path) -> None:
    data = written(tmp_path / "a.lpkl").read_bytes()
    path = tmp_path / "b.lpkl"
    for end in (*range(0, len(data) - 1, 97), len(data) - 1):
        path.write_bytes(data[:end])
        with pytest.raises(InputError):
            all_runs(path)
    path.write_bytes(data + b"\0")
    with pytest.raises(InputError, match="data after the end"):
        all_runs(path)


def test_altered_bytes_are_refused_or_read_and_nothing_else(tmp_path: Path) -> None:
    data = written(tmp_path / "a.lpkl").read_bytes()
    path = tmp_path / "b.lpkl"
    draw = np.random.default_rng(0)
    messages = []
    for place in draw.integers(0, len(data), 400):
        altered = bytearray(data)
        altered[place] ^= 1 << int(draw.integers(0, 8))
        path.write_bytes(altered)
        try:
            for run in all_runs(path):
                for row in range(len(run.token_ids)):
                    run.kept.against(row, rows_of(1)[0])
        except InputError as error:
            messages.append(str(error))
    assert len(messages) > 100
    assert all(str(path) in message for message in messages)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("token_ids", SIZE),
        ("token_ids", -1),
        ("best_ids", SIZE),
        ("logprobs", np.nan),
        ("logprobs", 1.0),
        ("cross", np.nan),
        ("low_logprob", np.inf),
        ("blur", -1.0),
        ("blur", np.nan),
        ("low_mass", -0.5),
        ("distance", np.inf),
    ],
)
def test_a_column_of_what_cannot_be_is_refused(tmp_path: Path, name: str, value: float) -> None:
    path = written(tmp_path / "a.lpkl", (7,))
    data = bytearray(path.read_bytes())
    head = msgspec.json.encode(HEADER)
    start = len(MAGIC) + 4 + len(head)
    start += 4 + int.from_bytes(data[start : start + 4], "little")
    for column, kind in files.COLUMNS.items():
        item = np.array([value]).astype(kind).tobytes() if column == name else b""
        if item:
            data[start : start + len(item)] = item
            break
        start += 7 * np.dtype(kind).itemsize
    path.write_bytes(data)
    with pytest.raises(InputError, match="is damaged"):
        all_runs(path)


@pytest.mark.parametrize(
    "starts",
    [
        [],
        [(1, 0, 0)],
        [(0, SIZE, 0)],
        [(0, 0, 0), (0, 1, 1)],
        [(3, 0, 0), (1, 0, 1)],
        [(0, 0, 0), (1, 0, 0)],
        [(0, 0, -1)],
    ],
)
def test_texts_that_do_not_follow_each_other_are_refused(
    tmp_path: Path, starts: list[tuple[int, int, int]]
) -> None:
    writer = BaselineWriter(tmp_path / "a.lpkl", HEADER)
    rows = rows_of(4)
    writer.write(rows, np.zeros(4, np.int32), rows[:, 0].astype(np.float64), starts)
    writer.finish()
    with pytest.raises(InputError, match="is damaged"):
        all_runs(tmp_path / "a.lpkl")


def test_an_end_that_counts_other_rows_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.lpkl")
    data = path.read_bytes()
    end, other = (msgspec.json.encode(End(num_rows=count, num_texts=2)) for count in (12, 13))
    assert data.endswith(end)
    path.write_bytes(data[: -len(end)] + other)
    with pytest.raises(InputError, match="wrong counts in the end record"):
        all_runs(path)


def test_a_block_is_bounded_by_its_entries() -> None:
    assert rows_a_block(49_152) == 256
    assert rows_a_block(256_000) == 65
    assert rows_a_block(1 << 22) == 4
