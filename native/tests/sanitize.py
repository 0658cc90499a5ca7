"""Build the native library with sanitizers and run the kernel tests on it: `make test-sanitize`.

AddressSanitizer and UndefinedBehaviorSanitizer check each variant that this processor can run: the widest
with all kernel tests, the others with tests/kernels/test_properties.py. ThreadSanitizer checks the thread
pool alone (threads.cpp). A sanitizer's report ends its run of pytest with an error. The library is built into
a copy of the package, which the tests import; Python and torch are not instrumented.

Arguments: tests to run instead of the default ones.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
COMPILER = os.environ.get("CXX", "g++")  # GCC, because its run-time libraries can be preloaded
FLAGS = (
    "-std=c++17 -g -w -fPIC -fvisibility=hidden -ffp-contract=off -pthread -fno-sanitize-recover=undefined"
)
VARIANTS = {"x86_64": {"v3": "x86-64-v3", "v4": "x86-64-v4"}, "aarch64": {"neon": "armv8-a"}}
LONG = "not 50272 and not 262144 and not peak_memory and not many_draws and not normaliser_is_off"
LONG += " and not sanitizer and not triton"  # the thread pool has its own program; Triton is no native code
OTHERS = ("tests/kernels/test_properties.py",)  # for narrower variants: all kinds of shapes and values


@dataclass(frozen=True)
class Build:
    """A sanitizer and the tests that run with it."""

    sanitizer: str
    optimisation: str  # GCC takes ten times as long for undefined behaviour at -O1
    library: str  # to preload
    options: dict[str, str]  # of the environment
    tests: tuple[str, ...]
    chosen: str  # pytest's -k: no long rows, which add time alone


BUILDS = (
    Build(
        "address,undefined", "-O0", "libasan.so", {"ASAN_OPTIONS": "detect_leaks=0"}, ("tests/kernels",), LONG
    ),
)


def build(folder: Path, kind: Build, variant: str) -> None:
    """Compile one library."""
    architecture = VARIANTS[platform.machine()][variant]
    sources = [path for path in sorted((ROOT / "native").glob("*.cpp")) if path.name != "cpu.cpp"]
    probe = folder / f"cpu_{variant}.o"
    command = [COMPILER, *FLAGS.split(), kind.optimisation]
    call([*command, f"-DVARIANT_{variant}", "-c", ROOT / "native/cpu.cpp", "-o", probe])
    command += [f"-fsanitize={kind.sanitizer}", f"-march={architecture}", "-shared", *map(str, sources)]
    call([*command, probe, "-o", folder / f"kernels_{variant}.so"])


def call(command: list[Any]) -> str:
    """Run a command that must succeed; return its output."""
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout  # noqa: S603


def run_tests(package: Path, kind: Build, variant: str) -> int:
    """Run pytest with one library; return its exit status."""
    # libstdc++ must be loaded when the sanitizer starts, so that it can intercept exceptions.
    preloaded = [
        call([COMPILER, f"-print-file-name={name}"]).strip() for name in (kind.library, "libstdc++.so")
    ]
    environment = {"LD_PRELOAD": " ".join(preloaded), "LOGPROBE_KERNELS": variant, "PYTHONPATH": str(package)}
    is_widest = variant == runnable(VARIANTS[platform.machine()])[-1]
    tests = sys.argv[1:] or (kind.tests if is_widest else OTHERS)
    chosen = ["-m", "not real_model and not gpu", "-k", kind.chosen, *tests]
    return run_pytest(chosen, **environment, **kind.options)


def run_pytest(arguments: list[str], **environment: str) -> int:
    """Run some tests; return pytest's exit status."""
    # Do not capture output: a report that ends the process would be lost.
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "--capture=no",
        "-p",
        "no:cacheprovider",
        *arguments,
    ]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, check=False).returncode  # noqa: S603


def runnable(variants: dict[str, str]) -> list[str]:
    """Return the variants that this processor can run."""
    from logprobe.kernels.native import Library

    return [name for name in variants if Library.path_of(name).exists() and Library(name).can_run()]


def main() -> int:
    """Build and run all; return 1 if a run failed."""
    variants = runnable(VARIANTS[platform.machine()])
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(os.cpu_count()) as pool:
        runs = {}
        for kind in BUILDS:
            package = Path(name) / kind.sanitizer.replace(",", "_")
            ignored = shutil.ignore_patterns("*.so", "__pycache__")
            shutil.copytree(ROOT / "src" / "logprobe", package / "logprobe", ignore=ignored)
            for variant in variants:
                runs[f"{kind.sanitizer} {variant}"] = pool.submit(build_and_run, package, kind, variant)
        runs["thread pool"] = pool.submit(run_pytest, ["-k", "sanitizer", "tests/kernels/test_threads.py"])
        failed = [title for title, future in runs.items() if future.result() != 0]
    return 1 if failed else 0


def build_and_run(package: Path, kind: Build, variant: str) -> int:
    """Compile a library into a copy of the package and test it there."""
    build(package / "logprobe" / "kernels" / "_native", kind, variant)
    return run_tests(package, kind, variant)


if __name__ == "__main__":
    sys.exit(main())
