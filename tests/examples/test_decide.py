"""Decisions from labels on real weights: sure answers are accepted, the rest goes to a person."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from logprobe.analysis import Classification

if TYPE_CHECKING:
    from logprobe import LLM

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def decide(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("decide")


def found(*logprobs: float) -> Classification:
    numbers = np.array(logprobs)
    return Classification((" positive", " negative"), numbers, numbers)


def test_a_label_is_taken_where_it_is_sure_and_the_model_would_say_it(decide: Any) -> None:
    sure, unsure, astray = found(-0.1, -3.0), found(-1.0, -1.1), found(-9.0, -20.0)
    assert decide.decision(sure, 0.9) == "positive"
    assert decide.decision(unsure, 0.9) is None
    assert decide.decision(unsure, 0.5) == "positive"
    assert decide.decision(astray, 0.9) is None  # sure among the labels, but the model would say neither
    assert decide.decision(sure, None) is None


@pytest.mark.real_model
def test_it_runs_by_hand_and_beats_a_guess(
    decide: Any,
    real_llm: LLM,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(decide, "LLM", lambda _: real_llm)
    monkeypatch.setattr(type(real_llm), "__exit__", lambda *_: None)  # the session's model stays open
    picture = tmp_path / "sure.png"
    monkeypatch.setattr(sys, "argv", ["decide.py", "--plot", str(picture)])
    decide.main()
    lines = capsys.readouterr().out.splitlines()
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert lines[0].split() == ["bin", "sure", "right", "answers"]
    table = lines[1 : next(place for place, line in enumerate(lines) if "Brier" in line)]
    assert sum(int(line.split()[-1]) for line in table) == len(decide.REVIEWS) == 32
    rights = sum(float(line.split()[-2]) * int(line.split()[-1]) for line in table)
    assert rights > 24.5  # 25 or more; guessing gets there once in a thousand times
    half = len(decide.REVIEWS) // 2
    decisions = lines[-half - 1 : -1]
    certainties = [float(line[14:19]) for line in decisions]
    taken = [sure for line, sure in zip(decisions, certainties, strict=True) if not line.startswith("ask")]
    left = [sure for line, sure in zip(decisions, certainties, strict=True) if line.startswith("ask")]
    assert min(taken, default=1) >= max(left, default=0)
    assert lines[-1].startswith(f"of the other {half}: taken {len(taken)}, of them right ")
