"""Memory for arrays: zeroed, separate, aligned, private, mapped on first use."""

from __future__ import annotations

import mmap
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from logprobe.engine.forward.process_memory import ALIGNMENT, PagedMemory

SIZE = 1 << 25


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_arrays_are_zero_aligned_and_apart() -> None:
    memory = PagedMemory(1 << 12)
    first, second, third = (
        memory.take(shape, dtype)
        for shape, dtype in [((3, 5), np.float32), ((7,), np.int8), ((2, 2), np.float16)]
    )
    assert [tuple(one.shape) for one in (first, second, third)] == [(3, 5), (7,), (2, 2)]
    assert all(one.ctypes.data % ALIGNMENT == 0 for one in (first, second, third))
    assert not any(one.any() for one in (first, second, third))
    first.fill(1)
    third.fill(3)
    assert not second.any()
    second.fill(2)
    assert (first == 1).all()
    assert (third == 3).all()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/statm")
def test_pages_come_as_they_are_used_and_go_when_they_are_released() -> None:
    before = resident_bytes()
    memory = PagedMemory(SIZE)
    array = memory.take((SIZE // 4,), np.float32)
    assert resident_bytes() - before < 0.1 * SIZE
    array.fill(1)
    assert resident_bytes() - before > 0.9 * SIZE
    memory.release()
    assert resident_bytes() - before < 0.1 * SIZE
    assert not array.any()


def test_memory_says_what_it_has_room_for() -> None:
    memory = PagedMemory(1 << 12)
    memory.take((1 << 12,), np.uint8)
    assert memory.has_room(1 << 10)
    assert not memory.has_room(SIZE)


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").is_dir(),
    reason="the system has no huge pages",
)
@pytest.mark.parametrize("are_huge", [True, False])
def test_pages_are_huge_where_it_is_asked(are_huge: bool) -> None:
    array = PagedMemory(SIZE, are_huge=are_huge).take((SIZE,), np.uint8)
    flag = "hg" if are_huge else "nh"
    assert flag in flags_of(array.ctypes.data)


def test_a_system_without_huge_pages_gives_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", -1, raising=False)
    assert not PagedMemory(SIZE, are_huge=True).take((5,), np.uint8).any()


def flags_of(address: int) -> list[str]:
    """Return the kernel's flags of the mapping at an address."""
    is_it = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if place := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_it = int(place[1], 16) <= address < int(place[2], 16)
        elif is_it and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(address)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
def test_a_fork_would_not_share_the_slots() -> None:
    memory = PagedMemory(SIZE)
    address = memory.take((1,), np.int8).ctypes.data
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= address < end:
            assert line.split()[1] == "rw-p"
            return
    pytest.fail("the memory is not mapped")
