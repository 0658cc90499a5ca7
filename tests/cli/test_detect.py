"""`logprobe score --detect`: the measures of texts, files and rows."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from logprobe.analysis import DataSettings, measures, score_dataset

if TYPE_CHECKING:
    from pathlib import Path

    from logprobe import LLM

TEXTS = ["the cat and the dog, 12 é 🌊", "a dog\nin a cat", "the the the the the the", "the end of it"]


@pytest.fixture
def labelled(tmp_path: Path) -> Path:
    path = tmp_path / "in.jsonl"
    rows = [{"text": text, "seen": label} for text, label in zip(TEXTS, (1, 0, True, False), strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_text_a_file_and_rows_have_the_same_numbers(
    cli: Any, tiny_llm: LLM, tiny_model_folder: Path, labelled: Path, tmp_path: Path
) -> None:
    settings = DataSettings(detect=True, label_column="seen")
    summary = score_dataset(tiny_llm, labelled, tmp_path / "out.jsonl", settings=settings)
    row = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[0])
    want = {name: row[name] for name in measures.DETECTIONS}
    model = ("--model", str(tiny_model_folder))
    (tmp_path / "one.txt").write_text(TEXTS[0])
    text = ("--text", TEXTS[0])
    for source in (text, (str(tmp_path / "one.txt"),), (*text, "--window", "120")):
        found = json.loads(cli("score", *source, "--json", "--detect", *model).out)["detect"]
        assert found == pytest.approx(want, abs=1e-5)
    lines = cli("score", "--text", TEXTS[0], "--detect", *model).out.splitlines()
    assert [line.split()[0] for line in lines[-4:]] == list(measures.DETECTIONS)
    done = cli("dataset", str(labelled), "--detect", "--label-column", "seen", *model)
    first = json.loads(done.out.splitlines()[0])
    assert {name: first[name] for name in want} == pytest.approx(want, abs=1e-5)
    assert first["label"] is True
    told = dict(line.rsplit(maxsplit=1) for line in done.err.splitlines() if line.startswith("auc "))
    assert summary.auc is not None
    got = {name.split()[1]: float(value) for name, value in told.items()}
    assert got == pytest.approx(summary.auc, abs=1e-4)


def test_who_does_not_ask_gets_none(cli: Any, tiny_model_folder: Path) -> None:
    found = json.loads(cli("score", "--text", "the cat", "--json", "--model", str(tiny_model_folder)).out)
    assert "detect" not in found
