import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from logprobe.kernels import threads


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = threads.num_threads()
    yield
    threads.set_num_threads(before)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The state of a process in which the number was not yet used."""
    monkeypatch.setattr(threads, "_number", None)
    monkeypatch.delenv(threads.VARIABLE, raising=False)
    return monkeypatch


def test_the_number_that_is_set_is_that_of_torch_too() -> None:
    threads.set_num_threads(3)
    assert threads.num_threads() == torch.get_num_threads() == 3


def test_the_default_is_torchs() -> None:
    code = """
import torch
from logprobe.kernels import threads
print(threads.num_threads(), torch.get_num_threads())
"""
    for value in (None, "1"):
        variables = {name: text for name, text in os.environ.items() if not name.endswith("_NUM_THREADS")}
        variables |= {} if value is None else {threads.VARIABLE: value}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=variables,
            check=True,
            capture_output=True,
            text=True,
            timeout=120,
        )
        ours, torchs = done.stdout.split()
        assert ours == torchs


@pytest.mark.parametrize(("value", "number"), [("5", 5), (" 6 , 2", 6), ("0", 4), ("many", 4)])
def test_a_number_in_the_environment_comes_first(
    value: str, number: int, fresh: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fresh.setattr(threads, "num_cores", lambda: 4)
    fresh.setattr(threads, "_QUOTA", tmp_path / "cpu.max")
    fresh.setattr(threads, "_OLD_QUOTA", tmp_path)
    fresh.setenv(threads.VARIABLE, value)
    assert threads.num_threads() == number


@pytest.mark.parametrize(("limit", "number"), [("max", 8), ("250000", 2), ("50000", 1), ("1600000", 8)])
@pytest.mark.parametrize("is_old", [False, True])
def test_a_containers_limit_lowers_the_number(
    limit: str, number: int, fresh: pytest.MonkeyPatch, tmp_path: Path, *, is_old: bool
) -> None:
    fresh.setattr(threads, "num_cores", lambda: 8)
    fresh.setattr(threads, "_QUOTA", tmp_path / "cpu.max")
    fresh.setattr(threads, "_OLD_QUOTA", tmp_path)
    if is_old:
        (tmp_path / "cpu.cfs_quota_us").write_text("-1\n" if limit == "max" else f"{limit}\n")
        (tmp_path / "cpu.cfs_period_us").write_text("100000\n")
    else:
        (tmp_path / "cpu.max").write_text(f"{limit} 100000\n")
    assert threads.num_threads() == number


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system has no affinity")
def test_threads_of_one_core_count_once(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fresh.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    fresh.setattr(threads, "_CPUS", tmp_path)
    assert threads.num_cores() == 3, "unknown cores"
    for cpu, siblings in enumerate(["0-1", "0-1", "2-3"]):
        (tmp_path / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(f"{siblings}\n")
    assert threads.num_cores() == 2
