import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
# Only what is there is run: each benchmark is tested from the commit that adds it.
SCRIPTS = sorted(BENCHMARKS.glob("bench_*.py"))


@pytest.mark.real_model
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_the_benchmark_runs_in_its_smoke_form_and_prints_json(script: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(script), "--smoke", "--json"],
        capture_output=True,
        text=True,
        timeout=900,  # a hang, not slowness
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)
