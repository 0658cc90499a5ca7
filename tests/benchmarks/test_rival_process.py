import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import process
import psutil
import pytest
from process import Rival, RivalError, RivalProcess

from server_process import PATIENCE_S, eventually

ECHO = """
import os, subprocess, sys, time
from protocol import serve

class Echo:
    def __init__(self, job):
        self.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print("chatter on stdout")
    def use(self, variant):
        self.variant = variant
    def decode(self, prompts, new_tokens, logprobs):
        if logprobs == 13:
            time.sleep(600)
        if logprobs == 14:
            os._exit(3)
        rows = [[self.child.pid] * new_tokens for _ in prompts]
        return lambda: rows if logprobs != 12 else rows[1:]

serve(Echo, packages=("pip",))
"""

RUN = """
import sys, time
from pathlib import Path
import harness, process

folder = Path(sys.argv[1])
process.SCRIPTS = folder
environment = {"PYTHONPATH": sys.argv[2]}
harness.RIVALS = {"echo": process.Rival(name="echo", python=Path(sys.executable), environment=environment)}
options = harness.Options(is_smoke=True, is_json=False, rounds=1, model=str(folder), rivals=("echo",))
with harness.Arena(options) as arena:
    asked = {"prompts": [[1]], "new_tokens": 1, "logprobs": 0}
    print(arena.ask(("echo", "best"), "decode", [asked])["output"][0][0], flush=True)
    time.sleep(600)
"""

StartRival = Callable[[], RivalProcess]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StartRival:
    monkeypatch.setattr(process, "SCRIPTS", tmp_path)
    (tmp_path / "echo_.py").write_text(ECHO)
    scripts = str(Path(process.__file__).parent)
    rival = Rival(name="echo", python=Path(sys.executable), environment={"PYTHONPATH": scripts})
    return lambda: RivalProcess(rival, log_folder=tmp_path)


def job(logprobs: int = 0, *, calls: int = 1, warm_up: int = 0) -> dict[str, object]:
    asked = {"prompts": [[1, 2], [3]], "new_tokens": 2, "logprobs": logprobs}
    return {
        "verb": "decode",
        "variant": "best",
        "model_folder": "",
        "inputs": [asked] * calls,
        "warm_up": warm_up,
    }


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}
    except psutil.NoSuchProcess:
        return False


def await_end(pid: int) -> None:
    """Wait until a signalled process has ended, which takes until it gets a core."""
    eventually(lambda: not is_alive(pid), "it lives on")


def test_a_job_gives_one_timing_a_call_without_the_warm_up(start: StartRival) -> None:
    with start() as rival:
        rival.ask(job())  # includes its start
        began = time.perf_counter()
        result = rival.ask(job(calls=3, warm_up=1))
        whole_s = time.perf_counter() - began
    assert len(result["timings_s"]) == 2
    assert all(seconds > 0 for seconds in result["timings_s"])
    assert sum(result["timings_s"]) < whole_s
    assert len(result["output"]) == 2
    assert set(result["versions"]) == {"pip"}


def test_a_job_that_gives_too_little_is_an_error_and_the_next_one_works(start: StartRival) -> None:
    with start() as rival:
        with pytest.raises(RivalError, match="fewer results"):
            rival.ask(job(12))
        assert rival.ask(job())["ok"]


def test_closing_ends_the_rivals_children_too(start: StartRival) -> None:
    with start() as rival:
        child = rival.ask(job())["output"][0][0]
        assert is_alive(child)
    await_end(child)


def test_a_run_that_is_told_to_end_ends_its_rivals(tmp_path: Path) -> None:
    (tmp_path / "echo_.py").write_text(ECHO)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    scripts = Path(process.__file__).parent
    with subprocess.Popen(
        [sys.executable, "-c", RUN, str(tmp_path), str(scripts)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (scripts.parent, scripts)))},
    ) as run:
        assert run.stdout is not None
        child = int(run.stdout.readline())
        assert is_alive(child)
        run.terminate()
        assert run.wait(timeout=PATIENCE_S) == 128 + signal.SIGTERM
    await_end(child)


def test_no_answer_in_time_is_an_error_that_ends_the_rival(start: StartRival) -> None:
    rival = start()
    child = rival.ask(job())["output"][0][0]
    with pytest.raises(RivalError, match="gave no answer"):
        rival.ask(job(13), timeout_s=0.2)
    await_end(child)


def test_a_rival_that_dies_is_an_error_naming_its_exit_code(start: StartRival) -> None:
    with start() as rival, pytest.raises(RivalError, match="ended with code 3"):
        rival.ask(job(14))


def test_a_rival_without_an_environment_names_the_remedy() -> None:
    with pytest.raises(RivalError, match="make rivals"):
        RivalProcess(Rival(name="absent", python=Path(os.devnull) / "python"))
