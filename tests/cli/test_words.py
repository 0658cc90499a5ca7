"""`logprobe score --by`: words and other units as rows."""

from __future__ import annotations

import csv
import io
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from logprobe.analysis.texts import NOT_SCORED

if TYPE_CHECKING:
    from pathlib import Path

    from logprobe import LLM

TEXT = "the cat and the dogs,  12 é 🌊 in a\ncat"


@pytest.fixture
def score(cli: Any, tiny_model_folder: Path) -> Any:
    def run(*arguments: str, stdin: bytes = b"") -> Any:
        return cli("score", *arguments, "--model", str(tiny_model_folder), stdin=stdin)

    return run


def read(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_words_come_as_csv(score: Any, tiny_llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text(TEXT)
    flags = ("--by", "word", "--csv", "--boundary", "end", "--unit", "bits")
    rows = read(score(str(tmp_path / "in.txt"), *flags).out)
    want = tiny_llm.surprisal(TEXT, boundary="end", unit="bits")[0].rows()
    assert [row["word"] for row in rows] == [row["word"] for row in want]
    for name in ("surprisal", "entropy"):
        np.testing.assert_allclose([float(row[name]) for row in rows], [row[name] for row in want], atol=1e-4)
    assert {row["unit"] for row in rows} == {"bits"}
    assert read(score("--text", TEXT, *flags).out)[3]["word"] == rows[3]["word"]
    first = read(score("--text", TEXT, "--by", "word", "--csv", "--no-bos").out)[0]
    assert (first["surprisal"], first["note"]) == ("", NOT_SCORED)


def test_words_of_rows_come_with_their_columns(score: Any, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"s": "the cat", "id": "a"}\n{"s": ""}\n{"s": "a dog in", "id": "b"}\n')
    done = score(str(path), "--by", "word", "--csv", "--text-column", "s", "--keep-columns", "id")
    assert done.code == 1
    assert [(row["row"], row["id"], row["word"]) for row in read(done.out)] == [
        ("0", "a", "the"), ("0", "a", "cat"), ("2", "b", "a"), ("2", "b", "dog"), ("2", "b", "in"),
    ]  # fmt: skip
    assert "line 2" in done.err
    lines = score("-", "--lines", "--by", "token", "--json", stdin=b"the cat\na dog\n").out.splitlines()
    assert {json.loads(line)["row"] for line in lines} == {0, 1}
    assert "surprisal" in score("--text", "the cat", "--by", "sentence").out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--text", "x", "--csv"), "requires --by"),
        (("--text", "x", "--by", "word", "--detect"), "cannot be combined with --by"),
        (("--text", "x", "--by", "word", "--top", "3"), "cannot be combined with --top"),
        (("--text", "x", "--by", "word", "-o", "x.parquet"), "cannot be combined with --by"),
        (("--text", "x", "--by", "word", "--force"), "cannot be combined with --by"),
        (("--text", "x", "--by", "word", "--csv", "--json"), "cannot be combined with --json"),
        (("--by", "word"), "give either a file"),
        (("x.jsonl", "--by", "word", "--context-column", "window"), "cannot be combined with --by"),
        (("x.jsonl", "--by", "word", "--keep-columns", "tokens"), "'tokens' is an output column"),
        (("x.jsonl", "--by", "word", "--keep-columns", "word"), "'word' is an output column"),
        (("--text", "x", "--by", "word", "--keep-columns", "id"), "a data set must be in files"),
    ],
)
def test_wrong_use_is_told(score: Any, arguments: tuple[str, ...], says: str) -> None:
    done = score(*arguments)
    assert done.code == 2
    assert says in done.err


def test_a_column_that_is_not_there_is_told_before_the_model_is_loaded(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("sentence,id\nthe cat,1\n")
    done = cli("score", str(tmp_path / "in.csv"), "--by", "word", "--model", "no/such-model-anywhere")
    assert done.code == 1
    assert "has no column 'text'; it has 'sentence', 'id'" in done.err
    assert "loading" not in done.err
