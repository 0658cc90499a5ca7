"""Datasets in every format, with every kind of row, and with invalid rows."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from logprobe.analysis import DataSettings, score_dataset
from logprobe.errors import InputError, OutputError, ParameterError
from logprobe.records import LogprobsInfo
from pairs import encode_pair

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from logprobe import LLM

TEXTS = ["the cat and the dog", "é 🌊 the end", "a dog\nin a cat", "the the the"]
QUESTIONS = [
    {"q": "the cat", "options": ["and", "the dog", "x"], "gold": 0},
    {"q": "a dog", "options": ["in", "on the cat"], "gold": "B"},
    {"q": "", "options": ["the", "é🌊"], "gold": "é🌊"},
]
CHOICES = DataSettings(context_column="q", choices_column="options", answer_column="gold")


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Write rows in a format; return the file's name."""

    def write_as(rows: list[dict[str, Any]], suffix: str, name: str = "in") -> str:
        path = tmp_path / f"{name}.{suffix}"
        if suffix == "parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        elif suffix == "jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        else:
            out = io.StringIO(newline="")
            writer = csv.DictWriter(out, rows[0].keys())
            writer.writeheader()
            writer.writerows(
                {key: json.dumps(value) if isinstance(value, list) else value for key, value in row.items()}
                for row in rows
            )
            path.write_text(out.getvalue(), newline="")
        return str(path)

    return write_as


def rows_of(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    return pq.read_table(path).to_pylist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize("out_suffix", ["parquet", "jsonl"])
def test_texts_of_every_format_have_the_numbers_of_their_scores(
    tiny_llm: LLM, write: Any, tmp_path: Path, suffix: str, out_suffix: str
) -> None:
    source = write([{"id": f"n{i}", "text": text} for i, text in enumerate(TEXTS)], suffix)
    out = tmp_path / f"out.{out_suffix}"
    settings = DataSettings(tokens=True, unconditional=True, keep_columns=("id",))
    summary = score_dataset(tiny_llm, source, out, settings=settings)
    scores = tiny_llm.score([("", text) for text in TEXTS], entropy=True)
    found = rows_of(out)
    assert [row["id"] for row in found] == ["n0", "n1", "n2", "n3"]
    for place, (row, score, text) in enumerate(zip(found, scores, TEXTS, strict=True)):
        assert (row["row"], row["source"]) == (place, source)
        assert row["token_ids"] == score.token_ids
        assert row["token_logprobs"] == pytest.approx(score.token_logprobs, abs=1e-4)
        assert row["token_entropy"] == pytest.approx(score.entropy, abs=1e-4)
        assert row["logprob"] == pytest.approx(score.logprob, abs=1e-3)
        assert (row["num_bytes"], row["num_chars"]) == (len(text.encode()), len(text))
        assert row["pmi"] == pytest.approx(0, abs=1e-3)  # without a context
    assert (summary.num_rows, summary.num_bad) == (4, 0)
    assert summary.logprob == pytest.approx(sum(score.logprob for score in scores), abs=1e-3)
    assert not list(tmp_path.glob("out.*.parts*")) + list(tmp_path.glob("*.errors.jsonl"))


def test_the_file_says_what_its_numbers_are(tiny_llm: LLM, write: Any, tmp_path: Path) -> None:
    source = write([{"text": text} for text in TEXTS], "jsonl")
    score_dataset(tiny_llm, source, tmp_path / "out.parquet")
    info = LogprobsInfo.from_json(pq.read_schema(tmp_path / "out.parquet").metadata[b"logprobe.info"])
    assert (info.stages, info.unit, info.model) == (("raw",), "nats", tiny_llm.config.model)
    score_dataset(tiny_llm, source, tmp_path / "out.jsonl")
    about = json.loads((tmp_path / "out.jsonl.info.json").read_text())
    assert (about["model"], about["floor"]) == (tiny_llm.config.model, -9999.0)


@pytest.mark.parametrize("suffix", ["jsonl", "csv"])
def test_choices_are_judged_as_the_harness_does(
    tiny_llm: LLM, write: Any, tmp_path: Path, suffix: str
) -> None:
    summary = score_dataset(tiny_llm, write(QUESTIONS, suffix), tmp_path / "o.parquet", settings=CHOICES)
    hits: dict[str, list[bool]] = {"acc": [], "acc_norm": []}
    for row, question in zip(rows_of(tmp_path / "o.parquet"), QUESTIONS, strict=True):
        options: Any = question["options"]
        scores = tiny_llm.score([(question["q"], f" {option}") for option in options])  # type: ignore[list-item]
        sums = [score.logprob for score in scores]
        means = [value / len(option) for value, option in zip(sums, options, strict=True)]
        gold = {0: 0, "B": 1, "é🌊": 1}[question["gold"]]  # type: ignore[index]
        hits["acc"].append(sums.index(max(sums)) == gold)
        hits["acc_norm"].append(means.index(max(means)) == gold)
        assert row["choice_logprobs"] == pytest.approx(sums, abs=1e-3)
        assert (row["answer"], row["acc"], row["acc_norm"]) == (
            gold, hits["acc"][-1], hits["acc_norm"][-1],
        )  # fmt: skip
        best = math.exp(max(sums)) / sum(map(math.exp, sums))
        assert row["confidence"] == pytest.approx(best, abs=1e-3)
    assert summary.acc is not None
    assert summary.acc_norm is not None
    assert summary.acc.mean == sum(hits["acc"]) / 3
    assert summary.acc_norm.mean == sum(hits["acc_norm"]) / 3
    share = summary.acc.mean
    assert summary.acc.error == pytest.approx(math.sqrt(share * (1 - share) * 3 / 2 / 3))
    assert summary.calibration_error is not None


def test_a_continuation_after_a_context(tiny_llm: LLM, write: Any, tmp_path: Path) -> None:
    source = write([{"text": " and the dog", "before": "the cat"}], "jsonl")
    settings = DataSettings(context_column="before", unconditional=True)
    score_dataset(tiny_llm, source, tmp_path / "o.parquet", settings=settings)
    (row,) = rows_of(tmp_path / "o.parquet")
    (score,) = tiny_llm.score([("the cat", " and the dog")], unconditional=True)
    assert row["logprob"] == pytest.approx(score.logprob, abs=1e-4)
    assert row["pmi"] == pytest.approx(score.pmi, abs=1e-4)


def test_files_folders_and_patterns_are_read_in_order(tiny_llm: LLM, tmp_path: Path) -> None:
    folder = tmp_path / "texts" / "deep"
    folder.mkdir(parents=True)
    for name in ("b.txt", "a.txt"):
        (folder / name).write_text(f"the cat {name}\nthe dog")
    (folder / "c.md").write_text("not read")
    names = [str(tmp_path / "texts"), str(folder / "*.txt"), str(folder / "b.txt")]
    summary = score_dataset(tiny_llm, names, tmp_path / "o.jsonl")
    assert summary.num_rows == 5
    assert [row["source"][-5:] for row in rows_of(tmp_path / "o.jsonl")] == [
        "a.txt", "b.txt", "a.txt", "b.txt", "b.txt",
    ]  # fmt: skip
    assert score_dataset(tiny_llm, names, tmp_path / "l.jsonl", by_line=True).num_rows == 10


def test_bad_rows_are_told_apart_and_the_others_scored(tiny_llm: LLM, tmp_path: Path) -> None:
    lines = [
        '{"text": "the cat"}', '{"text": ""}', '{"text": 5}', '{"text": null}', '{"other": "x"}', "{broken",
        "[1]", '{"text": "a\\ud800"}', json.dumps({"text": "x" * 300}), "", '"a text alone"',
        '{"text": "the dog"}',
    ]  # fmt: skip
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    summary = score_dataset(tiny_llm, tmp_path / "in.jsonl", tmp_path / "o.parquet")
    assert (summary.num_rows, summary.num_bad) == (3, 8)
    assert [row["row"] for row in rows_of(tmp_path / "o.parquet")] == [0, 9, 10]
    bad = rows_of(tmp_path / "o.parquet.errors.jsonl")
    assert [row["line"] for row in bad] == [2, 3, 4, 5, 6, 7, 8, 9]
    says = [
        "is empty",
        "got int",
        "got null",
        "has no 'text'",
        "not valid JSON",
        "must be a JSON object",
        "Unicode",
        "301",
    ]
    for row, words in zip(bad, says, strict=True):
        assert words in row["error"]


@pytest.mark.parametrize(
    ("gold", "options", "says"),
    [
        ("Z", ["a", "b"], "one of the 2 choices"),
        (2, ["a", "b"], "letter of one of"),
        (True, ["a", "b"], "letter of one of"),
        (0, ["a"], "at least two"),
        (0, ["a", 5], "at least two texts"),
        (0, "no json", "the JSON text"),
    ],
)
def test_a_bad_question_says_why(
    tiny_llm: LLM, write: Any, tmp_path: Path, gold: Any, options: Any, says: str
) -> None:
    source = write([{"q": "the", "options": options, "gold": gold}], "jsonl")
    assert score_dataset(tiny_llm, source, tmp_path / "o.parquet", settings=CHOICES).num_bad == 1
    assert says in rows_of(tmp_path / "o.parquet.errors.jsonl")[0]["error"]


def test_a_row_past_the_context_is_refused_cut_or_read_in_windows(
    tiny_llm: LLM, write: Any, tmp_path: Path
) -> None:
    text = "the cat and the dog, 12 é 🌊\n" * 12
    source = write([{"text": text}], "jsonl")
    assert score_dataset(tiny_llm, source, tmp_path / "e.parquet").num_bad == 1
    cut = DataSettings(truncation="left")
    score_dataset(tiny_llm, source, tmp_path / "l.parquet", settings=cut)
    assert rows_of(tmp_path / "l.parquet")[0]["num_tokens"] == 128
    settings = DataSettings(truncation="window", window=100, stride=40, tokens=True)
    score_dataset(tiny_llm, source, tmp_path / "w.parquet", settings=settings)
    (row,) = rows_of(tmp_path / "w.parquet")
    want = tiny_llm.perplexity(text, window=100, stride=40)
    assert row["logprob"] == pytest.approx(want.logprob, abs=1e-3)
    assert (row["num_bytes"], row["num_chars"]) == (len(text.encode()), len(text))


def test_a_long_continuation_is_scored_in_windows_with_its_context(
    tiny_llm: LLM, write: Any, tmp_path: Path
) -> None:
    text = " and the dog" * 100
    source = write([{"c": "the cat", "text": text}], "jsonl")
    settings = DataSettings(context_column="c", truncation="window", stride=50)
    score_dataset(tiny_llm, source, tmp_path / "w.parquet", settings=settings)
    ids, start = encode_pair(tiny_llm.text, "the cat", text)
    assert rows_of(tmp_path / "w.parquet")[0]["num_tokens"] == len(ids) - start
    left = replace(settings, truncation="left", stride=None)
    assert score_dataset(tiny_llm, source, tmp_path / "l.parquet", settings=left).num_bad == 1


def test_choices_that_no_token_begins_with_are_all_measured_by_bytes(
    tiny_llm: LLM, write: Any, tmp_path: Path
) -> None:
    source = write([{"q": "the ca", "choices": ["t and", "r"], "answer": 0}], "jsonl")
    settings = DataSettings(
        context_column="q", choices_column="choices", answer_column="answer", delimiter=""
    )
    score_dataset(tiny_llm, source, tmp_path / "bytes.parquet", settings=settings)
    (row,) = rows_of(tmp_path / "bytes.parquet")
    [want] = tiny_llm.classify("the ca", ["t and", "r"])
    assert (row["boundary"], want.boundary) == ("bytes", "bytes")
    assert row["choice_logprobs"] == pytest.approx(want.logprobs.tolist(), abs=1e-4)
    score_dataset(tiny_llm, source, tmp_path / "t.parquet", settings=replace(settings, boundary="token"))
    (row,) = rows_of(tmp_path / "t.parquet")
    scores = tiny_llm.score([("the ca", "t and"), ("the ca", "r")], boundary="token")
    assert row["boundary"] == "token"
    assert row["choice_logprobs"] == pytest.approx([score.logprob for score in scores], abs=1e-4)


def test_a_continuation_that_no_token_begins_with_goes_through_windows(
    tiny_llm: LLM, write: Any, tmp_path: Path
) -> None:
    text = "t and the dog" * 40
    source = write([{"c": "the ca", "text": text}], "jsonl")
    settings = DataSettings(context_column="c", truncation="window")
    score_dataset(tiny_llm, source, tmp_path / "w.parquet", settings=settings)
    (row,) = rows_of(tmp_path / "w.parquet")
    (want,) = tiny_llm.score([("the ca", text)], truncation="window")
    assert (row["boundary"], row["num_bytes"], row["num_tokens"]) == ("bytes", len(text), want.num_tokens)
    left = replace(settings, truncation="left")
    assert score_dataset(tiny_llm, source, tmp_path / "l.parquet", settings=left).num_bad == 1


def test_a_file_that_cannot_be_used_ends_the_run(tiny_llm: LLM, write: Any, tmp_path: Path) -> None:
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 nothing")
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    (tmp_path / "odd.xyz").write_text("x")
    (tmp_path / "empty").mkdir()
    cases = {
        "broken.parquet": "not a Parquet file",
        "latin.txt": "not UTF-8",
        "odd.xyz": "unknown suffix",
        "empty": "the folder has no",
        "*.none": "no file matches",
        "none.txt": "no such file",
    }
    for name, says in cases.items():
        with pytest.raises(InputError, match=says):
            score_dataset(tiny_llm, str(tmp_path / name), tmp_path / "o.parquet", settings=DataSettings())
    for suffix in ("csv", "parquet"):
        source = write([{"body": "the cat"}], suffix)
        with pytest.raises(InputError, match="has no column 'text'; it has 'body'"):
            score_dataset(tiny_llm, source, tmp_path / f"{suffix}.parquet")


def test_a_parquet_file_that_is_damaged_within_says_where(tiny_llm: LLM, write: Any, tmp_path: Path) -> None:
    source = write([{"text": f"the cat {i}"} for i in range(3000)], "parquet")
    data = bytearray((tmp_path / "in.parquet").read_bytes())
    data[40:400] = bytes(360)
    (tmp_path / "in.parquet").write_bytes(data)
    with pytest.raises(InputError, match="is damaged after row"):
        score_dataset(tiny_llm, source, tmp_path / "o.parquet")


@pytest.mark.parametrize(
    ("options", "parameter"),
    [
        ({"truncation": "right"}, "truncation"),
        ({"answer_column": "a"}, "answer_column"),
        ({"choices_column": "a", "tokens": True}, "tokens"),
        ({"stride": 5}, "stride"),
        ({"truncation": "window", "unconditional": True}, "unconditional"),
    ],
)
def test_settings_that_do_not_fit_are_refused(options: Any, parameter: str) -> None:
    with pytest.raises(ParameterError) as caught:
        DataSettings(**options)
    assert caught.value.parameter == parameter


def test_an_output_that_exists_is_kept_unless_forced(tiny_llm: LLM, write: Any, tmp_path: Path) -> None:
    source = write([{"text": "the cat"}], "jsonl")
    out = tmp_path / "o.parquet"
    out.write_text("mine")
    for resume in (False, True):
        with pytest.raises(InputError, match="exists; use force=True"):
            score_dataset(tiny_llm, source, out, resume=resume)
    assert out.read_text() == "mine"
    assert score_dataset(tiny_llm, source, out, force=True).num_rows == 1
    folder = tmp_path / "folder.parquet"
    folder.mkdir()
    for force in (False, True):
        with pytest.raises(OutputError, match="is a folder; name a file"):
            score_dataset(tiny_llm, source, folder, force=force)
    assert not (tmp_path / "folder.parquet.parts").exists()
    with pytest.raises(InputError, match="must end in"):
        score_dataset(tiny_llm, source, tmp_path / "o.csv")


@pytest.mark.parametrize("name", ["in.jsonl", "link.jsonl", "out.jsonl"])
@pytest.mark.parametrize("asked", [{}, {"resume": True}, {"force": True}])
def test_an_input_is_never_the_output(
    tiny_llm: LLM, tmp_path: Path, name: str, asked: dict[str, bool]
) -> None:
    text = '{"text": "the cat"}\n'
    (tmp_path / "in.jsonl").write_text(text)
    (tmp_path / "link.jsonl").symlink_to(tmp_path / "in.jsonl")
    (tmp_path / "out.jsonl.errors.jsonl").write_text(text)  # of an earlier run
    with pytest.raises(OutputError, match="is read as input"):
        score_dataset(tiny_llm, tmp_path / "*.jsonl", tmp_path / name, **asked)
    with pytest.raises(OutputError, match="is read as input"):
        score_dataset(tiny_llm, tmp_path, tmp_path / name, **asked)
    assert (tmp_path / "in.jsonl").read_text() == text


def test_a_full_disk_is_one_line_and_loses_nothing(
    tiny_llm: LLM, write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write([{"text": f"the cat {i}"} for i in range(600)], "jsonl")
    monkeypatch.setattr("logprobe.analysis.io.journal.ROWS_A_PART", 256)
    monkeypatch.setattr("logprobe.analysis.io.journal.SECONDS_A_PART", math.inf)
    plain, count = os.fsync, iter(range(100))

    def full(descriptor: int) -> None:
        if next(count) == 5:
            raise OSError(28, "No space left on device")
        plain(descriptor)

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OutputError, match=r"cannot be written \(No space left on device\)"):
        score_dataset(tiny_llm, source, tmp_path / "o.parquet")
    monkeypatch.undo()
    with pytest.raises(InputError, match="was interrupted; use resume=True"):
        score_dataset(tiny_llm, source, tmp_path / "o.parquet")
    assert score_dataset(tiny_llm, source, tmp_path / "o.parquet", resume=True).num_rows == 600
    assert [row["row"] for row in rows_of(tmp_path / "o.parquet")] == list(range(600))


def test_a_continuation_is_scored_whole_or_a_bad_row(tiny_llm: LLM, write: Any, tmp_path: Path) -> None:
    source = write([{"c": "the " * n + "cat", "text": " dog"} for n in (1, 2, 3, 4)], "jsonl")
    settings = DataSettings(context_column="c", truncation="window", window=4, stride=4, tokens=True)
    summary = score_dataset(tiny_llm, source, tmp_path / "out.jsonl", settings=settings)
    rows = rows_of(tmp_path / "out.jsonl")
    assert {row["num_bytes"] for row in rows} == {len(" dog")}
    assert summary.num_bad == 4 - len(rows) > 0
    assert "stride: must be less than the window" in (tmp_path / "out.jsonl.errors.jsonl").read_text()


@pytest.mark.parametrize("name", ["row", "logprob"])
def test_a_column_is_not_kept_under_the_name_of_a_number(
    tiny_llm: LLM, write: Any, tmp_path: Path, name: str
) -> None:
    source = write([{"text": "the cat", name: "mine"}], "jsonl")
    with pytest.raises(ParameterError) as error:
        score_dataset(tiny_llm, source, tmp_path / "out.jsonl", settings=DataSettings(keep_columns=(name,)))
    assert error.value.parameter == "keep_columns"
    assert not list(tmp_path.glob("out*"))


def test_neither_files_nor_sums_depend_on_how_the_rows_came_in_parts(
    tiny_llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"text": f"the cat {i} and a dog"}) + "\n" for i in range(1500)))
    monkeypatch.setattr("logprobe.analysis.io.journal.ROWS_A_GROUP", 700)
    found = []
    for number, seconds in enumerate((float("inf"), 0.0)):  # parts of a thousand rows, then one per batch
        monkeypatch.setattr("logprobe.analysis.io.journal.SECONDS_A_PART", seconds)
        path = tmp_path / f"{number}.parquet"
        found.append((score_dataset(tiny_llm, str(source), path), path.read_bytes()))
    assert found[0] == found[1]
    assert pq.ParquetFile(tmp_path / "0.parquet").num_row_groups == 3
