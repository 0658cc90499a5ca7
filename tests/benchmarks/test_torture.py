"""What the torture benchmark records for a layout."""

import json
import shutil
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "torture"))

import torture


def test_what_became_of_a_layout_is_kept_as_json() -> None:
    ended, faults = Counter(result=7, left=2), Counter(killed=1)
    tally = torture.Tally("one process", True, 3.75, ended, faults, replayed=5, numbers=100)
    kept = json.loads(json.dumps(torture.as_content(tally)))
    assert (kept["sent"], kept["ended"], kept["faults"]) == (9, {"result": 7, "left": 2}, {"killed": 1})
    assert (kept["layout"], kept["numbers"], kept["differing"]) == ("one process", 100, 0)
    assert "9 sent in 3.8 min (2 left, 7 result; 1 killed)" in torture.as_line(tally)


def test_only_a_whole_run_without_losses_is_well() -> None:
    assert torture.Tally("one process", True, 1.0, Counter(result=7)).is_well
    for ended in (Counter(lost=1), Counter(wrong=1)):
        assert not torture.Tally("one process", True, 1.0, ended).is_well
    assert not torture.Tally("one process", True, 1.0, differing=1).is_well
    assert torture.Tally("vLLM", False, 1.0, differing=1).is_well
    assert not torture.Tally("vLLM", False, 1.0, left_behind={"slots": 1}).is_well


@pytest.mark.parametrize("kind", ["kill_without_temporary", "kill_beside_other_weights"])
def test_faults_bring_back_what_they_take_away(
    kind: str, tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(tiny_model_folder, tmp_path / "model"))
    files = torture.Files.of(folder, tmp_path)
    before = files.weights.read_bytes()
    (files.temporary / "kept").write_text("kept")
    seen = []

    def sleep(_: float) -> None:
        seen.append((files.weights.read_bytes() == before, files.temporary.exists()))

    monkeypatch.setattr(torture.time, "sleep", sleep)
    server: Any = None
    faults = torture.Faults(server, files, 1, threading.Event(), is_harmed=True)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        getattr(faults, kind)(psutil.Process(process.pid))
    assert process.returncode < 0
    assert seen == [(kind == "kill_without_temporary", kind != "kill_without_temporary")]
    assert files.weights.read_bytes() == before
    assert (files.temporary / "kept").read_text() == "kept"
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        path.name for path in tiny_model_folder.iterdir()
    )
