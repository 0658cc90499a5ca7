import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from logprobe.engine.forward.pool import resident_bytes
from logprobe.errors import EngineError
from logprobe.kernels.threads import parallel
from logprobe.kernels.threads.numba.intrinsics import internal
from logprobe.kernels.threads.numba.tasks import int64_at, next_item
from logprobe.kernels.threads.numba.workers import compiled_worker
from logprobe.kernels.threads.parallel import Worker, parallel_for


def add_to_items(task: Any) -> None:
    counts = int64_at(task[2], task[1])
    item = next_item(task)
    while item >= 0:
        counts[item] += task[3]
        item = next_item(task)


counter = compiled_worker(add_to_items)


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


def test_workers_made_of_the_same_lines_do_not_run_in_each_others_place() -> None:
    def adding(number: int) -> Callable[[], Worker]:
        @internal
        def times_fibonacci(n: Any) -> Any:  # it calls itself, so that it stays a function of its own
            if n < 2:
                return number
            return times_fibonacci(n - 1) + times_fibonacci(n - 2)

        @compiled_worker
        def add(task: Any) -> None:
            item = next_item(task)
            while item >= 0:
                int64_at(task[2], task[1])[item] += times_fibonacci(task[3])
                item = next_item(task)

        return add

    counts = np.zeros(3, dtype=np.int64)
    for worker in [adding(number)() for number in (1, 10)]:
        parallel_for(worker, [counts.ctypes.data, 4], 3)
    assert (counts == 55).all()


def test_memory_that_a_worker_makes_is_its_own_and_is_given_back() -> None:
    @compiled_worker
    def fill(task: Any) -> None:
        item = next_item(task)
        while item >= 0:
            memory = np.empty(task[3], np.int64)
            memory[:] = item
            int64_at(task[2], task[1])[item] = memory.sum()
            item = next_item(task)

    sums, size, num_items = np.zeros(2000, dtype=np.int64), 1 << 18, 2000
    before = resident_bytes()
    parallel_for(fill(), [sums.ctypes.data, size], num_items)  # 4 GB, were it kept
    after = resident_bytes()
    assert (sums == size * np.arange(num_items)).all()
    assert before is None or after is None or after - before < 1 << 30


RAISES = """
from typing import Any
import numpy as np
from logprobe.kernels.threads.numba.workers import compiled_worker
from logprobe.kernels.threads.parallel import parallel_for

@compiled_worker
def worker(task: Any) -> None:
    {line}

parallel_for(worker(), [1 << 58, 0, 0, 0], 1)
print("went on")
"""


def test_a_worker_that_python_would_have_to_help_is_refused_by_what_it_asks_for() -> None:
    @compiled_worker
    def turn(task: Any) -> None:
        wide = np.empty((task[2], task[3]), np.int64)
        task[4] = wide.T.reshape(-1)[0]

    with pytest.raises(EngineError, match=r"ask for numba_attempt_nocopy_reshape.*install another Numba"):
        turn()


@pytest.mark.skipif(sys.platform == "win32", reason="signals end processes elsewhere")
@pytest.mark.parametrize("line", ["task[3] = task[4] // task[5]", "task[3] = np.empty(task[2], np.int64)[0]"])
def test_a_worker_that_raises_ends_the_process_before_anybody_sees_wrong_numbers(line: str) -> None:
    command = [sys.executable, "-c", RAISES.format(line=line)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGABRT, "")


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
