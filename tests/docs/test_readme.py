"""The examples of README.md print what it shows."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from logprobe.cli.app import run
from logprobe.server import ServerSettings

if TYPE_CHECKING:
    from logprobe import LLM

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
NUMBER = re.compile(r" *-?\d+\.\d+")
SERVER = "http://127.0.0.1:8000"


def assert_same(printed: str, shown: str) -> None:
    """Compare texts; numbers may differ by rounding between machines."""
    assert NUMBER.sub("", printed) == NUMBER.sub("", shown)
    numbers = [float(number) for number in NUMBER.findall(shown)]
    assert [float(number) for number in NUMBER.findall(printed)] == pytest.approx(numbers, abs=0.011)


def console(command: str) -> tuple[str, str]:
    """Return the console example that begins with a command, and the output that it shows."""
    [example] = re.findall(rf"```console\n\$ ({command}.*?)```", README, re.DOTALL)
    words = re.match(r"(?:.*\\\n)*.*\n", example)
    assert words is not None
    return words[0], example[words.end() :]


@pytest.mark.real_model
def test_the_python_example_prints_what_is_shown(
    real_llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The session's model instead of a second one.
    monkeypatch.setattr("logprobe.LLM", lambda _: real_llm, raising=False)
    [(example, shown)] = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", README, re.DOTALL)
    exec(compile(example, "README.md", "exec", dont_inherit=True), {})  # noqa: S102 - our own text
    assert_same(capsys.readouterr().out, shown)


@pytest.mark.real_model
def test_the_shell_example_prints_what_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command, shown = console("printf")
    match = re.fullmatch(r'printf "(.*)" \| logprobe (.*)\n', command)
    assert match is not None
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(match[1].encode())))
    assert run(match[2].split()) == 0
    rows = shown.removesuffix("...\n").splitlines()
    printed = capsys.readouterr().out.splitlines()[: len(rows)]
    assert_same("\n".join(printed), "\n".join(rows))


@pytest.mark.real_model
def test_the_http_example_is_answered_as_shown(real_llm: LLM, new_serving: Any) -> None:
    command, shown = console("curl")
    with new_serving(real_llm, ServerSettings(model_name="smollm2")) as (url, _):
        script = command.partition("| jq")[0].replace(SERVER, url)
        done = subprocess.run(["sh", "-e", "-c", script], capture_output=True, text=True, check=True)
    reply = json.dumps(json.loads(done.stdout)["choices"][0]["logprobs"], separators=(",", ":"))
    assert_same(reply, shown.strip())
