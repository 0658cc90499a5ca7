"""The native library's thread pool: each item runs once, concurrent callers, child processes, and limits."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from logprobe.kernels import threads
from logprobe.kernels.layers.rows import norm_stage
from logprobe.kernels.stages import Stage
from norms import rms_norm


def adding(num_items: int) -> tuple[Stage, torch.Tensor]:
    """Make a stage of `num_items`, each of which adds ones to a row of the tensor."""
    out = torch.zeros(num_items, 8)
    stage = norm_stage(torch.ones(num_items, 8), torch.ones(8), out, 0.0, out)
    return Stage("norm", "NormArgs", num_items=num_items, **stage.fields | {"block_rows": 1}), out


@pytest.mark.parametrize("num_threads", range(1, 9))
@pytest.mark.parametrize("num_items", [0, 1, 2, 7, 1000])
def test_every_item_runs_exactly_once(num_items: int, num_threads: int) -> None:
    stage, out = adding(num_items)
    for times in range(1, 4):
        stage.run(num_threads=num_threads)
        assert (out == times).all()


def test_runs_from_several_python_threads_do_not_mix() -> None:
    wrong: list[int] = []

    def run_often(index: int) -> None:
        stage, out = adding(50 + index)
        for times in range(1, 201):
            stage.run(num_threads=2)
            if not (out == times).all():
                wrong.append(index)

    callers = [threading.Thread(target=run_often, args=(index,)) for index in range(6)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert wrong == []


def test_torch_computes_the_same_between_runs() -> None:
    matrix = torch.randn(200, 200, generator=torch.Generator().manual_seed(0))
    want = matrix @ matrix
    for num_threads in (2, 3, 1, 8):
        stage, out = adding(100)
        stage.run(num_threads=num_threads)
        assert (out == 1).all()
        assert torch.equal(matrix @ matrix, want)


FORK = """
import os, sys, time, torch
from logprobe.kernels import threads
from logprobe.kernels.layers.rows import norm_stage
threads.set_num_threads(3)
x, weight = torch.randn(500, 64), torch.ones(64)
def normed():
    out = torch.empty_like(x)
    norm_stage(x, weight, out, 1e-5).run()
    return out
want = normed()
time.sleep(0.5)  # threads that start hold locks of a sanitizer, which a forked child would wait for
child = os.fork()
if child == 0:
    os._exit(0 if all((normed() == want).all() for _ in range(100)) else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert (normed() == want).all()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_has_threads_of_its_own() -> None:
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=120)


# The other threads run only kernels outside the GIL. Torch and the address sanitizer's allocator take
# locks there, and a forked child would wait forever for a lock that was held during the fork.
FORK_WHILE_BUSY = """
import os, threading, torch
from logprobe.kernels import threads
from logprobe.kernels.layers.rows import norm_stage
from logprobe.kernels.stages import Series
threads.set_num_threads(3)
x, weight = torch.randn(500, 64), torch.ones(64)
outs = [torch.zeros(500, 64) for _ in range(3)]
series = [Series([norm_stage(x, weight, out, 1e-5)]) for out in outs]
for one in series:
    one.run()
want = outs[0].clone()
assert all(torch.equal(out, want) for out in outs)
is_over = threading.Event()
def keep_busy(one):
    while not is_over.is_set():
        one.run()
def run_in_child():
    for _ in range(10):
        for one, out in zip(series, outs):
            out.zero_()
            one.run()
            if not torch.equal(out, want):
                return 1
    return 0
callers = [threading.Thread(target=keep_busy, args=[one]) for one in series[1:]]
for caller in callers:
    caller.start()
try:
    for _ in range(20):
        child = os.fork()
        if child == 0:
            os._exit(run_in_child())
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
finally:
    is_over.set()
    for caller in callers:
        caller.join()
assert all(torch.equal(out, want) for out in outs)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_child_forked_while_other_threads_run_kernels_computes_the_same() -> None:
    subprocess.run([sys.executable, "-c", FORK_WHILE_BUSY], check=True, timeout=300)


def test_the_number_of_threads_may_change_between_runs() -> None:
    x, weight = torch.randn(300, 64, generator=torch.Generator().manual_seed(1)), torch.ones(64)
    want = rms_norm(x, weight, 1e-5)
    before = threads.num_threads()
    try:
        for num_threads in (1, 5, 2, 33, 1, 3):
            threads.set_num_threads(num_threads)
            for _ in range(10):
                assert torch.equal(rms_norm(x, weight, 1e-5), want)
    finally:
        threads.set_num_threads(before)


ONE_CORE = """
import os, torch
from logprobe.kernels import threads
from logprobe.kernels.layers.rows import norm_stage
from logprobe.kernels.stages import Series
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
threads.set_num_threads(4)
rows = [torch.randn(500, 64), *(torch.zeros(500, 64) for _ in range(10))]
stages = [norm_stage(x, torch.ones(64), out, 1e-5) for x, out in zip(rows, rows[1:])]
for stage in stages:
    stage.run(num_threads=1)
want = [row.clone() for row in rows]
for _ in range(5):
    for row in rows[1:]:
        row.zero_()
    Series(stages).run()
    assert all(map(torch.equal, rows, want))
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system sets no affinity")
def test_more_threads_than_the_one_core_of_a_process_end_their_work() -> None:
    subprocess.run([sys.executable, "-c", ONE_CORE], check=True, timeout=300)


# Out of address space: the system refuses threads' stacks and kernels' scratch memory.
LIMITED = """
import resource, sys, torch
from pathlib import Path
from logprobe.kernels import extract, threads
from logprobe.kernels.layers.rows import norm_stage
def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))
x, out, weight = torch.randn(500, 64), torch.zeros(500, 64), torch.ones(64)
logits = torch.zeros(2, 1 << 22)
stage = norm_stage(x, weight, out, 1e-5)
stage.run(num_threads=1)
want = out.clone()
out.zero_()
extract(logits[:, :64], [0, 0], 1)
running = status("Threads")
threads.set_num_threads(1)
before = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, ((status("VmSize") << 10) + (1 << 20), before[1]))
stage.run(num_threads=16)
found = status("Threads")
try:
    extract(logits, [0, 0], 1)
except MemoryError:
    is_refused = True
resource.setrlimit(resource.RLIMIT_AS, before)
assert found == running and torch.equal(out, want)
assert is_refused
assert extract(logits, [0, 0], 1).token_ids.tolist() == [[0, 0], [0, 0]]
stage.run(num_threads=16)
assert status("Threads") > running and torch.equal(out, want)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space as Linux does")
@pytest.mark.skipif("san.so" in os.environ.get("LD_PRELOAD", ""), reason="a sanitizer needs address space")
def test_threads_and_memory_that_the_system_refuses_are_done_without_or_told() -> None:
    subprocess.run([sys.executable, "-c", LIMITED], check=True, timeout=300)


ROOT = Path(__file__).parents[2]
SANITIZERS = {
    "thread": ("libtsan.so", {"TSAN_OPTIONS": "halt_on_error=1"}),
    "address,undefined": ("libasan.so", {"ASAN_OPTIONS": "detect_leaks=0"}),
}


@pytest.fixture(scope="module", params=sorted(SANITIZERS))
def stress(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Build `native/tests/threads.cpp` with a sanitizer; return its path and environment."""
    compiler, sanitizer = shutil.which("g++"), request.param
    library, options = SANITIZERS[sanitizer]
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"} | options
    if compiler is None or platform.machine() != "x86_64" or sys.platform != "linux":
        pytest.skip("needs g++ on Linux on x86-64")
    asked = [compiler, f"-print-file-name={library}"]
    found = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip(f"g++ has no {library}")
    program = tmp_path_factory.mktemp("stress") / "threads"
    sources = [ROOT / "native" / "tests" / "threads.cpp", ROOT / "native" / "threads.cpp"]
    flags = [
        "-std=c++17",
        "-O1",
        "-g",
        "-w",
        "-pthread",
        "-march=x86-64-v3",
        "-fno-sanitize-recover=undefined",
    ]
    command = [compiler, *flags, f"-fsanitize={sanitizer}", *sources, "-o", program]
    subprocess.run(command, check=True, env=environment)
    return [program, environment, sanitizer]


def test_the_pool_runs_with_a_sanitizer(stress: list[Any]) -> None:
    program, environment, _ = stress
    done = subprocess.run(
        [program], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


def test_a_data_race_is_found_by_the_sanitizer(stress: list[Any]) -> None:
    program, environment, sanitizer = stress
    if sanitizer != "thread":
        pytest.skip("what ThreadSanitizer finds")
    done = subprocess.run(
        [program, "race"], env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode != 0
    assert "data race" in done.stderr
