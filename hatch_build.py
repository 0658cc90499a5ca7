"""Build hooks: compile the native kernels (docs/dev/kernels.md), and adapt README.md for package indexes.

The machine's C++ compiler (or the one in `CXX`) is used, or zig's from PyPI where there is none.
`LOGPROBE_TARGET` is the platform tag of a wheel to compile for by zig: one of TARGETS.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

README = Path(__file__).parent / "README.md"
NATIVE = Path(__file__).parent / "native"
FOLDER = Path(__file__).parent / "src" / "logprobe" / "kernels" / "_native"
FLAGS = ["-std=c++17", "-O3", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden", "-pthread", "-DNDEBUG"]
VARIANTS = {"x86_64": {"v4": "x86-64-v4", "v3": "x86-64-v3"}, "aarch64": {"neon": ""}}
MACHINES = {"AMD64": "x86_64", "arm64": "aarch64"}  # names that some systems have for these
SYSTEMS = {"linux": "linux-gnu.2.28", "darwin": "macos.11.0", "win32": "windows-gnu"}  # as zig calls them
ZIG = "ziglang>=0.15"
CFFI = "cffi>=1.17"
TARGETS = {
    "manylinux_2_28_x86_64": "x86_64-linux-gnu.2.28",
    "manylinux_2_28_aarch64": "aarch64-linux-gnu.2.28",
    "macosx_11_0_arm64": "aarch64-macos.11.0",
    "win_amd64": "x86_64-windows-gnu",
}


class PackageReadme(MetadataHookInterface):
    """Sets README.md as the description of the package."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Replace relative links, which an index cannot follow, by the paths of the files."""
        text = re.sub(r"\[([^\]]+)\]\((?![a-z]+:|#)([^)#]+)[^)]*\)", r"\1 (`\2`)", README.read_text("utf-8"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


class NativeKernels(BuildHookInterface):  # type: ignore[type-arg]
    """Compiles the libraries into the package before its files are collected."""

    def dependencies(self) -> list[str]:
        """Require cffi, and zig where no other compiler is found."""
        return [CFFI] if local_compiler() else [CFFI, ZIG]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile what has changed, and name the wheel by its system: the libraries are for any Python."""
        target = os.environ.get("LOGPROBE_TARGET")
        if target and target not in TARGETS:
            raise ValueError(f"LOGPROBE_TARGET: must be one of {', '.join(TARGETS)}, got {target!r}")
        machine = MACHINES.get(platform.machine(), platform.machine())
        system = TARGETS[target] if target else f"{machine}-{SYSTEMS.get(sys.platform, sys.platform)}"
        compiler = local_compiler() or [sys.executable, "-m", "ziglang", "c++", "-target", system]
        sources = [Path(__file__), *sorted(NATIVE.glob("*.*"))]
        key = hashlib.sha256(" ".join(local_compiler() or [system]).encode())
        for path in sources:
            key.update(path.read_bytes())
        stamp = FOLDER / "sources.sha256"
        if not stamp.exists() or stamp.read_text() != key.hexdigest():
            with tempfile.TemporaryDirectory() as folder:
                new = Path(folder)
                compile_variants(compiler, VARIANTS.get(system.partition("-")[0], {}), new)
                write_declarations(new / "declarations.py")
                stamp.unlink(missing_ok=True)
                replace_files(FOLDER, new)
            stamp.write_text(key.hexdigest())
        own = f"macosx_11_0_{platform.machine()}" if sys.platform == "darwin" else sysconfig.get_platform()
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{target or own.replace('-', '_').replace('.', '_')}"
        build_data["artifacts"].append("src/logprobe/kernels/_native/*")
        if version == "standard":
            self._folder = tempfile.TemporaryDirectory()  # removed by `finalize`
            file = Path(self._folder.name) / "logprobe-native.cdx.json"
            file.write_text(sbom(self.metadata.version, system if "ziglang" in compiler else None), "utf-8")
            build_data.setdefault("sbom_files", []).append(str(file))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        """Remove the SBOM, which the wheel has now."""
        if version == "standard":
            self._folder.cleanup()


def local_compiler() -> list[str] | None:
    """Find the machine's C++ compiler; None for another system."""
    # On Windows, libraries of a g++ on the path need its DLLs, and a clang++ may lack MinGW's headers.
    commands = [["g++"], ["clang++"], ["c++"]] if sys.platform != "win32" else []
    commands.insert(0, shlex.split(os.environ.get("CXX", "")))
    found = [command for command in commands if command and shutil.which(command[0])]
    return found[0] if found and not os.environ.get("LOGPROBE_TARGET") else None


def sbom(version: str, zig_target: str | None) -> str:
    """Return a CycloneDX list of the third-party code in the native libraries: zig's runtime, or nothing.

    THIRD_PARTY_NOTICES.md states the licences. Other compilers link their runtime dynamically.
    """
    parts = [] if zig_target is None else ["libc++", "libc++abi", "libunwind", "compiler-rt", "zig"]
    if zig_target is not None and "windows" in zig_target:
        parts.append("mingw-w64")
    licences = {"zig": "MIT", "mingw-w64": "ZPL-2.1"}
    components = [
        {
            "type": "library",
            "bom-ref": name,
            "name": name,
            "version": f"of ziglang {version_of('ziglang')}",
            "licenses": [{"expression": licences.get(name, "Apache-2.0 WITH LLVM-exception")}],
        }
        for name in parts
    ]
    own: dict[str, Any] = {"type": "library", "bom-ref": "logprobe", "name": "logprobe", "version": version}
    own["licenses"] = [{"expression": "Apache-2.0"}]
    bom = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": own},
        "components": components,
        "dependencies": [{"ref": "logprobe", "dependsOn": parts}],
    }
    return json.dumps(bom, indent=2) + "\n"


def compile_variants(compiler: list[str], variants: dict[str, str], target_folder: Path) -> None:
    """Compile every source for every kind of processor, side by side, and link each kind's library."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = {variant: Path(folder) / variant for variant in variants}
        jobs = []
        is_zig = "ziglang" in compiler  # which writes processors' names its own way
        link = [*compiler, *FLAGS, "-shared"]
        if is_zig:  # without the symbols of its C++ library; a profiler needs those of a local build
            link.append("-s")
        if "macos" in compiler[-1]:  # or else the name would be the path of this folder
            link.append("-Wl,-install_name,kernels.so")
        if is_zig:  # zig builds its C++ library for the first link, on one core in 40 s: start with that
            jobs.append(pool.submit(run, [*link, NATIVE / "cpu.cpp", "-o", Path(folder) / "first.so"]))
        for source in sorted(NATIVE.glob("*.cpp"), key=lambda path: -path.stat().st_size):
            for variant, name in variants.items():
                processor = name.replace("-", "_") if is_zig else name
                objects[variant].mkdir(exist_ok=True)
                # What tells whether a processor can run the variant is code for all of them.
                flags = [f"-march={processor}"] if processor and source.name != "cpu.cpp" else []
                target = objects[variant] / f"{source.stem}.o"
                flags.append(f"-DVARIANT_{variant}")
                jobs.append(pool.submit(run, [*compiler, *FLAGS, "-w", *flags, "-c", source, "-o", target]))
        for job in jobs:
            job.result()
        for variant in variants:  # for any processor, so that zig builds its C++ library once
            library = Path(folder) / f"kernels_{variant}.so"  # zig puts an import library beside it
            run([*link, *sorted(objects[variant].iterdir()), "-o", library])
            shutil.move(library, target_folder)


def replace_files(folder: Path, new: Path) -> None:
    """Replace the files of `folder` by those of `new`; programs that have loaded the old ones keep them."""
    folder.mkdir(exist_ok=True)
    names = {path.name for path in new.iterdir()}
    for name in names:
        copy = folder / f"{name}.new"
        shutil.copy(new / name, copy)
        copy.replace(folder / name)
    for path in folder.iterdir():
        if path.name not in names and path.is_file():
            path.unlink()


def write_declarations(path: Path) -> None:
    """Write kernels.h as a Python module for cffi, which would take 50 ms to parse it when it is loaded."""
    from cffi import FFI

    header = (NATIVE / "kernels.h").read_text("utf-8")
    ffi: Any = FFI()
    ffi.set_source("declarations", None)
    ffi.cdef("".join(line for line in header.splitlines(keepends=True) if not line.startswith("#")))
    ffi.emit_python_code(str(path))


def run(command: list[Any]) -> None:
    """Run the compiler; raises a RuntimeError that says what to do."""
    if "ziglang" in command and importlib.util.find_spec("ziglang") is None:
        raise RuntimeError(f"no C++ compiler: install g++ or clang++, or `pip install '{ZIG}'`")
    done = subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603 - the compiler
    if done.returncode:
        words = " ".join(map(str, command))
        raise RuntimeError(
            f"the native kernels do not compile: `{words}` gave {done.returncode}; set CXX to another C++17 "
            f"compiler, or LOGPROBE_TARGET to one of {', '.join(TARGETS)} for zig's\n{done.stderr[-4000:]}"
        )
