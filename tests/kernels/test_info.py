import os
import pkgutil
import subprocess
import sys

import pytest

from logprobe import kernels
from logprobe.kernels import kernel_info, warm_up
from logprobe.kernels.threads import parallel


def test_the_cpu_is_served_by_numba() -> None:
    assert kernel_info()["cpu"] == "numba"
    assert kernel_info()["cuda"] in {"triton", "torch"}


def test_a_second_warm_up_finds_all_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("a kernel was compiled or loaded again")

    first = warm_up()
    monkeypatch.setattr(parallel, "linked", never)
    assert warm_up().is_from_cache == first.is_from_cache


def test_another_process_loads_every_kernel_from_disk() -> None:
    warm_up()
    code = "from logprobe.kernels import warm_up; print(warm_up().is_from_cache)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


def test_no_module_takes_the_place_of_a_public_function() -> None:
    for module in pkgutil.iter_modules(kernels.__path__):
        assert module.name not in kernels.__all__


def test_importing_the_package_loads_neither_torch_nor_numba() -> None:
    code = "import sys, logprobe.kernels; print(sorted({'torch', 'numba', 'triton'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert done.stdout.strip() == "[]"
