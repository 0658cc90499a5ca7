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
    assert lines[0] == "unit                    token"
    assert lines[3].split()[:3] == ["kl", "mean", "0"]
    assert cli("compare", model, model).code == 2
    assert "no such file" in cli("compare", model, model, "--data", "none.txt").error_line
    assert "max_batch_rows" in cli("compare", model, f"{model},max_batch_row=1", *flags).err
