import functools
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numba import cfunc, njit

from logprobe.kernels.threads import parallel
from logprobe.kernels.threads.parallel import (
    Worker,
    compile_worker,
    int64_at,
    next_item,
    parallel_for,
    task_at,
)


@njit
def count_items(task: Any) -> None:
    counts = int64_at(task[2], task[1])
    item = next_item(task)
    while item >= 0:
        counts[item] += task[3]
        item = next_item(task)


def make_counter(digest: int, *, cache: bool) -> Any:
    @cfunc("void(voidptr)", cache=cache)
    def counter(address: Any) -> None:
        if digest >= 0:
            count_items(task_at(address))

    return counter


@functools.cache
def counter() -> Worker:
    return compile_worker(make_counter, __file__)


def counted(num_items: int, num_threads: int | None) -> np.ndarray:
    counts = np.zeros(num_items, dtype=np.int64)
    parallel_for(counter(), [counts.ctypes.data, 1], num_items, num_threads=num_threads)
    return counts


@pytest.mark.parametrize("num_threads", [None, *range(1, 9)])
@pytest.mark.parametrize("num_items", [0, 1, 2, 7, 1000])
def test_every_item_runs_exactly_once(num_items: int, num_threads: int | None) -> None:
    assert (counted(num_items, num_threads) == 1).all()


def test_python_threads_do_the_same_without_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "_openmp_launch", lambda: None)
    assert parallel.thread_pool() == "python"
    assert (counted(1000, 4) == 1).all()


@pytest.mark.skipif(sys.platform != "linux", reason="torch runs on libgomp on Linux only")
def test_torch_on_linux_lends_its_threads() -> None:
    assert parallel.thread_pool() == "openmp"


def test_launches_from_several_python_threads_do_not_mix() -> None:
    wrong: list[int] = []

    def launch_often(index: int) -> None:
        wrong.extend(index for _ in range(200) if not (counted(50 + index, 2) == 1).all())

    callers = [threading.Thread(target=launch_often, args=(index,)) for index in range(6)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


def test_torch_computes_the_same_between_launches() -> None:
    matrix = torch.randn(200, 200, generator=torch.Generator().manual_seed(0))
    want = matrix @ matrix
    for num_threads in (None, 3, 1, 8):
        assert (counted(100, num_threads) == 1).all()
        assert torch.equal(matrix @ matrix, want)


COMPILE_ONE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import module_with_worker
print(module_with_worker.worker().is_from_cache, module_with_worker.result())
"""
MODULE = """
from pathlib import Path
import numpy as np
from numba import cfunc
from helper import increment
from logprobe.kernels.threads.parallel import compile_worker, int64_at, next_item, parallel_for, task_at

def make(digest, *, cache):
    @cfunc("void(voidptr)", cache=cache)
    def body(address):
        if digest >= 0:
            task = task_at(address)
            item = next_item(task)
            while item >= 0:
                int64_at(task[2], task[1])[item] = increment(item)
                item = next_item(task)
    return body

def worker():
    return compile_worker(make, __file__, str(Path(__file__).with_name("helper.py")))

def result():
    values = np.zeros(3, dtype=np.int64)
    parallel_for(worker(), [values.ctypes.data], 3)
    return values.tolist()
"""


def test_the_disk_cache_notices_a_change_in_any_source_file(tmp_path: Path) -> None:
    def run(step: int) -> str:
        source = f"from numba import njit\n\n@njit\ndef increment(item):\n    return item + {step}\n"
        (tmp_path / "helper.py").write_text(source)
        environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
        command = [sys.executable, "-c", COMPILE_ONE, str(tmp_path)]
        return subprocess.run(
            command, env=environment, check=True, capture_output=True, text=True
        ).stdout.strip()

    (tmp_path / "module_with_worker.py").write_text(MODULE)
    assert run(step=1) == "False [1, 2, 3]"
    assert run(step=1) == "True [1, 2, 3]"
    assert run(step=5) == "False [5, 6, 7]"


def test_a_worker_compiles_where_no_cache_can_be_written() -> None:
    def make(digest: int, *, cache: bool) -> Any:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return make_counter(digest, cache=False)

    assert not compile_worker(make, __file__).is_from_cache


@pytest.mark.skipif(parallel.thread_pool() != "openmp", reason="torch does not run on libgomp here")
def test_released_threads_end_and_come_back_with_the_next_operator() -> None:
    code = """
import os, time, torch
from logprobe.kernels.threads.parallel import release_threads

def count():
    return len(os.listdir("/proc/self/task"))

torch.set_num_threads(3)
before = count()
torch.ones(10**6).sin_()
assert count() == before + 2
release_threads()
deadline = time.monotonic() + 20
while count() > before and time.monotonic() < deadline:
    time.sleep(0.01)
assert count() == before, count()
torch.ones(10**6).sin_()
assert count() == before + 2
"""
    subprocess.run([sys.executable, "-c", code], check=True)
