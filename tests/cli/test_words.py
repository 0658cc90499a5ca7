"""`logprobe words`: words and other units as rows."""

from __future__ import annotations

import csv
import io
import json
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from logprobe.analysis.texts import NOT_SCORED

if TYPE_CHECKING:
    from pathlib import Path

    from logprobe import LLM

TEXT = "the cat and the dogs,  12 é 🌊 in a\ncat"


@pytest.fixture
def words(cli: Any, tiny_model_folder: Path) -> Any:
    def run(*arguments: str, stdin: bytes = b"") -> Any:
        return cli("words", *arguments, "--model", str(tiny_model_folder), stdin=stdin)

    return run


def read(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


def test_words_come_as_csv(words: Any, tiny_llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text(TEXT)
    flags = ("--csv", "--boundary", "end", "--unit", "bits")
    rows = read(words(str(tmp_path / "in.txt"), *flags).out)
    want = tiny_llm.surprisal(TEXT, boundary="end", unit="bits")[0].rows()
    assert [row["word"] for row in rows] == [row["word"] for row in want]
    for name in ("surprisal", "entropy"):
        np.testing.assert_allclose([float(row[name]) for row in rows], [row[name] for row in want], atol=1e-4)
    assert {row["unit"] for row in rows} == {"bits"}
    assert read(words("--text", TEXT, *flags).out)[3]["word"] == rows[3]["word"]
    first = read(words("--text", TEXT, "--csv", "--no-bos").out)[0]
    assert (first["surprisal"], first["note"]) == ("", NOT_SCORED)


def test_words_are_written_to_a_file(words: Any, tmp_path: Path) -> None:
    for flags, name in (
        (("--csv",), "w.csv"),
        (("--json",), "w.jsonl"),
        (("--csv",), "w.jsonl"),
        ((), "w.txt"),
    ):
        shown = words("--text", TEXT, *flags).out
        given = flags if name == "w.jsonl" else ()
        assert words("--text", TEXT, *given, "-o", str(tmp_path / name)).out == ""
        assert (tmp_path / name).read_text(encoding="utf-8") == shown
    refused = words("--text", TEXT, "-o", str(tmp_path / "none" / "w.csv"))
    assert refused.code == 1
    assert "none/w.csv: the folder does not exist" in refused.error_line
    refused = words("--text", TEXT, "-o", str(tmp_path / "w.parquet"))
    assert (refused.code, "--output: cannot be Parquet" in refused.error_line) == (2, True)
    assert not (tmp_path / "w.parquet").exists()


def test_the_output_replaces_a_file_only_when_the_run_has_ended(words: Any, tmp_path: Path) -> None:
    path, output, link = (tmp_path / name for name in ("items.csv", "out.csv", "link.csv"))
    path.write_text("text,item\nthe cat,a\na dog,b\n")
    output.write_text("earlier")
    link.symlink_to(output)
    flags = (str(path), "--keep-columns", "item", "-o", str(link))
    assert words(*flags, "--stride", "0").code != 0
    assert output.read_text() == "earlier"
    assert words(*flags).code == 0
    assert [row["item"] for row in read(output.read_text())] == ["a", "a", "b", "b"]
    assert link.is_symlink()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["items.csv", "link.csv", "out.csv"]


def test_the_output_is_never_an_input(words: Any, tmp_path: Path) -> None:
    path = tmp_path / "story.txt"
    path.write_text("the cat")
    refused = words(str(path), "-o", str(path))
    assert refused.code == 1
    assert "story.txt: is read as input" in refused.error_line
    assert path.read_text() == "the cat"
    rows = tmp_path / "rows.csv"
    rows.write_text("text\nthe cat\n")
    for inputs in (str(rows), str(tmp_path / "*.csv"), str(tmp_path)):
        refused = words(inputs, "-o", str(rows))
        assert refused.code == 1
        assert "rows.csv: is read as input" in refused.error_line
    assert rows.read_text() == "text\nthe cat\n"


def test_a_pipe_is_written_to(words: Any, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        read_text = pool.submit(pipe.read_text)
        assert words("--text", "the cat", "--csv", "-o", str(pipe)).code == 0
        assert [row["word"] for row in read(read_text.result())] == ["the", "cat"]
    assert pipe.is_fifo()


def test_words_of_rows_come_with_their_columns(words: Any, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"s": "the cat", "id": "a"}\n{"s": ""}\n{"s": "a dog in", "id": "b"}\n')
    done = words(str(path), "--csv", "--text-column", "s", "--keep-columns", "id")
    assert done.code == 1
    assert [(row["row"], row["id"], row["word"]) for row in read(done.out)] == [
        ("0", "a", "the"), ("0", "a", "cat"), ("2", "b", "a"), ("2", "b", "dog"), ("2", "b", "in"),
    ]  # fmt: skip
    assert "line 2" in done.err
    lines = words("-", "--lines", "--by", "token", "--json", stdin=b"the cat\na dog\n").out.splitlines()
    assert {json.loads(line)["row"] for line in lines} == {0, 1}
    assert "surprisal" in words("--text", "the cat", "--by", "sentence").out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--text", "x", "--csv", "--json"), "--csv: cannot be combined with --json"),
        (("--text", "x", "--detect"), "No such option: --detect"),
        (("--text", "x", "--by", "line"), "--by"),
        (("--text", "x", "--window", "999"), "--window"),
        ((), "give either a file"),
        (("x.jsonl", "--text", "x"), "give either a file"),
        (("x.jsonl", "--keep-columns", "tokens"), "'tokens' is an output column"),
        (("x.jsonl", "--keep-columns", "word"), "'word' is an output column"),
        (("--text", "x", "--keep-columns", "id"), "--keep-columns apply to files only"),
        (("--lines",), "--keep-columns apply to files only"),
    ],
)
def test_wrong_use_is_told(words: Any, arguments: tuple[str, ...], says: str) -> None:
    done = words(*arguments)
    assert done.code == 2
    assert says in done.err


def test_a_column_that_is_not_there_is_told_before_the_model_is_loaded(cli: Any, tmp_path: Path) -> None:
    (tmp_path / "in.csv").write_text("sentence,id\nthe cat,1\n")
    done = cli("words", str(tmp_path / "in.csv"), "--model", "no/such-model-anywhere")
    assert done.code == 1
    assert "has no column 'text'; it has 'sentence', 'id'" in done.err
    assert "loading" not in done.err
