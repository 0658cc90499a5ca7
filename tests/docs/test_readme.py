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
    # The session's model instead of a second one.
    monkeypatch.setattr("logprobe.LLM", lambda _: real_llm, raising=False)
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})  # noqa: S102 - our own text
    *rows, last = capsys.readouterr().out.splitlines()
    assert rows[0].endswith("' Paris' 1 -0.2581")
    assert len(rows) == 6
    assert last == "True"
