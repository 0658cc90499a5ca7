"""`logprobe classify`, `judge` and `rerank` on real files: the library's numbers, with resumption."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from logprobe.analysis.io.journal import Journal

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from logprobe import LLM

LABELS = [" the dog", " of", " a"]
FLAGS = [word for label in LABELS for word in ("--labels", label)]
LAYOUT = ("--template", "th ", "--template", "{query}: {document}", "--template", " the")
ANSWERS = ("--labels", " a", "--labels", " o")
QUERY = ("--query", "the", *LAYOUT, *ANSWERS)
DOCUMENTS = ["the cat", "a dog and a cat", "in the", "on"]


@pytest.fixture
def run(cli: Callable[..., Any], tiny_model_folder: Path) -> Callable[..., Any]:
    """Run a command on the tiny model."""

    def call(*arguments: str, stdin: bytes = b"") -> Any:
        return cli(*arguments, "--model", str(tiny_model_folder), stdin=stdin)

    return call


@pytest.fixture
def reviews(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    rows = [{"text": "the cat and", "id": 7}, {"text": "", "id": 8}, {"text": "th " * 200, "id": 9}]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, {"text": "a dog", "id": 10}]))
    return path


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    path = tmp_path / "documents.txt"
    path.write_text("\n".join(DOCUMENTS) + "\n")
    return path


def ranking(llm: LLM, query: str = "the") -> list[float]:
    layout: dict[str, Any] = {"template": ("th ", "{query}: {document}", " the"), "labels": (" a", " o")}
    return llm.rerank(query, DOCUMENTS, **layout)


def lines_of(done: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in done.out.splitlines()]


def test_a_text_is_labelled_in_a_table_and_as_json(run: Any, tiny_llm: LLM) -> None:
    [want] = tiny_llm.classify("the cat and", LABELS)
    table = run("classify", "--text", "the cat and", *FLAGS)
    assert (table.code, table.out.split()[:3]) == (0, ["label", "share", "logprob"])
    best = table.out.splitlines()[1]
    assert best.startswith(repr(want.label))
    assert float(best.split()[-2]) == pytest.approx(want.probabilities[want.label], abs=1e-4)
    found = json.loads(run("classify", "--text", "the cat and", *FLAGS, "--json").out)
    assert (found["labels"], found["predicted"]) == (LABELS, want.label)
    np.testing.assert_allclose(found["logprobs"], want.logprobs, atol=5e-5)
    np.testing.assert_allclose(found["mass"], want.mass, rtol=1e-4)


def test_rows_are_labelled_and_bad_ones_told(run: Any, reviews: Path, tiny_llm: LLM) -> None:
    done = run("classify", str(reviews), *FLAGS, "--keep-columns", "id")
    assert done.code == 1
    rows = lines_of(done)
    assert [(row["row"], row["id"]) for row in rows] == [(0, "7"), (3, "10")]
    for row, want in zip(rows, tiny_llm.classify(["the cat and", "a dog"], LABELS), strict=True):  # type: ignore[arg-type]
        assert row["predicted"] == want.label
        np.testing.assert_allclose(row["logprobs"], want.logprobs, atol=5e-5)
        np.testing.assert_allclose(row["probs"], list(want.probabilities.values()), atol=5e-5)
    assert f"bad row: {reviews}, line 2: text: is empty" in done.err
    assert f"bad row: {reviews}, line 3: text: has 2" in done.err


def test_a_prompt_and_a_correction_are_those_of_the_library(run: Any, tmp_path: Path, tiny_llm: LLM) -> None:
    (tmp_path / "in.txt").write_text("cat\ndog\n")
    how = ("--prompt", "the {text} and", "--correction", "calibrated", "--content-free", "th")
    rows = lines_of(run("classify", str(tmp_path / "in.txt"), "--lines", *FLAGS, *how))
    prompts, empty = ["the cat and", "the dog and"], "the th and"
    want: Any = tiny_llm.classify(prompts, LABELS, correction="calibrated", content_free=empty)
    for row, one in zip(rows, want, strict=True):
        np.testing.assert_allclose(row["corrected"], one.corrected, atol=1e-4)
        assert np.abs(np.subtract(row["corrected"], row["logprobs"])).min() > 0.01
    text = json.loads(run("classify", "--text", "cat", *FLAGS, *how, "--json").out)
    np.testing.assert_allclose(text["corrected"], rows[0]["corrected"], atol=1e-4)
    by_length = json.loads(
        run("classify", "--text", "the cat and", *FLAGS, "--correction", "length", "--json").out
    )
    [shorter] = tiny_llm.classify("the cat and", LABELS, correction="length")
    np.testing.assert_allclose(by_length["corrected"], shorter.corrected, atol=5e-5)


def test_a_text_may_be_what_a_user_says(run: Any, tiny_llm: LLM) -> None:
    found = json.loads(run("classify", "--text", "the cat", "--chat", *FLAGS, "--json").out)
    [want] = tiny_llm.classify([{"role": "user", "content": "the cat"}], LABELS)
    np.testing.assert_allclose(found["logprobs"], want.logprobs, atol=5e-5)


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_labels_go_to_a_file(run: Any, reviews: Path, tmp_path: Path, suffix: str, tiny_llm: LLM) -> None:
    out = tmp_path / f"out.{suffix}"
    done = run("classify", str(reviews), *FLAGS, "-o", str(out))
    assert (done.code, done.out) == (1, "rows  2 scored, 2 bad\n")
    written = out.read_text().splitlines() if suffix == "jsonl" else []
    rows = [json.loads(line) for line in written] or pq.read_table(out).to_pylist()
    want: Any = tiny_llm.classify(["the cat and", "a dog"], LABELS)
    for row, one in zip(rows, want, strict=True):
        np.testing.assert_allclose(row["logprobs"], one.logprobs, atol=5e-5)
        np.testing.assert_allclose([row["mass"], row["margin"]], [one.mass, one.margin], atol=1e-4)
    assert len((tmp_path / f"out.{suffix}.errors.jsonl").read_text().splitlines()) == 2
    assert "--force" in run("classify", str(reviews), *FLAGS, "-o", str(out)).err


def test_a_run_that_was_stopped_goes_on_with_the_same_labels_alone(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = tmp_path / "in.txt", tmp_path / "out.parquet"
    source.write_text("the cat\n" * 300 + "a dog\n" * 300)
    flags = (str(source), "--lines", *FLAGS)
    whole = run("classify", *flags, "-o", str(tmp_path / "whole.parquet"))
    assert whole.code == 0
    monkeypatch.setattr("logprobe.analysis.io.journal.ROWS_A_PART", 256)
    write, parts = Journal.write, []

    def stopping(self: Journal[Any], *args: Any) -> None:
        if parts:
            raise KeyboardInterrupt
        parts.append(args)
        write(self, *args)

    with monkeypatch.context() as stopped:
        stopped.setattr(Journal, "write", stopping)
        assert run("classify", *flags, "-o", str(out)).code == 130
    assert not out.exists()
    other = run("classify", str(source), "--lines", "--labels", " a", "-o", str(out), "--resume")
    assert (other.code, "had different settings (labels)" in other.err) == (1, True)
    written: list[int] = []

    def counted(self: Journal[Any], end: int, rows: Any, *args: Any) -> None:
        written.extend(rows["row"].to_pylist())
        write(self, end, rows, *args)

    monkeypatch.setattr(Journal, "write", counted)
    assert run("classify", *flags, "-o", str(out), "--resume").code == 0
    assert written == [*range(parts[0][0], 600)]
    want = pq.read_table(tmp_path / "whole.parquet").to_pydict()
    found = pq.read_table(out).to_pydict()
    assert found["row"] == want["row"] == [*range(600)]
    np.testing.assert_allclose(found["logprobs"], want["logprobs"], atol=5e-5)


GRADED = ("--prompt", "the {text} and", "--scale", "1-10")


def test_a_text_is_graded_in_a_table_and_as_json(run: Any, tiny_llm: LLM) -> None:
    [want] = tiny_llm.judge("the cat and", range(1, 11))
    table = run("judge", "--text", "cat", *GRADED)
    assert (table.code, table.out.split()[:3]) == (0, ["grade", "share", "logprob"])
    figures = dict(line.rsplit(maxsplit=1) for line in table.out.splitlines()[-3:])
    assert float(figures["expectation"]) == pytest.approx(want.expectation, abs=1e-3)
    assert float(figures["spread"]) == pytest.approx(want.spread, abs=1e-3)
    found = json.loads(run("judge", "--text", "cat", *GRADED, "--json").out)
    assert found["scale"] == [*range(1, 11)]
    np.testing.assert_allclose(found["logprobs"], want.grades.logprobs, atol=5e-5)
    np.testing.assert_allclose(found["expectation"], want.expectation, atol=5e-4)


@pytest.mark.parametrize(
    ("flag", "scale"),
    [(None, range(1, 6)), ("0,0.5,1", [0, 0.5, 1]), ("7, 8", [7, 8]), (" 1 - 3 ", [1, 2, 3])],
)
def test_a_scale_is_a_range_or_numbers(run: Any, tiny_llm: LLM, flag: str | None, scale: Any) -> None:
    flags = () if flag is None else ("--scale", flag)
    found = json.loads(run("judge", "--text", "the cat", "--chat", *flags, "--json").out)
    [want] = tiny_llm.judge([{"role": "user", "content": "the cat"}], scale)
    assert found["scale"] == list(want.scale)
    np.testing.assert_allclose(found["logprobs"], want.grades.logprobs, atol=5e-5)


@pytest.mark.parametrize("suffix", ["parquet", "jsonl", None])
def test_rows_are_graded_and_bad_ones_told(
    run: Any, reviews: Path, tmp_path: Path, suffix: str | None, tiny_llm: LLM
) -> None:
    out = tmp_path / f"out.{suffix}"
    to_file = () if suffix is None else ("-o", str(out))
    done = run("judge", str(reviews), *GRADED, "--keep-columns", "id", *to_file)
    assert done.code == 1
    written = out.read_text().splitlines() if suffix == "jsonl" else []
    rows = pq.read_table(out).to_pylist() if suffix == "parquet" else [*map(json.loads, written)]
    rows = rows or lines_of(done)
    assert [(row["row"], row["id"]) for row in rows] == [(0, "7"), (3, "10")]
    want: Any = tiny_llm.judge(["the the cat and and", "the a dog and"], range(1, 11))
    for row, one in zip(rows, want, strict=True):
        np.testing.assert_allclose(row["logprobs"], one.grades.logprobs, atol=5e-5)
        np.testing.assert_allclose(row["probs"], list(one.grades.probabilities.values()), atol=5e-5)
        figures = (row["expectation"], row["spread"], row["off_scale"])
        np.testing.assert_allclose(figures, (one.expectation, one.spread, one.off_scale), atol=5e-4)
    if suffix is None:
        assert f"bad row: {reviews}, line 2: text: is empty" in done.err
    else:
        assert len((tmp_path / f"out.{suffix}.errors.jsonl").read_text().splitlines()) == 2


def test_grades_are_resumed_on_the_same_scale_alone(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_text("the cat\n" * 300 + "a dog\n" * 300)
    flags = ("judge", str(source), "--lines", "-o", str(out))
    monkeypatch.setattr("logprobe.analysis.io.journal.ROWS_A_PART", 256)
    write, parts = Journal.write, []

    def stopping(self: Journal[Any], *args: Any) -> None:
        if parts:
            raise KeyboardInterrupt
        parts.append(args)
        write(self, *args)

    with monkeypatch.context() as stopped:
        stopped.setattr(Journal, "write", stopping)
        assert run(*flags).code == 130
    other = run(*flags, "--scale", "1-10", "--resume")
    assert (other.code, "had different settings (scale)" in other.err) == (1, True)
    assert run(*flags, "--scale", "1,2,3,4,5", "--resume").code == 0
    assert [json.loads(line)["row"] for line in out.read_text().splitlines()] == [*range(600)]


def test_documents_of_one_query_come_best_first(run: Any, documents: Path, tiny_llm: LLM) -> None:
    want = ranking(tiny_llm)
    order = sorted(range(len(want)), key=lambda place: -want[place])
    assert order != sorted(order)
    rows = lines_of(run("rerank", str(documents), "--lines", *QUERY, "--keep-columns", "text"))
    assert [row["row"] for row in rows] == order
    assert [row["text"] for row in rows] == [DOCUMENTS[place] for place in order]
    np.testing.assert_allclose(
        [row["relevance_score"] for row in rows], [want[place] for place in order], atol=5e-5
    )
    best = lines_of(run("rerank", str(documents), "--lines", *QUERY, "--top-n", "2"))
    assert [row["row"] for row in best] == order[:2]
    from_stdin = run("rerank", "-", "--lines", *QUERY, stdin=documents.read_bytes())
    assert [row["row"] for row in lines_of(from_stdin)] == order


def test_documents_go_to_a_file_in_their_order(
    run: Any, documents: Path, tmp_path: Path, tiny_llm: LLM
) -> None:
    out = tmp_path / "ranked.parquet"
    done = run("rerank", str(documents), "--lines", *QUERY, "-o", str(out), "--json")
    assert json.loads(done.out)["num_rows"] == len(DOCUMENTS)
    table = pq.read_table(out)
    assert table.column("row").to_pylist() == [*range(len(DOCUMENTS))]
    np.testing.assert_allclose(table.column("relevance_score").to_pylist(), ranking(tiny_llm), atol=5e-5)


def test_documents_with_queries_of_their_own_come_in_their_order(
    run: Any, tmp_path: Path, tiny_llm: LLM
) -> None:
    source, queries = tmp_path / "in.jsonl", ["the", "a", "of", "in"]
    rows = [{"q": query, "body": one} for query, one in zip(queries, DOCUMENTS, strict=True)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = ("--query-column", "q", "--text-column", "body", *LAYOUT, *ANSWERS)
    found = lines_of(run("rerank", str(source), *columns))
    assert [row["row"] for row in found] == [0, 1, 2, 3]
    want = [ranking(tiny_llm, query)[place] for place, query in enumerate(queries)]
    np.testing.assert_allclose([row["relevance_score"] for row in found], want, atol=5e-5)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("classify", "--text", "a"), "--labels"),
        (("classify", "--text", "a", "--labels", "1", "--labels", "10"), "--labels"),
        (("classify", "--labels", "a"), "FILE"),
        (("classify", "IN", "--text", "a", "--labels", "a"), "FILE"),
        (("classify", "--text", "a", "--labels", "a", "-o", "x.jsonl"), "--output"),
        (("classify", "IN", "--labels", "a", "--content-free", "x"), "--content-free"),
        (("classify", "IN", "--labels", "a", "--correction", "other"), "--correction"),
        (("classify", "IN", "--labels", "a", "--prompt", "Is it?"), "--prompt"),
        (("classify", "IN", "--labels", "a", "--keep-columns", "mass"), "--keep-columns"),
        (("classify", "--text", "th " * 200, "--labels", "a"), "--text"),
        (("judge", "--text", "a", "--scale", "5"), "--scale"),
        (("judge", "--text", "a", "--scale", "5-1"), "--scale"),
        (("judge", "--text", "a", "--scale", "1-100000"), "--scale"),
        (("judge", "--text", "a", "--scale", "low,high"), "--scale"),
        (("judge", "--text", "a", "--scale", "1,1"), "--scale"),
        (("judge", "--text", "a", "--prompt", "Grade it."), "--prompt"),
        (("judge", "--text", "a", "-o", "x.jsonl"), "--output"),
        (("judge", "IN", "--text", "a"), "FILE"),
        (("judge", "IN", "--keep-columns", "spread"), "--keep-columns"),
        (("judge", "--text", "th " * 200), "--text"),
        (("rerank", "IN"), "--query"),
        (("rerank", "IN", "--query", "a", "--query-column", "b"), "--query"),
        (("rerank", "--query", "a"), "FILE"),
        (("rerank", "IN", "--query", "a", "--labels", "yes"), "--labels"),
        (("rerank", "IN", "--query", "a", "--template", "a"), "--template"),
        (("rerank", "IN", "--query-column", "text", "--top-n", "1"), "--top-n"),
        (("rerank", "IN", "--query", "a", "--top-n", "0"), "--top-n"),
        (
            ("rerank", "IN", "--query", "a", "--top-n", "1", "-o", "x.jsonl"),
            "cannot be combined with --output",
        ),
    ],
)
def test_wrong_use_is_told_with_the_flag(
    run: Any, documents: Path, arguments: tuple[str, ...], says: str
) -> None:
    done = run(*(str(documents) if argument == "IN" else argument for argument in arguments))
    assert (done.code, done.out) == (2, "")
    assert says in done.err.splitlines()[-1]
