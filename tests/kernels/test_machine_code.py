"""Machine code by our linker and by LLVM's; files that are whole or not there; starts without a compiler."""

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import logprobe
from logprobe.kernels import extract, machine_code
from logprobe.kernels.attention.api import RowPlan, ScoreRule, rows_stage
from logprobe.kernels.compiling import kernel_names
from logprobe.kernels.draw import api as draw_api
from logprobe.kernels.extraction import cpu as extraction
from logprobe.kernels.layers.forms import pack_floats
from logprobe.kernels.layers.gate import gate_stage
from logprobe.kernels.layers.layout import FORMS
from logprobe.kernels.layers.norm import norm_stage
from logprobe.kernels.layers.panels import Finish, panel_stage
from logprobe.kernels.machine_code import LINKS_HERE, StoredCode, c_function, linked_by_llvm
from logprobe.kernels.threads.parallel import Stage, Worker, WorkerOf, worker_of

LINKED_HERE = pytest.mark.skipif(not LINKS_HERE, reason="only x86-64 Linux has a linker of its own here")
SMALL = "threads.series"


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stages(out: torch.Tensor) -> Iterator[Stage]:
    """One of every kind of loop that a stage may be, each writing to `out`, (8, 96)."""
    x, values = numbers(8, 96), numbers(8, 96, seed=1)
    yield norm_stage(x, numbers(96, seed=2), out, 1e-5)
    yield gate_stage(x, values, out, "gelu")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        weights = pack_floats(numbers(96, 96, seed=3).to(dtype))
        yield panel_stage(x, weights, out, Finish(activation="silu", values=weights))
    slots = np.arange(20, dtype=np.int32)
    every = np.full(8, 20, np.int32)
    plan = RowPlan(np.arange(8, dtype=np.int32), np.zeros(8, np.int32), every, slots)
    pool = numbers(32, 2, 24, seed=4)
    rule = ScoreRule(0.2, softcap=30.0)
    yield rows_stage(x.view(8, 4, 24), pool, pool + 1, plan, out.view(8, 4, 24), rule)


def by_llvm(worker: WorkerOf) -> Worker:
    code = StoredCode(worker.name).read()
    assert code is not None
    address, memory = linked_by_llvm(code)
    return replace(
        worker(), address=address, run=ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address), keeps=memory
    )


def named(worker: Worker) -> WorkerOf:
    """Which kernel a worker of this process is."""
    return next(one for name in kernel_names(FORMS) if (one := worker_of(name))() is worker)


@LINKED_HERE
def test_what_is_linked_here_computes_what_llvm_links() -> None:
    out, twin = torch.zeros(8, 96), torch.zeros(8, 96)
    for stage, other in zip(stages(out), stages(twin), strict=True):
        stage.run()
        replace(other, worker=by_llvm(named(other.worker))).run()
        assert out.abs().sum() > 0
        assert torch.equal(out, twin)
        out.zero_()
        twin.zero_()


@contextmanager
def linked_by_llvm_alone(module: object) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        worker = by_llvm(module.worker)  # type: ignore[attr-defined]
        patch.setattr(module, "worker", lambda: worker)
        yield


@LINKED_HERE
def test_functions_of_the_c_library_are_the_same_for_both_linkers() -> None:
    """Logarithms and exponentials of the extraction and of the draw are the C library's."""
    logits = numbers(6, 3000)
    count = len(logits)
    params = draw_api.DrawParams(
        *(np.full(count, value, np.float32) for value in (0.7, 40, 0.9, 0.01)), np.linspace(0, 0.99, count)
    )

    def computed() -> list[np.ndarray]:
        rows = extract(logits, list(range(count)), 300, entropy=True, varentropy=True)
        drawn = draw_api.draw(logits, params)
        assert rows.entropy is not None
        found = [rows.logprobs, rows.token_ids, rows.entropy]
        return [*(tensor.numpy() for tensor in found), drawn.token_ids, drawn.cut_logits]

    own = computed()
    with linked_by_llvm_alone(extraction), linked_by_llvm_alone(draw_api):
        others = computed()
    for one, other in zip(own, others, strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("left", ["nothing", "half", "other bytes", "a folder"])
def test_a_file_that_is_not_whole_is_compiled_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, left: str
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    assert not WorkerOf(SMALL)().is_from_cache
    (file,) = tmp_path.glob("*.o")
    whole = file.read_bytes()
    if left == "a folder":
        file.unlink()
        file.mkdir()
    else:
        content = {"nothing": b"", "half": whole[: len(whole) // 2], "other bytes": whole[:-1] + b"\1"}
        file.write_bytes(content[left])
    assert StoredCode(SMALL).read() is None
    assert not WorkerOf(SMALL)().is_from_cache
    assert WorkerOf(SMALL)().is_from_cache == (left != "a folder")
    assert ("cannot be kept" in caplog.text) == (left == "a folder")
    assert [one.name for one in tmp_path.iterdir()] == [file.name]


def test_without_a_folder_each_process_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file" / "below"))
    assert machine_code.folder_to_write() is None
    assert not WorkerOf(SMALL)().is_from_cache
    assert not WorkerOf(SMALL).is_stored()


COMPILE = """
import sys
import logprobe
from logprobe.kernels.threads.parallel import WorkerOf
print(logprobe.__file__, WorkerOf("threads.series")().is_from_cache)
"""


def test_a_change_in_any_file_of_the_kernels_compiles_anew(tmp_path: Path) -> None:
    package = tmp_path / "logprobe"
    shutil.copytree(Path(logprobe.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(tmp_path)}

    def run() -> str:
        command = [sys.executable, "-c", COMPILE]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        file, is_from_cache = done.stdout.split()
        assert Path(file).parent == package
        return is_from_cache

    assert [run(), run()] == ["False", "True"]
    with (package / "kernels" / "threads" / "numba" / "intrinsics.py").open("a") as file:
        file.write("\n")
    assert [run(), run()] == ["False", "True"]


def test_memory_that_cannot_be_executed_is_an_error_that_says_so() -> None:
    with pytest.raises(OSError, match="memory cannot be made executable"):
        machine_code._protect(c_function("malloc") + 1, 1)  # at no page's begin


START = """
import sys
from logprobe import LLM, SamplingParams
with LLM(sys.argv[1]) as llm:
    llm.generate("A", SamplingParams(max_tokens=2, logprobs=2, prompt_logprobs=1, temperature=0.5, top_k=3))
print(*sorted({"numba", "llvmlite"} & set(sys.modules)))
"""


@LINKED_HERE
def test_a_start_loads_no_compiler(tiny_model_folder: Path) -> None:
    command = [sys.executable, "-c", START, str(tiny_model_folder)]
    done = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2)]
    assert done[1] == "\n", "the first start may compile"
