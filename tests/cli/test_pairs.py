"""`logprobe pairs`: accuracy on minimal pairs of files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from logprobe import LLM

ROWS = [
    {"sentence_good": "the cat", "sentence_bad": "cat the", "UID": "order"},
    {"sentence_good": "a dog in", "sentence_bad": "a in dog", "UID": "order"},
    {"sentence_good": "and the", "sentence_bad": "the and", "UID": "little"},
]


@pytest.fixture
def run(cli: Any, tiny_model_folder: Path) -> Any:
    def call(*arguments: str, stdin: bytes = b"") -> Any:
        return cli("pairs", *arguments, "--model", str(tiny_model_folder), stdin=stdin)

    return call


def lines_of(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_accuracies_are_those_of_the_library(run: Any, tiny_llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(lines_of(ROWS))
    texts = [(row["sentence_good"], row["sentence_bad"]) for row in ROWS]
    want = tiny_llm.minimal_pairs(texts, [row["UID"] for row in ROWS])
    done = run(str(tmp_path / "in.jsonl"), "--category-column", "UID")
    assert (done.code, done.out) == (0, f"{want}\n")
    flags = ("--format", "jsonl", "--category-column", "UID", "--json")
    found = json.loads(run("-", *flags, stdin=lines_of(ROWS).encode()).out)
    assert found["accuracy"] == {"mean": want.accuracy.mean, "error": want.accuracy.error}
    assert list(found["by_category"]) == ["order", "little"]


def test_a_bad_row_is_told_and_left_out(run: Any, tmp_path: Path) -> None:
    others = [{"sentence_good": "", "sentence_bad": "x"}, {"sentence_good": "x", "sentence_bad": "\ud800"}]
    (tmp_path / "in.jsonl").write_text(lines_of([*ROWS, *others]))
    done = run(str(tmp_path / "in.jsonl"), "--json")
    assert done.code == 1
    assert "line 4: sentence_good" in done.err
    assert "line 5: sentence_bad" in done.err
    assert "mean" in json.loads(done.out)["accuracy"]


def test_columns_that_are_not_there_are_told_before_the_model_is_loaded(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("good,bad\na,b\n")
    done = cli("pairs", str(tmp_path / "in.csv"), "--model", "no/such-model-anywhere")
    assert done.code == 1
    assert "has no column 'sentence_good', 'sentence_bad'; it has 'good', 'bad'" in done.err
    done = cli("pairs", "-", "--model", "no/such-model-anywhere", stdin=lines_of(ROWS).encode())
    assert done.code == 1
    assert "is read as text, which has one column, not 'sentence_good', 'sentence_bad'" in done.err
