import os
import pkgutil
import subprocess
import sys

import pytest

from logprobe import kernels
from logprobe.kernels import kernel_info
from logprobe.kernels.native import VARIABLE, VARIANTS, Library, library


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


FORCED = """
from logprobe.errors import ParameterError
from logprobe.kernels.info import native_library
try:
    print(native_library().variant)
except ParameterError as error:
    print("refused", error.parameter)
"""


def forced(variant: str) -> str:
    """Return what a process with `LOGPROBE_KERNELS` set to a variant prints."""
    command = [sys.executable, "-c", FORCED]
    environment = os.environ | {VARIABLE: variant}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.strip()


@pytest.mark.parametrize("variant", [*VARIANTS, "v9", "../v3"])
def test_a_variant_by_name_runs_or_is_refused(variant: str) -> None:
    can_run = variant in VARIANTS and Library.path_of(variant).exists() and Library(variant).can_run()
    assert forced(variant) == (variant if can_run else f"refused {VARIABLE}")


def test_an_empty_name_forces_nothing() -> None:
    best = next(name for name in VARIANTS if Library.path_of(name).exists() and Library(name).can_run())
    assert forced("") == best


def test_what_is_built_but_lacks_its_instructions_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(Library, "can_run", lambda self: self.variant == worst)
    worst = [name for name in VARIANTS if Library.path_of(name).exists()][-1]
    assert library.__wrapped__().variant == worst
    monkeypatch.setattr(Library, "can_run", lambda _: False)
    with pytest.raises(OSError, match="runs here"):
        library.__wrapped__()
