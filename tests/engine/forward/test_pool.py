"""Memory of the slots: zeroed, apart, aligned, private, and all there from the start."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
import torch

from logprobe.config import EngineConfig
from logprobe.engine.forward import pool as memory_module
from logprobe.engine.forward.native import NativeForward
from logprobe.engine.forward.pool import ALIGNMENT, SlotMemory
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


@pytest.mark.skipif(sys.platform != "linux", reason="the call for pages is Linux's")
def test_all_pages_come_at_once() -> None:
    before = resident_bytes()
    memory = SlotMemory(SIZE)
    assert resident_bytes() - before > 0.9 * SIZE
    assert not memory.take((SIZE // 4,), torch.float32).any()


@pytest.mark.skipif(sys.platform != "linux", reason="the call for pages is Linux's")
def test_a_system_that_does_not_know_the_call_serves_pages_as_they_are_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(memory_module, "POPULATE_WRITE", 9999)
    with caplog.at_level(logging.DEBUG, logger="logprobe"):
        memory = SlotMemory(SIZE)
    assert "when it is first used" in caplog.text
    assert not memory.take((100,), torch.float32).any()


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
