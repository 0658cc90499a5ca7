"""Kernels are compiled ahead in processes of their own, once, and by one process at a time."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pexpect
import pytest
from llvmlite import binding as llvm

from logprobe.kernels import compiling, processor
from logprobe.kernels.compiling import BASE, compiled_beside, kernel_names
from logprobe.kernels.layers.layout import FORMS
from logprobe.kernels.threads.parallel import worker_of

QUICK = ["layers.store", "threads.series"]
COMPILE = """
import logging, sys, time
logging.basicConfig(format="%(message)s")
from logprobe.kernels.compiling import compiled_beside
from logprobe.kernels.threads.parallel import worker_of
with compiled_beside(sys.argv[1:]) as missing:
    print(*missing)
print(*[worker_of(name)().is_from_cache for name in sys.argv[1:]])
"""


def compiled(cache: Path, *names: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", COMPILE, *names],
        env=os.environ | {"NUMBA_CACHE_DIR": str(cache)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_every_kernel_has_a_name() -> None:
    names = kernel_names(FORMS)
    assert len(names) == len(BASE) + len(FORMS)
    assert all(worker_of(name).is_stored() for name in names)


def test_processes_that_want_the_same_kernels_compile_them_once(tmp_path: Path) -> None:
    both = [compiled(tmp_path, *QUICK) for _ in range(2)]
    outputs = [process.communicate(timeout=300) for process in both]
    assert sorted(output.splitlines()[0] for output, _ in outputs) == ["", " ".join(QUICK)]
    assert [output.splitlines()[1] for output, _ in outputs] == ["True True"] * 2
    told = [line for _, errors in outputs for line in errors.splitlines()]
    assert [line.rpartition(":")[0] for line in told] == ["compiling 2 CPU kernels, once, in 2 processes"]


def test_a_kernel_that_fails_is_left_to_its_first_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiling, "MAIN", "raise SystemExit(3)")
    with compiled_beside(["layers.store"]):
        pass
    assert "some CPU kernels could not be compiled ahead" in caplog.text


def test_work_that_fails_ends_the_processes_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiling, "MAIN", "import time; time.sleep(600)")
    began = time.monotonic()
    with pytest.raises(KeyError), compiled_beside(["layers.store"]):
        raise KeyError
    assert time.monotonic() - began < 300


def test_without_a_folder_for_them_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file"))
    with compiled_beside(["layers.store"]) as missing:
        assert missing == ["layers.store"]
    assert "set NUMBA_CACHE_DIR" in caplog.text


def test_a_terminal_shows_a_bar_that_names_what_is_compiled(tmp_path: Path) -> None:
    code = """
from logprobe.kernels.compiling import compiled_beside
with compiled_beside(["layers.store"]):
    pass
"""
    child = pexpect.spawn(
        sys.executable, ["-c", code], env=os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}, timeout=300
    )
    child.expect("compiling 1 CPU kernels, once")
    child.expect("compiling kernels: layers.store.*1/1")
    child.expect(pexpect.EOF)


def test_neighbours_are_compiled_by_one_process_and_each_process_has_as_much_to_do() -> None:
    names = kernel_names(["nibbles", "octets"])
    shares = compiling._shares(names, 2)
    assert [*shares[0], *shares[1]] == names
    seconds = [sum(map(compiling._seconds, share)) for share in shares]
    assert abs(seconds[0] - seconds[1]) <= 3
    assert compiling._shares(["draw.rows"], 4) == [["draw.rows"]]
    assert compiling._shares([], 4) == []


def test_the_processor_is_the_one_that_numba_is_told_of() -> None:
    code = """
from logprobe.kernels.processor import HAS_WIDE_REGISTERS, cpu_features, cpu_name
print(cpu_name(), HAS_WIDE_REGISTERS, *sorted(cpu_features()))
"""
    told = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,-avx512f,+fma"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | told, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["haswell", "False", "avx2", "fma"]


def test_linux_tells_what_llvm_tells_of_the_instructions_that_are_asked_for() -> None:
    flags = processor._facts().get("flags")
    if flags is None:
        pytest.skip("only Linux on x86-64 tells it in this way")
    host = llvm.get_host_cpu_features()
    for name in ("avx2", "avx512f", "f16c", "fma"):
        assert (name in flags.split()) == host.get(name, False), name
