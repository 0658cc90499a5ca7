"""Distillation of datasets: texts and conversations, resumed runs, and invalid rows."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from logprobe.analysis import DistilSettings, distil
from logprobe.analysis.distillation import run as runs
from logprobe.analysis.distillation.run import DistilRun
from logprobe.analysis.io.journal import Journal
from logprobe.analysis.io.sources import find_sources
from logprobe.errors import InputError, LogprobeError, OutputError, ParameterError

if TYPE_CHECKING:
    from pathlib import Path

    from logprobe import LLM
    from logprobe.analysis.distillation.settings import TrainingFormat

TEXTS = ["the cat and the dog, é 🌊", "the end of the cat and the dog", "x", "the cat"]
CONVERSATIONS: list[Any] = [
    [
        {"role": "user", "content": "the cat"},
        {"role": "assistant", "content": "and the dog"},
        {"role": "user", "content": "the end"},
        {"role": "assistant", "content": "x"},
    ],
    [
        {"role": "system", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c"},
    ],
]


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return written(tmp_path / "in.jsonl", [{"text": text} for text in TEXTS])


def rows_of(folder: Path) -> list[dict[str, Any]]:
    files = sorted((folder / "data").glob("train-*-of-*.parquet"))
    return [row for file in files for row in pq.read_table(file).to_pylist()]


def whole(llm: LLM, ids: list[int]) -> np.ndarray:
    """Return the model's whole rows after each of some tokens, (T, V)."""
    (score,) = llm.score([(ids[:1], [*ids[1:], ids[-1]])], logprobs=-1)
    assert score.record is not None
    size = llm.engine.capabilities().vocab_size
    return np.array([[row[i].logprob for i in range(size)] for row in score.record if row is not None])


def test_texts_get_the_best_tokens_after_each_of_theirs(tiny_llm: LLM, texts: Path, tmp_path: Path) -> None:
    summary = distil(tiny_llm, texts, tmp_path / "out", settings=DistilSettings(top=6))
    found = rows_of(tmp_path / "out")
    assert [row["row"] for row in found] == [0, 1, 2, 3]
    lost = []
    for row, text in zip(found, TEXTS, strict=True):
        ids = tiny_llm.text.encode(text).tolist()
        assert row["input_ids"] == ids
        assert row["positions"] == list(range(len(ids)))
        expected = whole(tiny_llm, ids)
        best = np.take_along_axis(expected, np.array(row["target_token_ids"]), axis=1)
        assert np.array(row["target_logprobs"]) == pytest.approx(best, abs=1e-5)
        assert best == pytest.approx(-np.sort(-expected, axis=1)[:, :6], abs=1e-5)
        lost += (1 - np.exp(best).sum(axis=1)).tolist()
    assert summary.num_rows == 4
    assert summary.num_positions == len(lost)
    assert summary.lost_mass == pytest.approx(np.mean(lost), abs=1e-5)
    assert summary.max_lost_mass == pytest.approx(max(lost), abs=1e-5)
    run = json.loads((tmp_path / "out" / "run.json").read_text())
    assert run["summary"]["lost_mass"] == summary.lost_mass
    assert run["settings"]["top"] == 6


def test_a_conversation_is_laid_out_once_and_a_row_a_turn(tiny_llm: LLM, tmp_path: Path) -> None:
    source = written(tmp_path / "in.jsonl", [{"m": messages} for messages in CONVERSATIONS])
    settings = DistilSettings(top=4, messages_column="m")
    summary = distil(tiny_llm, source, tmp_path / "out", settings=settings)
    found = rows_of(tmp_path / "out")
    assert [(row["row"], row["turn"]) for row in found] == [(0, 1), (0, 3), (1, 2)]
    assert summary.num_rows == 3
    edge = tiny_llm.text
    for row in found:
        messages = CONVERSATIONS[row["row"]][: row["turn"] + 1]
        laid_out = edge.tokenizer.apply_chat_template(messages, tokenize=False)
        before = edge.tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
        ids = edge.encode(laid_out, add_special_tokens=False).tolist()
        assert row["input_ids"] == ids
        # The rows that count predict the text of the turn itself.
        answer = [ids[place + 1] for place in row["positions"]]
        assert edge.vocabulary.bytes_of(answer).decode() == laid_out[len(before) :]
        expected = whole(tiny_llm, ids)[row["positions"]]
        best = np.take_along_axis(expected, np.array(row["target_token_ids"]), axis=1)
        assert np.array(row["target_logprobs"]) == pytest.approx(best, abs=1e-5)


@pytest.mark.parametrize("kind", ["distillkit", "axolotl"])
def test_a_turns_labels_are_its_own_tokens(kind: TrainingFormat, tiny_llm: LLM, tmp_path: Path) -> None:
    source = written(tmp_path / "in.jsonl", [{"m": json.dumps(messages)} for messages in CONVERSATIONS])
    settings = DistilSettings(top=4, messages_column="m")
    distil(tiny_llm, source, tmp_path / "plain", settings=settings)
    distil(tiny_llm, source, tmp_path / "out", settings=settings, format=kind)
    assert (tmp_path / "out" / "compression_config.yaml").exists() == (kind == "distillkit")
    for row, plain in zip(rows_of(tmp_path / "out"), rows_of(tmp_path / "plain"), strict=True):
        learnt = [place + 1 for place in plain["positions"]]
        labels = [row["input_ids"][place] if place in learnt else -100 for place in range(len(row["labels"]))]
        assert row["labels"] == labels
        assert row["input_ids"] == plain["input_ids"]


def test_bad_rows_are_named_and_the_others_are_written(tiny_llm: LLM, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"text": "the cat"}, {"text": 3}, {"text": "the cat " * 200}, {"other": 1}]
    source = written(tmp_path / "in.jsonl", [*rows, {"text": "x"}])
    summary = distil(tiny_llm, source, tmp_path / "out", settings=DistilSettings(top=4))
    assert (summary.num_rows, summary.num_bad) == (2, 3)
    bad = [
        json.loads(line) for line in (tmp_path / "out" / "data.parquet.errors.jsonl").read_text().splitlines()
    ]
    assert [line["row"] for line in bad] == [1, 2, 3]
    assert "set max_tokens" in bad[1]["error"]
    cut = distil(tiny_llm, source, tmp_path / "cut", settings=DistilSettings(top=4, max_tokens=20))
    assert (cut.num_rows, cut.num_bad) == (3, 2)
    assert max(len(row["input_ids"]) for row in rows_of(tmp_path / "cut")) == 20


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "must be a list of messages"),
        ("[", "the JSON text of one"),
        ([{"role": "user", "content": "a"}], "has no assistant message"),
        ([{"role": "assistant", "content": "a"}], "start with another role"),
        (3, "must be a list of messages"),
    ],
)
def test_a_conversation_that_teaches_nothing_is_a_bad_row(
    messages: Any, problem: str, tiny_llm: LLM, tmp_path: Path
) -> None:
    source = written(tmp_path / "in.jsonl", [{"m": messages}])
    summary = distil(tiny_llm, source, tmp_path / "out", settings=DistilSettings(messages_column="m"))
    assert (summary.num_rows, summary.num_bad, summary.lost_mass) == (0, 1, None)
    (bad,) = (tmp_path / "out" / "data.parquet.errors.jsonl").read_text().splitlines()
    assert problem in bad


class StoppedError(Exception):
    """Stops a run."""


def test_bad_rows_alone_are_written_in_parts_too(
    tiny_llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []

    def counted(journal: Journal[Any], end: int, table: Any, bad: list[Any], info: Any) -> None:
        sizes.append(len(bad))
        write(journal, end, table, bad, info)

    write = Journal.write
    monkeypatch.setattr(Journal, "write", counted)
    monkeypatch.setattr("logprobe.analysis.io.sources.ROWS_A_CALL", 1)
    monkeypatch.setattr("logprobe.analysis.io.journal.ROWS_A_PART", 2)
    source = written(tmp_path / "in.jsonl", [{"text": number} for number in range(5)])
    summary = distil(tiny_llm, source, tmp_path / "out")
    assert (summary.num_rows, summary.num_bad, sizes) == (0, 5, [2, 2, 1])
    errors = (tmp_path / "out" / "data.parquet.errors.jsonl").read_text().splitlines()
    assert [json.loads(line)["row"] for line in errors] == [0, 1, 2, 3, 4]


def stopping(after: int) -> Any:
    """Stop a run after so many batches."""
    left = iter(range(after))

    def advance(*_: int) -> None:
        if next(left, None) is None:
            raise StoppedError

    return advance


@pytest.mark.parametrize("kind", ["parquet", "distillkit", "axolotl"])
def test_a_run_that_was_stopped_is_resumed_without_a_row_lost_or_doubled(
    kind: TrainingFormat, tiny_llm: LLM, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = DistilSettings(top=4)
    monkeypatch.setattr(runs, "ENTRIES_A_GROUP", 1 << 10)
    monkeypatch.setattr(runs, "GROUPS_A_SHARD", 2)
    expected = distil(tiny_llm, texts, tmp_path / "whole", settings=settings, format=kind)
    monkeypatch.setattr("logprobe.analysis.io.sources.ROWS_A_CALL", 1)
    monkeypatch.setattr("logprobe.analysis.io.journal.BYTES_A_PART", 1)
    sources = find_sources([str(texts)])
    for after in (1, 2):
        run = DistilRun(tiny_llm, sources, settings, kind, advance=stopping(after))
        with pytest.raises(StoppedError):
            run.to_folder(tmp_path / "out", resume=after > 1)
    with pytest.raises(InputError, match="use resume=True"):
        distil(tiny_llm, texts, tmp_path / "out", settings=settings, format=kind)
    with pytest.raises(InputError, match=r"different settings \(top\)"):
        distil(tiny_llm, texts, tmp_path / "out", settings=DistilSettings(top=5), format=kind, resume=True)
    summary = distil(tiny_llm, texts, tmp_path / "out", settings=settings, format=kind, resume=True)
    assert summary == expected
    whole = {file.name: file.read_bytes() for file in (tmp_path / "whole" / "data").iterdir()}
    assert sorted(whole) == [
        f"train-{number:05d}-of-{len(whole):05d}.parquet" for number in range(len(whole))
    ]
    assert len(whole) > 1
    assert {file.name: file.read_bytes() for file in (tmp_path / "out" / "data").iterdir()} == whole
    assert rows_of(tmp_path / "out") == rows_of(tmp_path / "whole")
    assert not list((tmp_path / "out").glob("*.parts*"))


@pytest.mark.parametrize("rows_a_table", [1, 7, 1000])
def test_groups_and_sums_are_those_of_all_rows_at_once(
    rows_a_table: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries_a_group, groups_a_shard, top = 1 << 12, 3, 4
    monkeypatch.setattr(runs, "ENTRIES_A_GROUP", entries_a_group)
    monkeypatch.setattr(runs, "GROUPS_A_SHARD", groups_a_shard)
    rng = np.random.default_rng(0)
    counts, means, largest = rng.integers(0, 3000, 100), rng.random(100), rng.random(100)  # some fill a group
    outline = runs.DistilTally(top)
    for start in range(0, 100, rows_a_table):
        part = slice(start, start + rows_a_table)
        outline.add(pa.table(dict(zip(runs.MASSES, (counts[part], means[part], largest[part]), strict=True))))
    shards: dict[int, dict[int, int]] = {}
    total = 0
    for row, count in enumerate(counts.tolist()):
        total += count * top + runs.ENTRIES_A_ROW
        group = total // entries_a_group
        shards.setdefault(group // groups_a_shard, {})[group] = row + 1
    assert outline.shards() == [[*groups.values()] for groups in shards.values()]
    summary = outline.summary(5)
    assert (summary.num_rows, summary.num_bad, summary.num_positions) == (100, 5, counts.sum())
    assert summary.lost_mass == pytest.approx((counts * means).sum() / counts.sum())
    assert summary.max_lost_mass == largest.max()


def test_of_no_rows_there_is_one_file_and_no_mass() -> None:
    outline = runs.DistilTally(4)
    assert outline.shards() == [[]]
    summary = outline.summary(0)
    assert (summary.num_rows, summary.lost_mass, summary.max_lost_mass) == (0, None, None)


def test_a_finished_run_says_so_and_is_written_anew_by_force(
    tiny_llm: LLM, texts: Path, tmp_path: Path
) -> None:
    settings = DistilSettings(top=4)
    first = distil(tiny_llm, texts, tmp_path / "out", settings=settings)
    with pytest.raises(InputError, match="exists"):
        distil(tiny_llm, texts, tmp_path / "out", settings=settings)
    run = DistilRun(tiny_llm, find_sources([str(texts)]), settings)
    assert run.to_folder(tmp_path / "out", resume=True) == first
    assert run.was_finished
    with pytest.raises(InputError, match=r"different settings \(top\)"):
        distil(tiny_llm, texts, tmp_path / "out", settings=DistilSettings(top=5), resume=True)
    kept = tmp_path / "out" / "data" / "mine.txt"
    kept.write_text("mine")
    other = distil(tiny_llm, texts, tmp_path / "out", settings=DistilSettings(top=5), force=True)
    assert other.lost_mass is not None
    assert first.lost_mass is not None
    assert other.lost_mass < first.lost_mass
    assert kept.read_text() == "mine"


def test_a_run_that_has_just_ended_is_not_written_over(
    tiny_llm: LLM, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other run's parts exist when this one begins, and are removed before it has locked them."""
    settings = DistilSettings(top=4)
    distil(tiny_llm, texts, tmp_path / "out", settings=settings)
    written = rows_of(tmp_path / "out")
    parts = tmp_path / "out" / f"{runs.JOURNAL}.parts"

    def ended(*arguments: Any, **asked: Any) -> Any:
        parts.rmdir()
        return Journal(*arguments, **asked)

    monkeypatch.setattr(runs, "Journal", ended)
    for asked in ({}, {"resume": True}):
        parts.mkdir(0o700)
        with pytest.raises(InputError, match="exists" if not asked else r"different settings \(top\)"):
            distil(tiny_llm, texts, tmp_path / "out", settings=DistilSettings(top=5), **asked)
    assert rows_of(tmp_path / "out") == written
    assert not parts.exists()


@pytest.mark.parametrize("text", ["{", "[]", '{"settings": {}}', '{"settings": [], "summary": {}}'])
def test_a_folder_of_another_program_is_not_resumed(
    tiny_llm: LLM, texts: Path, tmp_path: Path, text: str
) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(InputError, match=r"run\.json"):
        distil(tiny_llm, texts, tmp_path, resume=True)
    assert (tmp_path / "run.json").read_text() == text


@pytest.mark.parametrize("asked", [{}, {"resume": True}, {"force": True}])
def test_a_file_in_the_place_of_the_folder_is_refused_and_stays(
    tiny_llm: LLM, texts: Path, tmp_path: Path, asked: dict[str, bool]
) -> None:
    taken = tmp_path / "out"
    taken.write_text("mine")
    with pytest.raises(OutputError, match="cannot be written"):
        distil(tiny_llm, texts, taken, **asked)
    assert taken.read_text() == "mine"


@pytest.mark.parametrize("asked", [{}, {"resume": True}, {"force": True}])
def test_an_input_is_never_the_output(tiny_llm: LLM, tmp_path: Path, asked: dict[str, bool]) -> None:
    source = tmp_path / "data" / "train-00000-of-00001.parquet"  # as in a folder of Hugging Face `datasets`
    source.parent.mkdir()
    pq.write_table(pa.table({"text": ["the cat"]}), source)
    before = source.read_bytes()
    with pytest.raises(OutputError, match="is read as input"):
        distil(tiny_llm, source, tmp_path, **asked)
    assert source.read_bytes() == before


def test_what_was_shared_before_a_kill_is_shared_again(
    tiny_llm: LLM, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "share", killed)
        with pytest.raises(KeyboardInterrupt):
            distil(tiny_llm, texts, tmp_path / "out")
    summary = distil(tiny_llm, texts, tmp_path / "out", resume=True)
    assert summary.num_rows == len(rows_of(tmp_path / "out")) == 4


def test_hugging_faces_datasets_open_the_folder(tiny_llm: LLM, texts: Path, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="Hugging Face's datasets are not installed")
    for kind in ("parquet", "distillkit", "axolotl"):
        distil(tiny_llm, texts, tmp_path / kind, format=kind)
        found = datasets.load_dataset(str(tmp_path / kind), split="train", cache_dir=str(tmp_path / "cache"))
        assert found["row"] == [0, 1, 2, 3]


def test_settings_that_cannot_be_are_refused() -> None:
    for settings, name in (
        ({"top": 0}, "top"),
        ({"top": 1 << 20}, "top"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages_column": "m", "max_tokens": 5}, "max_tokens"),
        ({"messages_column": "m", "bos": True}, "bos"),
    ):
        with pytest.raises(ParameterError) as caught:
            DistilSettings(**settings)
        assert caught.value.parameter == name


def test_another_format_is_refused(tiny_llm: LLM, texts: Path, tmp_path: Path) -> None:
    with pytest.raises(LogprobeError, match="must be one of"):
        distil(tiny_llm, texts, tmp_path / "out", format="trl")  # type: ignore[arg-type]


def test_more_than_the_vocabulary_is_the_vocabulary(tiny_llm: LLM, texts: Path, tmp_path: Path) -> None:
    summary = distil(tiny_llm, texts, tmp_path / "out", settings=DistilSettings(top=4096))
    assert summary.lost_mass == pytest.approx(0, abs=1e-6)
    size = tiny_llm.engine.capabilities().vocab_size
    assert {len(ids) for row in rows_of(tmp_path / "out") for ids in row["target_token_ids"]} == {size}
    assert math.isfinite(summary.max_lost_mass or 0)
