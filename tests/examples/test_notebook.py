"""The example notebook is stored with the outputs of its current cells, and its cells run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import logprobe

NOTEBOOK = Path(__file__).parents[2] / "examples/surprisal.ipynb"
CELLS = [
    cell for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"
]


def source_of(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def shown(cell: dict[str, Any]) -> set[str]:
    """Return the MIME types of a cell's outputs."""
    return {kind for output in cell["outputs"] for kind in output.get("data", {})}


def test_it_was_run_from_top_to_bottom_without_errors_or_talk() -> None:
    assert [cell["execution_count"] for cell in CELLS] == list(range(1, len(CELLS) + 1))
    kinds = {output["output_type"] for cell in CELLS for output in cell["outputs"]}
    assert kinds == {"execute_result"}  # no stream (progress bar, warning) and no error


def test_it_shows_texts_a_picture_and_tables() -> None:
    by_source = {source_of(cell).splitlines()[-1]: shown(cell) for cell in CELLS}
    assert "text/html" in by_source["score"]
    assert "text/html" in by_source["output"]
    assert "image/png" in by_source["score.record.plot()"]
    assert sum("text/html" in kinds for kinds in by_source.values()) >= 4


def test_nothing_in_it_tells_of_the_machine_it_ran_on() -> None:
    text = re.sub(r'"image/png": "[^"]*"', "", NOTEBOOK.read_text(encoding="utf-8"))
    assert re.findall(r'"/\w+/|/(?:home|root|tmp|work|Users|usr)/|C:\\\\', text) == []


@pytest.mark.real_model
def test_its_cells_run(real_llm: logprobe.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses the shared model of the session, which stays open; the last line of a cell is its output."""
    monkeypatch.setattr(logprobe, "LLM", lambda _: real_llm)
    monkeypatch.setattr(real_llm, "close", lambda: None)
    names: dict[str, Any] = {}
    for cell in CELLS:
        *lines, last = source_of(cell).splitlines()
        exec("\n".join(lines), names)  # noqa: S102 - our own notebook
        if cell["outputs"]:
            value = eval(last, names)  # noqa: S307 - our own notebook
            for kind, method in (("image/png", "_repr_png_"), ("text/html", "_repr_html_")):
                assert kind not in shown(cell) or getattr(value, method)()
        else:
            exec(last, names)  # noqa: S102 - our own notebook
