"""Memory of the slots: zeroed, apart, aligned, private, and there once it is used."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from logprobe.config import EngineConfig
from logprobe.engine.forward import pool as memory_module
from logprobe.engine.forward.native import NativeForward
from logprobe.engine.forward.pool import (
    ALIGNMENT,
    DEFAULT_SHARE,
    LEAST_DEFAULT_BYTES,
    MOST_DEFAULT_BYTES,
    UNKNOWN_FREE_BYTES,
    SlotMemory,
    default_kv_bytes,
)
from logprobe.errors import ParameterError
from logprobe.models import resolve

SIZE = 1 << 25


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_tensors_are_zero_aligned_and_apart() -> None:
    memory = SlotMemory(1 << 12)
    first, second, third = (
        memory.take(shape, dtype)
        for shape, dtype in [((3, 5), torch.float32), ((7,), torch.int8), ((2, 2), torch.float16)]
    )
    assert [tuple(one.shape) for one in (first, second, third)] == [(3, 5), (7,), (2, 2)]
    assert all(one.data_ptr() % ALIGNMENT == 0 for one in (first, second, third))
    assert not any(one.any() for one in (first, second, third))
    first.fill_(1)
    third.fill_(3)
    assert not second.any()
    second.fill_(2)
    assert (first == 1).all()
    assert (third == 3).all()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/statm")
def test_pages_come_as_they_are_used_and_go_when_they_are_released() -> None:
    before = resident_bytes()
    memory = SlotMemory(SIZE)
    tensor = memory.take((SIZE // 4,), torch.float32)
    assert resident_bytes() - before < 0.1 * SIZE
    tensor.fill_(1)
    assert resident_bytes() - before > 0.9 * SIZE
    memory.release()
    assert resident_bytes() - before < 0.1 * SIZE
    assert not tensor.any()


@pytest.mark.parametrize(
    ("free_kib", "limit", "want"),
    [
        (1 << 30, "max", MOST_DEFAULT_BYTES),
        (1 << 20, "max", 1 << 28),
        (1 << 20, str(1 << 29), (1 << 29) - (1 << 20) >> 2),
        (1 << 10, "max", LEAST_DEFAULT_BYTES),
    ],
)
def test_the_default_is_a_share_of_what_is_free(
    free_kib: int, limit: str, want: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said = {
        "_MEMINFO": f"MemTotal: 1 kB\nMemAvailable:   {free_kib} kB\n",
        "_LIMIT": limit,
        "_USED": "1048576",
    }
    for name, text in said.items():
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(memory_module, name, tmp_path / name)
    assert default_kv_bytes() == want


def test_a_system_that_does_not_say_what_is_free_gives_a_pool(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(memory_module, "_MEMINFO", tmp_path / "none")
    assert default_kv_bytes() == UNKNOWN_FREE_BYTES // DEFAULT_SHARE


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
def test_a_fork_would_not_share_the_slots() -> None:
    memory = SlotMemory(SIZE)
    address = memory.take((1,), torch.int8).data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= address < end:
            assert line.split()[1] == "rw-p"
            return
    pytest.fail("the memory is not mapped")


def test_more_bytes_than_there_are_is_told_with_the_parameter(tiny_model_folder: Path) -> None:
    name = str(tiny_model_folder)
    with pytest.raises(ParameterError, match=r"kv_bytes.*cannot be had.*ask for fewer"):
        NativeForward(EngineConfig(model=name, kv_bytes=1 << 60), resolve(name))
