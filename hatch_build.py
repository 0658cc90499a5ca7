"""Compiles the native kernels (docs/kernels.md): a library for each variant of the processor, as part of a build.

`LOGPROBE_TARGET` names another system to compile for, by zig: one of TARGETS.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from subprocess import run
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).parent
FOLDER = ROOT / "src" / "logprobe" / "kernels" / "_native"
FLAGS = ["-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden", "-pthread", "-DNDEBUG"]
VARIANTS = {"x86_64": {"v3": "x86-64-v3", "v4": "x86-64-v4"}, "aarch64": {"neon": "armv8-a"}}
TARGETS = {  # zig's name of a system, and the wheel's
    "linux-x86_64": ("x86_64-linux-gnu.2.28", "manylinux_2_28_x86_64"),
    "linux-aarch64": ("aarch64-linux-gnu.2.28", "manylinux_2_28_aarch64"),
    "macos-arm64": ("aarch64-macos.11.0", "macosx_11_0_arm64"),
    "windows-x86_64": ("x86_64-windows-gnu", "win_amd64"),
}


class NativeKernels(BuildHookInterface):
    """Compiles the libraries into the package before its files are collected."""

    def dependencies(self) -> list[str]:
        """zig's compiler where there is no other, or for another system."""
        return [] if _local_compiler() else ["ziglang>=0.15"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and name the wheel by the system: it holds no code for one Python alone."""
        if self.target_name != "wheel":
            return
        target = os.environ.get("LOGPROBE_TARGET")
        system, tag = TARGETS[target] if target else ("", sysconfig.get_platform().replace("-", "_").replace(".", "_"))
        machine = system.partition("-")[0] or {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())
        compiler = _local_compiler() or [sys.executable, "-m", "ziglang", "c++", *(["-target", system] if system else [])]
        shutil.rmtree(FOLDER, ignore_errors=True)
        FOLDER.mkdir()
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda item: _compile(compiler, *item), VARIANTS.get(machine, {}).items()))
        build_data["tag"] = f"py3-none-{tag}"
        build_data["artifacts"].append("src/logprobe/kernels/_native/*.so")


def _local_compiler() -> list[str] | None:
    if os.environ.get("LOGPROBE_TARGET"):
        return None
    name = os.environ.get("CXX") or next((name for name in ("g++", "c++", "clang++") if shutil.which(name)), None)
    return [name] if name else None


def _compile(compiler: list[str], variant: str, architecture: str) -> None:
    sources = sorted(str(path) for path in (ROOT / "native").glob("*.cpp") if path.name != "cpu.cpp")
    probe = FOLDER / f"cpu_{variant}.o"
    run([*compiler, *FLAGS, f"-DVARIANT={variant.strip('v') if variant != 'neon' else 0}", "-c", str(ROOT / "native" / "cpu.cpp"), "-o", str(probe)], check=True)
    run([*compiler, *FLAGS, f"-march={architecture}", "-shared", *sources, str(probe), "-o", str(FOLDER / f"kernels_{variant}.so")], check=True)
    probe.unlink()
