"""Compiles the native kernels (docs/kernels.md) as part of a build: a library for each kind of processor.

The machine's C++ compiler is used, or zig's from PyPI where there is none. `LOGPROBE_TARGET` names another
system to compile for, by zig: one of TARGETS.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path(__file__).parent / "native"
FOLDER = Path(__file__).parent / "src" / "logprobe" / "kernels" / "_native"
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden", "-pthread", "-DNDEBUG")
VARIANTS = {"x86_64": {"v3": "x86-64-v3", "v4": "x86-64-v4"}, "aarch64": {"neon": "armv8-a"}}
NAMES = {"AMD64": "x86_64", "arm64": "aarch64"}  # of machines, as some systems have them
TARGETS = {  # zig's name of a system, and the wheel's
    "linux-x86_64": ("x86_64-linux-gnu.2.28", "manylinux_2_28_x86_64"),
    "linux-aarch64": ("aarch64-linux-gnu.2.28", "manylinux_2_28_aarch64"),
    "macos-arm64": ("aarch64-macos.11.0", "macosx_11_0_arm64"),
    "windows-x86_64": ("x86_64-windows-gnu", "win_amd64"),
}


class NativeKernels(BuildHookInterface):  # type: ignore[type-arg]
    """Compiles the libraries into the package before its files are collected."""

    def dependencies(self) -> list[str]:
        """Name zig's compiler where no other is found."""
        return [] if local_compiler() else ["ziglang>=0.15"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 - hatchling's
        """Compile, and name the wheel by its system: the libraries are for any Python."""
        target = os.environ.get("LOGPROBE_TARGET", "")
        system, tag = TARGETS[target] if target else ("", sysconfig.get_platform())
        machine = system.partition("-")[0] or NAMES.get(platform.machine(), platform.machine())
        zig = [sys.executable, "-m", "ziglang", "c++", *(["-target", system] if system else [])]
        shutil.rmtree(FOLDER, ignore_errors=True)
        FOLDER.mkdir()
        with ThreadPoolExecutor() as pool:
            futures = [
                pool.submit(compile_variant, local_compiler() or zig, variant, architecture)
                for variant, architecture in VARIANTS.get(machine, {}).items()
            ]
        for future in futures:
            future.result()
        build_data["tag"] = f"py3-none-{tag.replace('-', '_').replace('.', '_')}"
        build_data["artifacts"].append("src/logprobe/kernels/_native/*.so")


def local_compiler() -> list[str] | None:
    """Find the machine's C++ compiler; None for another system."""
    names = [os.environ.get("CXX", ""), "g++", "clang++", "c++"]
    found = [path for name in names if name and (path := shutil.which(name))]
    return found[:1] if found and "LOGPROBE_TARGET" not in os.environ else None


def compile_variant(compiler: list[str], variant: str, architecture: str) -> None:
    """Compile one library; what tells whether a processor can run it is code for all of them."""
    sources = [path for path in sorted(NATIVE.glob("*.cpp")) if path.name != "cpu.cpp"]
    probe, library = FOLDER / f"cpu_{variant}.o", FOLDER / f"kernels_{variant}.so"
    probing = (
        f"-DVARIANT={variant[1:] if variant[1:].isdigit() else 0}",
        "-c",
        NATIVE / "cpu.cpp",
        "-o",
        probe,
    )
    subprocess.run([*compiler, *FLAGS, *probing], check=True)  # noqa: S603 - the compiler
    linking = (f"-march={architecture}", "-shared", *sources, probe, "-o", library)
    subprocess.run([*compiler, *FLAGS, *linking], check=True)  # noqa: S603
    probe.unlink()
