"""Nothing asks for a notebook's widgets: not what is imported, and not a bar that could not be drawn."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from logprobe.analysis.progress import can_draw

# A kernel as tqdm knows one, without widgets.
IN_A_KERNEL = """
import sys, types, warnings
kernel = types.ModuleType("IPython")
kernel.get_ipython = lambda: types.SimpleNamespace(config={"IPKernelApp": {}})
sys.modules["IPython"] = kernel
sys.modules["ipykernel.zmqshell"] = types.ModuleType("ipykernel.zmqshell")
sys.modules["ipywidgets"] = None
warnings.filterwarnings("always", message="IProgress not found")
from logprobe.models.quiet import quiet_imports, quiet_transformers
if sys.argv[1:]:
    import tqdm.auto
with quiet_transformers():
    pass
print("tqdm.auto" in sys.modules)
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", IN_A_KERNEL, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


def test_transformers_is_imported_in_a_notebook_without_a_warning() -> None:
    done = run()
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
    assert "IProgress not found" in run("without").stderr  # it is this import that warns


@pytest.mark.parametrize(
    ("terminal", "jupyter", "widgets", "draws"),
    [
        (True, False, False, True),
        (False, False, True, False),
        (False, True, False, False),
        (False, True, True, True),
    ],
)
def test_a_bar_is_drawn_where_it_can_be_seen(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, jupyter: bool, widgets: bool, draws: bool
) -> None:
    here: Any = SimpleNamespace(is_terminal=terminal, is_jupyter=jupyter)
    monkeypatch.setattr(
        "logprobe.analysis.progress.find_spec", lambda _: find_spec("rich") if widgets else None
    )
    assert can_draw(here) is draws
    assert not can_draw(Console(force_terminal=False, force_jupyter=False))
