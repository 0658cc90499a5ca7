"""`logprobe distil` observed from outside, for a run that is killed and resumed."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1]))

import distil_memory
from distil_memory import Sample, at_shares


def test_each_share_has_its_first_sample_and_the_whole_its_last() -> None:
    seen = [
        Sample(num_rows=rows, seconds=at, num_bytes=at) for at, rows in enumerate([0, 5, 40, 60, 100, 100])
    ]
    assert [sample.seconds for sample in at_shares(seen, 100)] == [1, 2, 3, 5]
    assert [sample.seconds for sample in at_shares(seen[:4], 100)] == [1, 2, 3]


def test_a_killed_run_is_resumed_and_all_rows_are_there(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["distil_memory.py", "--rows", "600", "--kill-at", "0.1", "--json"])
    distil_memory.main()
    measured = json.loads(capsys.readouterr().out)
    assert measured["summary"]["num_rows"] == 600
    killed, resumed = measured["runs"].values()
    assert 0 < killed[0]["num_rows"] <= 600
    assert resumed[-1]["num_rows"] == 600
    assert all(sample["num_bytes"] > 1e7 for sample in resumed)
