"""`logprobe distil`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_the_command_writes_a_folder_and_tells_what_was_lost(
    cli: Callable[..., Any], tiny_model_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "the cat"}\n{"text": "the dog"}\n')
    flags = (str(tmp_path / "in.jsonl"), "--model", str(tiny_model_folder), "--logprobs", "8")
    out = ("--format", "axolotl", "-o", str(tmp_path / "out"))
    found = json.loads(cli("distil", *flags, *out, "--json").out)
    assert (found["num_rows"], found["num_bad"]) == (2, 0)
    assert 0 < found["lost_mass"] < found["max_lost_mass"] < 1
    assert (tmp_path / "out" / "data" / "train-00000-of-00001.parquet").exists()
    again = cli("distil", *flags, *out, "--resume")
    assert again.code == 0
    assert "the run has already finished" in again.err
    assert again.out.splitlines()[0].split() == ["num_rows", "2"]
    assert "exists" in cli("distil", *flags, *out).error_line
    assert cli("distil", *flags, "-o", str(tmp_path / "b"), "--format", "trl").code == 2
    assert "--logprobs" in cli("distil", *flags, "-o", str(tmp_path / "b"), "--logprobs", "0").error_line
    (tmp_path / "in.jsonl").write_text('{"text": 1}\n{"text": "the dog"}\n{"other": "x"}\n')
    bad = cli("distil", *flags, "-o", str(tmp_path / "b"))
    assert bad.code == 1
    assert "2 bad rows" in bad.err


@pytest.mark.parametrize("flag", ["--text-column", "--messages-column"])
def test_a_column_that_is_not_there_is_told_before_the_model_is_loaded(
    cli: Callable[..., Any], tmp_path: Path, flag: str
) -> None:
    (tmp_path / "in.jsonl").write_text('{"sentence": "the cat"}\n')
    asked = (str(tmp_path / "in.jsonl"), flag, "said", "--model", "no/such-model-anywhere")
    done = cli("distil", *asked, "-o", str(tmp_path / "out"))
    assert done.code == 1
    assert "has no column 'said'; it has 'sentence'" in done.error_line
    assert not (tmp_path / "out").exists()
