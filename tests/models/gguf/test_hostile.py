"""Files that say of themselves what is not so end at once with an error of this library's."""

from __future__ import annotations

import contextlib
import math
import random
import struct
import time
from typing import TYPE_CHECKING, Any

import pytest
from gguf import GGUFReader, GGUFWriter
from hypothesis import given
from hypothesis import strategies as st

from fuzzing import fuzz
from logprobe.errors import InputError, ModelError
from logprobe.models.gguf.config import build_config
from logprobe.models.gguf.convert import convert
from logprobe.models.gguf.file import GgufFile
from logprobe.models.gguf.header import ALIGNMENT_KEY, read_header

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

LIMIT_S = 60  # what is refused at once takes no such time, also on a busy machine


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def array(kind: int, count: int, data: bytes = b"") -> bytes:
    return struct.pack("<IIQ", 9, kind, count) + data


def tensor(shape: list[int], kind: int = 0, start: int = 0, name: str = "t") -> bytes:
    dimensions = b"".join(struct.pack("<Q", size) for size in shape)
    return text(name) + struct.pack("<I", len(shape)) + dimensions + struct.pack("<IQ", kind, start)


def header(*values: bytes, tensors: tuple[bytes, ...] = (), num_keys: int | None = None) -> bytes:
    count = len(values) if num_keys is None else num_keys
    keys = b"".join(text(f"k{place}") + value for place, value in enumerate(values))
    return b"GGUF" + struct.pack("<IQQ", 3, len(tensors), count) + keys + b"".join(tensors) + bytes(64)


def aligned(size: int) -> bytes:
    return (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text(ALIGNMENT_KEY) + struct.pack("<II", 4, size) + bytes(64)
    )


HOSTILE = {
    "nothing": b"",
    "another kind": b"GGML" + bytes(100),
    "cut": b"GGUF\3\0",
    "version": b"GGUF" + struct.pack("<IQQ", 77, 0, 0),
    "numbers": header(array(4, 2**61)),
    "empty texts": header(array(8, 2**61)),
    "bytes": header(array(0, 2**64 - 1)),
    "arrays in arrays": header(array(9, 1, struct.pack("<IQ", 9, 1) * 5000)),
    "keys": header(num_keys=2**62),
    "a long text": header(struct.pack("<IQ", 8, 2**63)),
    "no text": header(struct.pack("<IQ", 8, 2) + b"\xff\xfe"),
    "a key twice": b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + 2 * (text("k") + struct.pack("<IB", 0, 1)),
    "an alignment": b"GGUF"
    + struct.pack("<IQQ", 3, 0, 1)
    + text("general.alignment")
    + struct.pack("<Ii", 5, -8),
    "an alignment of nothing": aligned(0),
    "an alignment that is no power of two": aligned(24),
    "an alignment of 2**32 - 8": aligned(2**32 - 8),
    "tensors that overlap": header(tensors=(tensor([16], start=32, name="u"), tensor([9]))),
    "tensors in one place": header(tensors=(tensor([4]), tensor([4], name="u"))),
    "a tensor at an odd place": header(tensors=(tensor([4], start=8),)),
    "a tensor twice": header(tensors=(tensor([4]), tensor([4], start=32))),
    "a tensor of 2**64 - 1 numbers": header(tensors=(tensor([2**64 - 1]),)),
    "a tensor at 2**64 - 32": header(tensors=(tensor([4], start=2**64 - 32),)),
    "tensors": b"GGUF" + struct.pack("<IQQ", 3, 2**64 - 1, 0),
    "a long name of a key": b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**64 - 1) + bytes(64),
    "arrays in arrays, 10,000 deep": header(array(9, 1, struct.pack("<IQ", 9, 1) * 10_000)),
    "an unknown type": header(struct.pack("<I", 99)),
    "an unknown tensor type": header(tensors=(tensor([4], 9999),)),
    "a large tensor": header(tensors=(tensor([2**60, 2**60]),)),
    "a tensor of nothing": header(tensors=(tensor([0]),)),
    "a tensor beyond the end": header(tensors=(tensor([4], start=2**62),)),
    "dimensions": header(tensors=(text("t") + struct.pack("<I", 2**31),)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_header_that_cannot_be_believed_is_refused_at_once(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(HOSTILE[name])
    start = time.monotonic()
    with pytest.raises(InputError, match=r"not a valid GGUF file|is empty|array of arrays|does not know"):
        GgufFile(path)
    assert time.monotonic() - start < LIMIT_S


def test_values_are_those_of_the_gguf_packages_reader(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    writer = GGUFWriter(path, "llama")
    for name, value in {
        "uint8": 255, "int8": -128, "uint16": 65535, "int16": -32768, "uint32": 2**32 - 1, "int32": -(2**31),
        "float32": 0.1, "bool": True, "uint64": 2**64 - 1, "int64": -(2**63), "float64": 0.1, "string": "ä\n",
    }.items():  # fmt: skip
        getattr(writer, f"add_{name}")(name, value)
    for place, values in enumerate([["", "an", "ä" * 9], [0.1, 2.5], [1, 2, 3], [True, False]]):
        writer.add_array(f"array{place}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    theirs = {key: field.contents() for key, field in GGUFReader(path).fields.items() if key[:5] != "GGUF."}
    assert len(theirs) == 17
    assert repr(read_header(path).keys) == repr(theirs)


@pytest.mark.parametrize(
    ("key", "value"),
    [("block_count", 0), ("block_count", 2**32 - 1), ("attention.head_count", 0), ("embedding_length", 0)],
)
def test_sizes_that_no_model_has_are_refused_at_once(
    key: str, value: int, tmp_path: Path, write_gguf: Callable[..., Path]
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    data = bytearray(path.read_bytes())
    name = text(f"llama.{key}")
    place = data.index(name) + len(name) + 4
    data[place : place + 4] = struct.pack("<I", value)
    path.write_bytes(data)
    with pytest.raises(ModelError, match=r"is not a valid size|layers but only"):
        build_config(GgufFile(path))


def altered(path: Path, key: str, value: bytes) -> Path:
    """Put other bytes in the place of a number."""
    data = bytearray(path.read_bytes())
    place = data.index(text(key)) + len(text(key)) + 4
    data[place : place + len(value)] = value
    path.write_bytes(data)
    return path


def is_one_line(error: Exception) -> bool:
    return "\n" not in str(error) and len(str(error)) < 1000


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("llama.rope.freq_base", struct.pack("<f", value)) for value in (0, -1, math.nan, math.inf)],
        *[
            ("llama.attention.layer_norm_rms_epsilon", struct.pack("<f", value))
            for value in (0, -1, math.nan, math.inf)
        ],
        *[
            (f"tokenizer.ggml.{name}_token_id", struct.pack("<I", value))
            for name in ("bos", "eos")
            for value in (2**31, 2**32 - 1)
        ],
    ],
)
def test_numbers_that_no_model_has_are_refused(
    key: str, value: bytes, tmp_path: Path, write_gguf: Callable[..., Path]
) -> None:
    path = altered(write_gguf(tmp_path / "tiny.gguf"), key, value)
    with pytest.raises(ModelError) as caught:
        convert(path, tmp_path, name="x", sha256="0")
    assert key in str(caught.value)


@pytest.mark.parametrize("value", [-1, 2**31, 2**62, True, 1.5, "x" * 100_000, [1], ["a"]])
@pytest.mark.parametrize(
    "key",
    [
        *("tokenizer.chat_template", "tokenizer.ggml.unknown_token_id", "tokenizer.ggml.eot_token_id"),
        *("general.file_type", "llama.rope.scaling.type", "llama.attention.sliding_window"),
    ],
)
def test_values_of_other_types_are_an_error_of_one_line_or_ignored(
    key: str, value: Any, tmp_path: Path, write_gguf: Callable[..., Path]
) -> None:
    add = {bool: "add_bool", int: "add_int64", float: "add_float32", str: "add_string", list: "add_array"}
    path = write_gguf(tmp_path / "x.gguf", more=lambda writer: getattr(writer, add[type(value)])(key, value))
    is_none = key == "tokenizer.ggml.unknown_token_id" and value == -1  # as tools write it
    is_text = key == "tokenizer.chat_template" and isinstance(value, str)
    is_taken = key == "general.file_type" or is_none or is_text
    if is_taken:
        convert(path, tmp_path, name="x", sha256="0")
        return
    with pytest.raises((ModelError, InputError)) as caught:
        convert(path, tmp_path, name="x", sha256="0")
    assert "x.gguf" in str(caught.value)
    assert is_one_line(caught.value)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_token_of_a_megabyte_is_refused_at_once(
    kind: str, tmp_path: Path, write_gguf: Callable[..., Path]
) -> None:
    path = write_gguf(tmp_path / "x.gguf", kind=kind)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(text("aba"), text("aba" + "y" * (1 << 20)), 1))
    with pytest.raises(ModelError) as caught:
        convert(path, tmp_path, name="x", sha256="0")
    assert is_one_line(caught.value)


def test_a_long_name_is_quoted_in_part(tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
    path = write_gguf(
        tmp_path / "x.gguf", more=lambda writer: writer.add_bool(f"llama.{'k' * 100_000}", True)
    )
    with pytest.raises(ModelError) as caught:
        convert(path, tmp_path, name="x", sha256="0")
    assert is_one_line(caught.value)


def test_whatever_byte_is_altered_the_end_is_soon_and_an_error_of_ours(
    tmp_path: Path, write_gguf: Callable[..., Path]
) -> None:
    whole = write_gguf(tmp_path / "tiny.gguf").read_bytes()
    draw = random.Random(0)  # noqa: S311 - chooses what to alter
    header_end = whole.index(b"token_embd.weight")
    path, folder = tmp_path / "x.gguf", tmp_path / "out"
    folder.mkdir()
    raised = 0
    for _ in range(60):
        data = bytearray(whole)
        for _ in range(draw.choice((1, 3))):
            data[draw.randrange(header_end)] = draw.randrange(256)
        path.write_bytes(data[: draw.choice((len(data), draw.randrange(len(data))))])
        start = time.monotonic()
        raised += _is_refused(path, folder)
        assert time.monotonic() - start < LIMIT_S
    assert raised > 20


def _is_refused(path: Path, folder: Any) -> bool:
    try:
        convert(path, folder, name="x", sha256="0")
    except (InputError, ModelError):
        return True
    return False


@pytest.mark.fuzz
@fuzz(0.5)
@given(alterations=st.lists(st.tuples(st.integers(0, 10**6), st.binary(min_size=1, max_size=9)), max_size=4))
def test_a_header_altered_anywhere_is_read_or_refused(
    alterations: list[tuple[int, bytes]], tmp_path: Path, write_gguf: Callable[..., Path]
) -> None:
    path = tmp_path / "tiny.gguf"
    if not path.exists():
        write_gguf(path)
    data = bytearray(path.read_bytes())
    header_end = data.index(b"token_embd.weight") + 200
    for place, value in alterations:
        data[place % header_end : place % header_end + len(value)] = value
    altered = tmp_path / "altered.gguf"
    altered.write_bytes(data)
    with contextlib.suppress(InputError, ModelError):
        build_config(GgufFile(altered))
