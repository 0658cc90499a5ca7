"""Unmodified TRL trainers, in their own environment, against `logprobe serve` with a tiny model.

`pytest -rP` shows the versions and each trainer's results.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from conftest import save_tiny_llama
from server_process import serving_process

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).parent
PYTHON = HERE.parents[1] / ".rivals" / "trl" / "bin" / "python"
KEY = "an-operators-own-key"
PATIENCE_S = 900  # a trainer's imports take as long as an engine's start
# As vLLM must be started for these trainers; a teacher's step may ask for more than 20 alternatives.
FLAGS = ("--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1", "--operator-key", KEY)

pytestmark = pytest.mark.skipif(
    not PYTHON.exists(), reason="trainers have an environment of their own: `make test-trainers` builds it"
)


@pytest.fixture
def url(tiny_model_folder: Path) -> Iterator[str]:
    """A separate server, as its weights change."""
    with serving_process(tiny_model_folder, "--kv-cache-memory-bytes", "4000000", *FLAGS) as server:
        yield f"http://127.0.0.1:{server.port}"


def run(script: str, *arguments: str) -> dict[str, Any]:
    """Run a script in TRL's environment, without this project on its path; return its output line."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    quiet = {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "VLLM_NO_USAGE_STATS": "1"}
    command = [str(PYTHON), str(HERE / f"{script}.py"), *arguments]
    done = subprocess.run(
        command, env=environment | quiet, capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr[-5000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    sys.stdout.write(f"{found}\n")
    return found


def test_a_student_learns_from_a_served_teacher(url: str, tiny_model_folder: Path, tmp_path: Path) -> None:
    student = save_tiny_llama(tmp_path / "student", num_hidden_layers=1)
    found = run("server_distillation_", url, str(student), str(tiny_model_folder), str(tmp_path / "out"))
    assert found["difference"] < 2e-5
    assert abs(found["loss_of_the_teacher"]) < 1e-4, "nothing is left to learn"
    losses = found["losses"]
    assert min(losses) > 1e-3
    assert sum(losses[-3:]) < sum(losses[:3])


def test_a_policy_is_trained_on_what_the_server_samples(
    url: str, tiny_model_folder: Path, tmp_path: Path
) -> None:
    found = run("grpo_", url, KEY, str(tiny_model_folder), str(tmp_path / "out"))
    assert found["weights"] == [f"step-{number}" for number in range(4)]
    assert len(found["gaps"]) == len(found["rewards"]) == 4
    assert max(found["gaps"]) < 1e-3, "each step's tokens are drawn by that step's weights"
