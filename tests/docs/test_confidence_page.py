"""The examples of docs/confidence.md, on real weights (a reranker's prompt exceeds the tiny context)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from doc_pages import examples_of, run_examples

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.real_model
def test_the_examples_run_and_say_something(smollm2_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_examples("confidence.md", examples_of("confidence.md"), model=smollm2_folder)
    lines = capsys.readouterr().out.splitlines()
    assert lines[18].split() == ["bin", "sure", "right", "answers"]
    assert "Brier score" in lines[-1]
    assert "Classification" in lines[1]
    assert [line.split()[0] for line in lines[4:6]] == ["/mood", "/stars"]
    assert all("Members" in lines[place] for place in (8, 10))
    assert all(0 <= float(score) <= 1 for score in lines[11].strip("[]").split(", "))
    assert lines[13].startswith("<Uncertainty: ")
    assert all(line.startswith("<SampledAnswer: ") for line in lines[14:16])
    assert 1 <= int(lines[16]) <= 4
    assert lines[17].count("True") + lines[17].count("False") == 4
