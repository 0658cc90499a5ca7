import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numba import cfunc

from logprobe.kernels.threads import parallel
from logprobe.kernels.threads.parallel import (
    Worker,
    compiled_worker,
    int64_at,
    next_item,
    parallel_for,
)


def add_to_items(task: Any) -> None:
    counts = int64_at(task[2], task[1])
    item = next_item(task)
    while item >= 0:
        counts[item] += task[3]
        item = next_item(task)


counter = compiled_worker()(add_to_items)


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
import helper
import numpy as np
from logprobe.kernels.threads.parallel import compiled_worker, int64_at, next_item, parallel_for

@compiled_worker(helper)
def worker(task):
    item = next_item(task)
    while item >= 0:
        int64_at(task[2], task[1])[item] = helper.increment(item)
        item = next_item(task)

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


ONE_OF_SEVERAL = """
import sys
import numpy as np
from logprobe.kernels.threads.parallel import compiled, compiled_worker, int64_at, next_item, parallel_for

def adding(number):
    @compiled(f"times_fibonacci_{number}")
    def times_fibonacci(n):  # it calls itself, so that it stays a function of its own
        if n < 2:
            return number
        return times_fibonacci(n - 1) + times_fibonacci(n - 2)

    @compiled_worker(name=f"adding_{number}")
    def worker(task):
        item = next_item(task)
        while item >= 0:
            int64_at(task[2], task[1])[item] += times_fibonacci(task[3])
            item = next_item(task)

    return worker

def total(numbers):
    values = np.zeros(3, dtype=np.int64)
    for worker in [adding(number)() for number in numbers]:
        parallel_for(worker, [values.ctypes.data, 4], 3)
    return values.tolist()
"""


def test_workers_that_several_processes_have_cached_do_not_run_in_each_others_place(tmp_path: Path) -> None:
    (tmp_path / "several.py").write_text(ONE_OF_SEVERAL)
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}

    def run(numbers: list[int]) -> str:
        code = f"import sys; sys.path.insert(0, sys.argv[1]); import several; print(several.total({numbers}))"
        return subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()

    assert run([1]) == "[5, 5, 5]"
    assert run([10]) == "[50, 50, 50]"
    assert run([1, 10]) == "[55, 55, 55]"


def test_a_worker_compiles_where_no_cache_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse_cache(signature: str, *, cache: bool) -> Any:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return cfunc(signature)

    monkeypatch.setattr(parallel, "cfunc", refuse_cache)
    worker = compiled_worker()(add_to_items)()
    counts = np.zeros(9, dtype=np.int64)
    parallel_for(worker, [counts.ctypes.data, 3], 9)
    assert (counts == 3).all()
    assert not worker.is_from_cache


def test_workers_made_of_the_same_lines_are_told_apart_by_name() -> None:
    def adding(number: int) -> Callable[[], Worker]:
        @compiled_worker(name=f"adding_{number}")
        def add(task: Any) -> None:
            item = next_item(task)
            while item >= 0:
                int64_at(task[2], task[1])[item] += number
                item = next_item(task)

        return add

    counts = np.zeros(5, dtype=np.int64)
    for worker in [adding(number) for number in (1, 10)]:
        parallel_for(worker(), [counts.ctypes.data], 5)
    assert (counts == 11).all()


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
