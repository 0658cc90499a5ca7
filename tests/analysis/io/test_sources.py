"""Parquet files of texts that are damaged, have other types, or decompress to much more than their size."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from logprobe.analysis.io.sources import check_columns, find_sources, read_rows
from logprobe.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path


def texts_of(path: Path) -> list[Any]:
    sources = find_sources([str(path)])
    check_columns(sources, ["text"])
    return [row.values["text"] for row in read_rows(sources, ["text"])]


def written(path: Path, values: Any, **options: Any) -> Path:
    pq.write_table(pa.table({"text": values}), path, **options)
    return path


def int_column(values: list[int], kind: pa.DataType) -> pa.Array:
    width = pa.int32() if pa.types.is_date32(kind) else pa.int64()
    return pa.array(values, width).cast(kind)


OFFSETS = pa.py_buffer(np.array([0, 2], np.int32).tobytes())
UNREADABLE = {
    "no UTF-8": pa.Array.from_buffers(pa.string(), 1, [None, OFFSETS, pa.py_buffer(b"\xff\xfe")]),
    "a day beyond Python's": int_column([2**30], pa.date32()),
    "a duration beyond Python's": int_column([2**62], pa.duration("s")),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_values_that_python_has_not_are_refused_by_the_files_name(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / "x.parquet", UNREADABLE[name])
    with pytest.raises(InputError) as caught:
        texts_of(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("compression", ["zstd", "snappy"])
def test_whatever_byte_is_altered_the_file_is_read_or_refused(tmp_path: Path, compression: str) -> None:
    texts = ["the cat sat"] * 50 + ["x" * width for width in range(50)]
    whole = written(tmp_path / "x.parquet", texts, compression=compression).read_bytes()
    draw, path, messages = random.Random(0), tmp_path / "altered.parquet", []  # noqa: S311
    wide = [b"\xff\xff\xff\xff\x0f", b"\xfe" + b"\xff" * 8 + b"\x01", b"\x00", b"\x80"]  # thrift's varints
    for _ in range(600):
        data, value = bytearray(whole), draw.choice([*wide, draw.randbytes(1)])
        place = draw.randrange(len(data))
        data[place : place + len(value)] = value
        path.write_bytes(data[: draw.choice([len(data)] * 6 + [draw.randrange(len(data))])])
        try:
            texts_of(path)
        except InputError as error:
            messages.append(str(error))
    assert len(messages) > 100
    assert all(str(path) in message and "\n" not in message for message in messages)


READ = """
import resource, sys
from logprobe.analysis.io.sources import find_sources, read_rows
import pyarrow.parquet
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert sum(1 for _ in read_rows(find_sources([sys.argv[1]]), ["text"])) == 4096
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_small_file_of_large_texts_is_read_in_bounded_memory(tmp_path: Path) -> None:
    text = pa.array(["a" * (1 << 20)])
    values = pa.DictionaryArray.from_arrays(pa.array([0] * 4096, pa.int8()), text)
    path = written(tmp_path / "x.parquet", values, compression="zstd")
    assert path.stat().st_size < 1000
    done = subprocess.run([sys.executable, "-c", READ, str(path)], check=True, capture_output=True, text=True)
    assert int(done.stdout) < 500 << 10  # KiB; all texts are 4 GiB


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_the_rows_of_a_csv_file_take_its_bytes(tmp_path: Path, newline: str) -> None:
    path = tmp_path / "in.csv"
    rows = ['text,"n,ame"', '"é 🌊, é",1', f'"two{newline}lines ""é""",2', "日本,3", ""]
    path.write_bytes(newline.join(rows).encode())
    [source] = find_sources([str(path)])
    read = list(read_rows([source], ["text"]))
    assert [row.values["text"] for row in read] == ["é 🌊, é", f'two{newline}lines "é"', "日本"]
    header, *sizes = (len(f"{row}{newline}".encode()) for row in rows[:-1])
    assert [row.num_bytes for row in read] == [header + sizes[0], *sizes[1:]]
    assert sum(row.num_bytes for row in read) == source.num_bytes


def test_fields_beyond_the_header_of_a_csv_file_make_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text("text\nHello there, my good world\nfine text,\n")
    first, second = read_rows(find_sources([str(path)]), ["text"])
    assert first.problem == "has more fields than the header (1); quote texts that contain commas"
    assert (second.problem, second.values) == (None, {"text": "fine text"})


def test_a_csv_column_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text("text,text\na b,c d\n")
    with pytest.raises(InputError, match="its header has 'text' twice"):
        list(read_rows(find_sources([str(path)]), ["text"]))


def test_a_pipe_is_told_from_a_missing_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="is a pipe or a device; use -"):
        find_sources(tmp_path / "pipe", kind="jsonl")
    with pytest.raises(InputError, match="no such file"):
        find_sources(tmp_path / "none", kind="jsonl")
