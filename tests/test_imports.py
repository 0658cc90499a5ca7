"""Imports stay light: `import logprobe` and the commands' help load no framework."""

from __future__ import annotations

import subprocess
import sys

import pytest


def test_a_free_threaded_python_is_refused_with_the_remedy() -> None:
    code = "import sys; sys.version = '3.14.0 free-threading build (main)'; import logprobe"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ImportError: logprobe does not support free-threaded builds" in done.stderr


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("logprobe", ["torch", "transformers", "tokenizers", "pyarrow", "numpy", "rich"]),
        ("logprobe.records", ["torch", "transformers", "pyarrow"]),
        ("logprobe.cli", ["torch", "transformers", "pyarrow"]),
        ("logprobe.engine.forward.reference", ["torch", "transformers"]),
    ],
)
def test_a_light_module_loads_nothing_heavy(module: str, heavy: list[str]) -> None:
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
