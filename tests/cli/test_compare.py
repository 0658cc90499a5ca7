"""`logprobe compare` on models, settings and stored runs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TEXTS = ["the cat and the dog, é 🌊", "the end of the cat and the dog", "x"]


def test_the_command_prints_a_table_or_json(
    cli: Callable[..., Any], tiny_model_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "in.txt").write_text("\n".join(TEXTS))
    model = str(tiny_model_folder)
    flags = ("--data", str(tmp_path / "in.txt"), "--lines", "-o", str(tmp_path / "c.parquet"))
    found = json.loads(cli("compare", model, f"{model},dtype=bfloat16", *flags, "--json").out)
    assert found["kl"]["mean"] > 0
    assert pq.read_metadata(tmp_path / "c.parquet").num_rows == found["num_positions"]
    lines = cli("compare", model, model, *flags).out.splitlines()
    assert lines[0].split() == ["unit", "token"]
    assert lines[3].split()[:3] == ["kl", "mean", "0"]
    assert [line.split()[:3] for line in lines if line.startswith("Mean KLD")] == [
        ["Mean", "KLD", "0.000000"]
    ]
    assert [line.split()[3:] for line in lines if line.startswith("Same top p")] == [
        ["100.000000", "±", "0.000000", "%"]
    ]
    assert cli("compare", model, model).code == 2
    assert "no such file" in cli("compare", model, model, "--data", "none.txt").error_line
    assert "--limit" in cli("compare", model, model, *flags, "--limit", "-1").error_line
    assert "did you mean max-num-seqs?" in cli("compare", model, f"{model},max-num-seq=1", *flags).err


def test_an_output_that_cannot_be_written_fails_before_the_models_are_loaded(
    cli: Callable[..., Any], tmp_path: Path
) -> None:
    data, folder = tmp_path / "in.txt", tmp_path / "folder"
    data.write_text("the cat")
    folder.mkdir()
    for flag in ("-o", "--plot", "--save"):
        for path, reason in (
            (folder, "is a folder"),
            (tmp_path / "none" / "c", "the folder does not exist"),
            (data, "is read as input"),
        ):
            refused = cli("compare", "no/such-model", "--data", str(data), flag, str(path))
            assert (refused.code, f"{path}: {reason}" in refused.error_line) == (1, True)
    assert data.read_text() == "the cat"


def test_models_with_other_tokens_are_compared_by_word_and_the_command_says_so(
    cli: Callable[..., Any], tiny_model_folder: Path, tiny_window_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "in.txt").write_text("\n".join(TEXTS))
    flags = ("--data", str(tmp_path / "in.txt"), "--lines", "--json")
    shown = cli("compare", str(tiny_model_folder), str(tiny_window_folder), *flags)
    assert json.loads(shown.out)["unit"] == "word"
    assert "tokenizers differ" in shown.err
    assert "tokenizers differ" not in cli("compare", *[str(tiny_model_folder)] * 2, *flags).err


def test_a_baseline_is_saved_and_stands_for_the_model(
    cli: Callable[..., Any], tiny_model_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "in.txt").write_text("\n".join(TEXTS))
    model, base = str(tiny_model_folder), str(tmp_path / "base.lpkl")
    data = ("--data", str(tmp_path / "in.txt"), "--lines")
    facts = json.loads(cli("compare", model, "--save", base, *data, "--json").out)
    assert facts["num_texts"] == 3
    assert facts["num_bytes"] == (tmp_path / "base.lpkl").stat().st_size
    rough = f"{model},dtype=bfloat16"
    live = json.loads(cli("compare", model, rough, *data, "--json").out)
    for texts in ((), data):
        found = json.loads(cli("compare", base, rough, *texts, "--json").out)
        assert found["num_positions"] == facts["num_positions"]
        assert found["statistics"]["RMS Δp"] == live["statistics"]["RMS Δp"]
        assert abs(found["kl"]["mean"] - live["kl"]["mean"]) < 4 * found["kl_error"]
    assert "exists" in cli("compare", model, "--save", base, *data).error_line
    lines = cli("compare", model, "--save", str(tmp_path / "b.lpkl"), *data).out.splitlines()
    assert lines[0].split() == ["num_texts", "3"]
    assert "requires one model" in cli("compare", model, rough, "--save", base, *data).error_line
    assert "requires one model" in cli("compare", model, "--save", base).error_line
    assert "name the model" in cli("compare", base).error_line
    assert "cannot be read" in cli("compare", str(tmp_path / "none.lpkl"), model).error_line
