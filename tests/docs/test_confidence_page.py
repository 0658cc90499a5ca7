"""The examples of docs/confidence.md, on real weights (a reranker's prompt exceeds the tiny context)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from doc_pages import examples_of, run_examples

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.real_model
def test_the_examples_run(
    smollm2_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    run_examples("confidence.md", examples_of("confidence.md"), model=smollm2_folder)
    assert capsys.readouterr().out
