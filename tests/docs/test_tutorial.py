"""docs/tutorial.md: every example runs on the default model and prints what the page shows."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest

from logprobe.server import ServerSettings

if TYPE_CHECKING:
    from logprobe import LLM

PAGE = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text(encoding="utf-8")
STEPS = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.DOTALL)


FIGURE = re.compile(r" *-?\d+\.\d+")


def test_every_example_shows_what_it_prints() -> None:
    assert len(STEPS) == PAGE.count("```python") > 5


@pytest.mark.real_model
def test_each_example_prints_what_the_page_shows(
    real_llm: LLM,
    new_serving: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # The session's model instead of a second one, and a free port.
    monkeypatch.setattr("logprobe.LLM", lambda _: real_llm, raising=False)
    client = openai.OpenAI
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    with new_serving(real_llm, ServerSettings(model_name="smollm2")) as (url, _):
        here = functools.partial(client, api_key="none", base_url=f"{url}/v1")
        monkeypatch.setattr(openai, "OpenAI", lambda **_: here())
        for example, shown in STEPS:
            exec(compile(example, "tutorial.md", "exec", dont_inherit=True), names)  # noqa: S102 - our own page
            printed = capsys.readouterr().out
            assert FIGURE.sub("", printed) == FIGURE.sub("", shown)
            # As shown, up to rounding differences between machines.
            numbers = [float(one) for one in FIGURE.findall(shown)]
            assert [float(one) for one in FIGURE.findall(printed)] == pytest.approx(numbers, abs=0.011)
        names["client"].close()
