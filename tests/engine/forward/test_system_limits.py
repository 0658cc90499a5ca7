"""The size of the KV cache, and refused models, given the memory limits of a machine or container."""

from __future__ import annotations

import mmap
import re
import shutil
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from logprobe import LLM
from logprobe.config import EngineConfig
from logprobe.engine.forward import system_limits
from logprobe.engine.forward.native import NativeForward
from logprobe.engine.forward.system_limits import (
    BASE_BYTES,
    DEFAULT_SHARE,
    MAX_DEFAULT_BYTES,
    MIN_DEFAULT_BYTES,
    UNKNOWN_FREE_BYTES,
    check_memory,
    default_kv_bytes,
    free_bytes,
)
from logprobe.errors import ModelError, ParameterError
from logprobe.models import resolve
from logprobe.models.cache import home

GIB = 1 << 30


class Machine:
    """The system's memory files (/proc, cgroups), below a temporary folder."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        for name in ("_MEMINFO", "_MAPS", "_OWN_CGROUP", "_CGROUPS"):
            patch.setattr(system_limits, name, folder / name)

    def has(self, free: int, total: int = 64 * GIB) -> None:
        kib = {"MemTotal": total >> 10, "MemFree": 1, "MemAvailable": free >> 10}
        lines = [*(f"{name}:   {size} kB\n" for name, size in kib.items()), "HugePages_Total:       0\n"]
        (self.folder / "_MEMINFO").write_text("".join(lines))

    def maps(self, *lines: str) -> None:
        anonymous = "7f0000000000-7f0000100000 rw-p 00000000 00:00 0\n"
        (self.folder / "_MAPS").write_text(anonymous + "".join(f"{line}\n" for line in lines))

    def runs_in(self, cgroup: str) -> None:
        (self.folder / "_OWN_CGROUP").write_text(f"1:name=systemd:/elsewhere\n0::{cgroup}\n")

    def limits(self, cgroup: str, limit: int | str, used: int = 0, files: int = 0) -> None:
        folder = self.folder / "_CGROUPS" / cgroup
        folder.mkdir(parents=True, exist_ok=True)
        stat = f"anon {used}\nactive_file {files // 4}\ninactive_file {files - files // 4}"
        for name, text in {"max": limit, "current": used + files, "stat": stat}.items():
            (folder / f"memory.{name}").write_text(f"{text}\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(tmp_path, monkeypatch)
    machine.has(16 * GIB)
    return machine


@pytest.mark.parametrize(
    ("free", "num_pools", "want"),
    [
        (64 * GIB, 1, MAX_DEFAULT_BYTES),
        (GIB, 1, GIB // 4),
        (GIB, 2, GIB // 8),
        (64 * GIB, 8, MAX_DEFAULT_BYTES),
        (16 * GIB, 8, GIB // 2),
        (1 << 20, 1, MIN_DEFAULT_BYTES),
    ],
)
def test_the_default_is_a_share_of_what_is_free(
    machine: Machine, free: int, num_pools: int, want: int
) -> None:
    machine.has(free)
    assert default_kv_bytes(num_pools) == want


def test_a_system_that_does_not_say_what_is_free_gives_a_pool(machine: Machine) -> None:
    (machine.folder / "_MEMINFO").unlink()
    assert default_kv_bytes() == UNKNOWN_FREE_BYTES // DEFAULT_SHARE
    check_memory("any", 1 << 60)


def test_weights_that_are_mapped_are_not_free(machine: Machine) -> None:
    file = "r--s 00000000 fe:00 77                   /cache/a model/panels.bin"
    machine.maps(
        f"7f1000000000-7f1300000000 {file}",
        f"7f2000000000-7f2300000000 {file}",  # the same file mapped twice
        "7f3000000000-7f3040000000 r--s 00000000 fe:00 78                   /cache/other/panels.bin",
        "7f4000000000-7f4040000000 rw-s 00000000 00:01 79                   /dev/shm/rows",
        "7f5000000000-7f5040000000 r-xp 00000000 fe:00 80                   /lib/libtorch_cpu.so",
    )
    assert free_bytes() == 3 * GIB
    assert default_kv_bytes() == 3 * GIB // 4


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
def test_the_panels_of_a_model_are_seen_to_be_mapped(
    tiny_model_folder: Path, tmp_path: Path, machine: Machine
) -> None:
    folder = tmp_path / "seen"
    shutil.copytree(tiny_model_folder, folder)
    with LLM(str(folder), weights="checkpoint", kv_cache_memory_bytes=1 << 20):
        maps = Path("/proc/self/maps").read_text().splitlines()
    [panels] = home().glob("panels/seen-*/panels.bin")
    machine.maps(*(line for line in maps if line.endswith(str(panels))))
    assert 0 <= 16 * GIB - free_bytes() - panels.stat().st_size < mmap.PAGESIZE


@pytest.mark.parametrize(
    ("cgroup", "limits", "want"),
    [
        ("/", {}, 16 * GIB),  # no limits
        ("/", {".": ("max", 4 * GIB, 0)}, 16 * GIB),
        ("/", {".": (8 * GIB, 2 * GIB, 5 * GIB)}, 6 * GIB),  # page cache counts as free
        ("/pod/box", {"pod": (8 * GIB, 3 * GIB, 0), "pod/box": ("max", GIB, 0)}, 5 * GIB),
        ("/pod/box", {"pod": (8 * GIB, 3 * GIB, 0), "pod/box": (2 * GIB, GIB, 0)}, GIB),
        ("/docker/outer-name", {".": (2 * GIB, GIB, 0)}, GIB),  # a container whose root is its cgroup
        ("/", {".": (GIB, 2 * GIB, 0)}, 0),
    ],
)
def test_a_container_has_what_its_limits_leave(
    machine: Machine, cgroup: str, limits: dict[str, tuple[int | str, int, int]], want: int
) -> None:
    machine.runs_in(cgroup)
    for name, facts in limits.items():
        machine.limits(name, *facts)
    assert free_bytes() == want


def test_weights_that_can_never_be_in_memory_are_refused_by_name(machine: Machine) -> None:
    machine.has(GIB, total=8 * GIB)
    check_memory("fits", 8 * GIB - BASE_BYTES)  # total memory, as the rest may become free later
    with pytest.raises(
        ModelError, match=r"^big: needs 16\.5 GB of memory .*this machine has 8\.6 GB; use a sm"
    ):
        check_memory("big", 16_000_000_000)
    machine.runs_in("/pod/box")
    machine.limits("pod", 2 * GIB)
    machine.limits("pod/box", "max")
    check_memory("fits", GIB)
    with pytest.raises(ModelError, match=r"^big: needs 2\.6 GB .*this container has 2\.1 GB"):
        check_memory("big", 2 * GIB - 1)


def test_more_bytes_than_there_are_is_told_with_the_parameter(tiny_model_folder: Path) -> None:
    name = str(tiny_model_folder)
    with pytest.raises(ParameterError, match=r"kv_cache_memory_bytes: cannot allocate"):
        NativeForward(EngineConfig(model=name, kv_cache_memory_bytes=1 << 60), resolve(name))


def test_a_load_tells_the_size_of_the_pool_and_of_what_it_is_a_part(
    tiny_model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "logprobe")
    with LLM(str(tiny_model_folder), kv_cache_memory_bytes=1 << 21) as llm:
        room = llm.engine.capabilities().num_slots
    assert re.search(rf"KV cache holds {room} tokens \(2 MB of [\d.]+ .B free memory\)", caplog.text)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_a_pool_that_outgrows_what_the_weights_leave_is_made_with_a_warning(
    tiny_model_folder: Path, machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine.has(1 << 20)
    with LLM(str(tiny_model_folder), kv_cache_memory_bytes=1 << 21) as llm:
        assert llm.engine.capabilities().num_slots > 2
    [warning] = caplog.messages
    assert warning.startswith("kv_cache_memory_bytes: a KV cache of 2 MB exceeds the 1 MB of free memory;")


def test_other_weights_have_as_many_slots_however_much_is_free(
    tiny_model_folder: Path, machine: Machine
) -> None:
    config = EngineConfig(model=str(tiny_model_folder))
    machine.has(GIB)
    forward = NativeForward(config, resolve(config.model))
    machine.has(GIB // 2)
    state = AutoModelForCausalLM.from_pretrained(config.model).state_dict()
    assert forward.with_weights(config, state).num_slots == forward.num_slots
