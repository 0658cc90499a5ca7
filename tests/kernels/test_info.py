import os
import pkgutil
import subprocess
import sys

from logprobe import kernels
from logprobe.kernels import kernel_info


def test_the_cpu_is_served_by_the_native_library() -> None:
    assert kernel_info()["cpu"] == "native"
    assert kernel_info()["cuda"] in {"triton", "torch"}


def test_no_module_takes_the_place_of_a_public_function() -> None:
    for module in pkgutil.iter_modules(kernels.__path__):
        assert module.name not in kernels.__all__


def test_importing_the_package_does_not_load_torch() -> None:
    code = "import sys, logprobe.kernels; print(sorted({'torch', 'triton'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert done.stdout.strip() == "[]"
