"""The examples of the how-to pages run in the order of each page, and every page has such a test."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from doc_pages import PAGES, SHELL, examples_of, run_examples
from logprobe.analysis import DataSettings
from logprobe.analysis.datasets.tasks import schema_of
from logprobe.cli.app import run

TESTS = Path(__file__).parents[1]
COMMAND = re.compile(r"(?:^|[|;&] *)logprobe ((?:[a-z]+ ?){1,2})(.*)", re.MULTILINE)
# The examples of these pages run here, each page in its own folder; other pages have their own tests.
HERE = [
    "compare.md",
    "concepts.md",
    "constrain.md",
    "distil.md",
    "errors.md",
    "hidden-states.md",
    "rl.md",
    "scoring.md",
    "speculate.md",
]


@pytest.mark.parametrize("page", HERE)
def test_the_examples_run_one_after_the_other(
    page: str, tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    examples = examples_of(page)
    run_examples(page, examples, model=tiny_model_folder)
    assert len(examples) > 1 or page in {"concepts.md", "errors.md"}


def test_every_page_with_examples_has_a_test_that_runs_them() -> None:
    tests = "".join(path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py"))
    with_examples = [page for page in PAGES if examples_of(page)]
    assert len(with_examples) > 8
    assert [page for page in with_examples if page not in tests] == []


@pytest.mark.parametrize(
    "settings",
    [
        DataSettings(tokens=True, unconditional=True, detect=True, label_column="seen"),
        DataSettings(context_column="q", choices_column="c", answer_column="a"),
    ],
    ids=["texts", "questions"],
)
def test_the_page_on_scoring_names_every_column(settings: DataSettings) -> None:
    named = set(re.findall(r"`(\w+)`", PAGES["scoring.md"]))
    assert set(schema_of(settings).names) - named == set()


def commands() -> list[tuple[str, str, str]]:
    """Return (page, command, flag) for each flag in a shell example."""
    return sorted(
        {
            (page, words.strip(), flag)
            for page, text in PAGES.items()
            for shell in SHELL.findall(text)
            for words, rest in COMMAND.findall(shell)
            for flag in re.findall(r"(?<!\S)--?[a-z][a-z-]*", rest.partition("#")[0]) or ["--help"]
        }
    )


@pytest.mark.parametrize(("page", "command", "flag"), commands())
def test_a_command_of_a_page_is_there_with_its_flags(
    page: str, command: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = command.split()
    words = words if words[0] in {"models", "processors"} else words[:1]
    assert run([*words, "--help"]) == 0, page
    assert re.search(rf"{flag}\b", capsys.readouterr().out), f"{page}: logprobe {command} has no {flag}"
