"""Peak rate of float32 multiply-adds of this machine, in registers, on all threads."""

import functools
import subprocess
import tempfile
from pathlib import Path

from logprobe.kernels.threads import num_threads

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-pthread", "-w")


def multiply_adds_per_s() -> float:
    """Return the peak rate per second: the best of some runs of milliseconds."""
    command = [Path(program().name) / "peak", str(num_threads()), "0.5"]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@functools.cache
def program() -> tempfile.TemporaryDirectory:
    """Compile peak.cpp; return the folder of the program, which is removed at exit."""
    folder = tempfile.TemporaryDirectory()
    subprocess.run(["g++", *FLAGS, SOURCE, "-o", Path(folder.name) / "peak"], check=True)
    return folder
