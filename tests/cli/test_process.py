"""The installed command in a subprocess: its output streams and exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from server_process import PATIENCE_S


def logprobe(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = Path(sys.executable).with_name("logprobe")
    return subprocess.run(
        [command, *arguments], input=stdin, capture_output=True, check=False, timeout=PATIENCE_S
    )


def test_the_result_is_alone_on_standard_output(tiny_model_folder: Path) -> None:
    model = str(tiny_model_folder)
    done = logprobe("score", "-", "--logprobs", "2", "--json", "--model", model, stdin="the é 🌊".encode())
    assert done.returncode == 0
    assert json.loads(done.stdout)["totals"]["num_bytes"] == len("the é 🌊".encode())
    assert done.stderr.decode() == f"loading {model} …\n"


def test_an_error_is_one_line_without_a_traceback() -> None:
    done = logprobe("score", "--no-such-flag")
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"error: ")
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize(
    ("ending", "code", "err"),
    [("return 3", 3, ""), ("raise ZeroDivisionError('ours')", 1, "ZeroDivisionError: ours")],
)
def test_the_process_ends_with_the_code_after_exit_functions(ending: str, code: int, err: str) -> None:
    source = f"""
import atexit
from logprobe.cli import app

def run():
    atexit.register(print, "closed")
    print("a result", end=" ")
    {ending}

app.run = run
app.command()
"""
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert (done.returncode, done.stdout) == (code, "a result closed\n")
    assert err in done.stderr
