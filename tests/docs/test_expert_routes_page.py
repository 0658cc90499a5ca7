"""The examples of docs/expert-routes.md run on a mixture of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from doc_pages import examples_of, run_examples

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

PAGE = "expert-routes.md"
MODEL = "allenai/OLMoE-1B-7B-0924"


def test_the_examples_run(mixture_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    examples = [example.replace(MODEL, str(mixture_folder)) for example in examples_of(PAGE)]
    assert MODEL not in "".join(examples)
    run_examples(PAGE, examples, model=mixture_folder)
    assert (tmp_path / "routes.safetensors").exists()
