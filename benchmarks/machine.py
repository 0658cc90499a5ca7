"""What a figure depends on: the machine, its load, its memory's speed, the versions and the commit."""

import os
import platform
import subprocess
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def weight_bytes(folder: Path) -> int:
    """Size of a model's weights; a tied output head is stored, and read in a step, once."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def read_bandwidth() -> float:
    """Bytes a second that two threads read from memory: the best of ten sums over half a gigabyte."""
    import torch

    torch.set_num_threads(2)
    values = torch.ones(1 << 27)
    best_s = float("inf")
    for _ in range(10):
        started = time.perf_counter()
        values.sum()
        best_s = min(best_s, time.perf_counter() - started)
    return values.nbytes / best_s


def _cpu_model() -> str:
    """The processor's name, with its widest vectors: a name may stand for several generations."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = facts.get("flags", "").split()
    vectors = next((f" ({flag})" for flag in ("avx512f", "avx2", "avx") if flag in flags), "")
    return facts.get("model name", platform.processor()) + vectors


def machine_facts() -> dict[str, Any]:
    """What a figure depends on: the machine, its load, the versions and the commit."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average": os.getloadavg()[0],
        "commit": commit.stdout.strip() or None,
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("logprobe", "torch", "transformers")},
    }
