from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from logprobe import LLM

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.real_model
def test_the_python_example_runs_and_says_what_is_known(
    real_llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The session's one model instead of a second one.
    monkeypatch.setattr("logprobe.LLM", lambda _: real_llm, raising=False)
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})  # noqa: S102 - our own text
    *rows, last = capsys.readouterr().out.splitlines()
    assert rows[0].endswith("' Paris' 1 -0.2581")
    assert len(rows) == 6
    assert last == "True"


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
)
def test_every_link_to_a_file_leads_somewhere(page: str) -> None:
    path = ROOT / page
    for target in re.findall(r"\]\(([^)#]+)", path.read_text(encoding="utf-8")):
        assert target.startswith("http") or (path.parent / target).exists(), f"{page}: {target}"


def test_every_make_target_named_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, re.MULTILINE))
    named = set(
        re.findall(r"\bmake ([a-z]+)\b", README + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    )
    assert {"demo", "test"} <= named
    assert named <= targets
