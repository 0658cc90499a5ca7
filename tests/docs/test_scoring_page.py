"""The examples of docs/scoring.md run, one after the other, and its commands are commands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from logprobe.cli.app import run

if TYPE_CHECKING:
    from logprobe import LLM

PAGE = (Path(__file__).parents[2] / "docs/scoring.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
FLAGS = set(re.findall(r"logprobe (score|compare) .*?(--[a-z-]+)", PAGE))


def test_the_examples_run_one_after_the_other(
    tiny_model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, object] = {"model": str(tiny_model_folder), "folder": tmp_path}
    try:
        for example in EXAMPLES:
            exec(compile(example, "scoring.md", "exec", dont_inherit=True), names)  # noqa: S102 - our own page
    finally:
        llm: LLM = names["llm"]  # type: ignore[assignment]
        llm.close()
    lines = capsys.readouterr().out.splitlines()
    assert len(EXAMPLES) == 9
    assert "2 1 " in " ".join(lines)  # two rows scored, one bad


@pytest.mark.parametrize(("command", "flag"), sorted(FLAGS))
def test_a_flag_of_the_page_is_the_commands(
    command: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run([command, "--help"])
    assert f"{flag} " in capsys.readouterr().out
