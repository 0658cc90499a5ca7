import importlib
import json
import runpy
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import harness
import protocol
import pytest
import torch
from safetensors.torch import load_file, save_file

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
# Each benchmark that exists is run, so each is tested from the commit that adds it. `test_gpu.py` runs
# bench_gpu.py.
SCRIPTS = sorted(set(BENCHMARKS.glob("bench_*.py")) - {BENCHMARKS / "bench_gpu.py"})
CONTEXT_LEN = 1024
IN_PROCESSES_OF_THEIR_OWN = {"bench_decode", "bench_real"}


class InThisProcess:
    """Run a rival's jobs in this process, as starting processes would take most of a smoke run; uses JSON."""

    def __init__(self, rival: Any, **_: Any) -> None:
        self.started = time.perf_counter()
        self._open = importlib.import_module(rival.script.stem).open_front_door
        self._opened: Any = None

    def ask(self, job: Any) -> Any:
        job = json.loads(json.dumps(job))
        self._opened = self._opened or self._open(job)
        self._opened.use(job["variant"])
        return json.loads(json.dumps(protocol._run_job(self._opened, job)))

    def pause(self) -> None:
        """Do nothing: there is no process to pause."""

    resume = pause

    def close(self) -> None:
        self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@pytest.fixture(scope="module")
def model_folder(tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with a context long enough for the prompts of the smoke runs."""
    folder = tmp_path_factory.mktemp("benchmarks") / "tiny"
    shutil.copytree(tiny_model_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT_LEN}))
    return folder


@pytest.fixture
def as_a_program() -> Iterator[None]:
    """Restore the process-wide settings that a script may change."""
    num_threads, on_term = torch.get_num_threads(), signal.getsignal(signal.SIGTERM)
    yield
    torch.set_num_threads(num_threads)
    signal.signal(signal.SIGTERM, on_term)


@pytest.mark.usefixtures("as_a_program")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_the_benchmark_runs_in_its_smoke_form_and_prints_json(
    script: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if script.stem not in IN_PROCESSES_OF_THEIR_OWN:
        monkeypatch.setattr(harness, "RivalProcess", InThisProcess)
        monkeypatch.setattr("process.RivalProcess", InThisProcess)
    monkeypatch.setattr(sys, "argv", [str(script), "--smoke", "--json", "--model", str(model_folder)])
    runpy.run_path(str(script), run_name="__main__")
    measured = json.loads(capsys.readouterr().out)
    assert measured["figures"]


@pytest.mark.usefixtures("as_a_program")
@pytest.mark.parametrize("bench", ["bench_decode", "bench_score"])
def test_with_bfloat16_our_further_arithmetic_takes_part(
    bench: str,
    model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "bfloat16"
    shutil.copytree(model_folder, folder)
    weights = load_file(folder / "model.safetensors")
    rounded = {name: one.bfloat16() for name, one in weights.items()}
    save_file(rounded, folder / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setattr(harness, "RivalProcess", InThisProcess)
    script = str(BENCHMARKS / f"{bench}.py")
    monkeypatch.setattr(sys, "argv", [script, "--smoke", "--bfloat16", "--json", "--model", str(folder)])
    runpy.run_path(script, run_name="__main__")
    first, second, *_ = json.loads(capsys.readouterr().out)["figures"]
    ours = {"logprobe", "logprobe bf16x3"}
    assert ours <= first["samples"].keys()
    assert ours <= second["samples"].keys()
    if bench == "bench_score":
        assert second["unit"] == "nats"
        [fma], [bf16x3] = (second["samples"][name] for name in sorted(ours))
        assert fma != bf16x3
        assert 0 < min(fma, bf16x3) <= max(fma, bf16x3) < 1e-4
