"""The kernels compiled for 64-bit Arm give the bits of x86-64, in an emulator."""

from __future__ import annotations

import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [*sorted((ROOT / "native").glob("*.cpp")), ROOT / "native" / "tests" / "bits.cpp"]
FLAGS = ["-std=c++17", "-O2", "-ffp-contract=off", "-pthread", "-w"]
NEEDED = ("g++", "aarch64-linux-gnu-g++", "qemu-aarch64-static")


def compiled(folder: Path, compiler: str, *options: str) -> Path:
    """Compile the program that runs every kernel and prints digests."""
    folder.mkdir()

    def compile_one(source: Path) -> None:
        command = [compiler, *FLAGS, *options, "-c", source, "-o", folder / f"{source.stem}.o"]
        subprocess.run(command, check=True)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compile_one, SOURCES))
    program = folder / "bits"
    subprocess.run([compiler, "-static", "-pthread", *folder.glob("*.o"), "-o", program], check=True)
    return program


def lines(*command: str | Path) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    return done.stdout.splitlines()


def test_every_kernel_has_the_bits_of_x86_64(tmp_path: Path) -> None:
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing or platform.machine() != "x86_64":
        pytest.skip(f"needs x86-64 and {', '.join(missing)}; as root: make test-aarch64 installs them")
    want = lines(compiled(tmp_path / "v3", "g++", "-march=x86-64-v3"))
    got = lines("qemu-aarch64-static", compiled(tmp_path / "neon", "aarch64-linux-gnu-g++"))
    assert len(want) > 200
    assert got == want
