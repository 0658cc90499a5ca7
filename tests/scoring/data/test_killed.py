"""Data sets whose run is killed: nothing is lost, and nothing stands twice."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest

from logprobe import LLM
from logprobe.errors import InputError
from logprobe.scoring import DataSettings, score_dataset
from server_process import eventually

if TYPE_CHECKING:
    from pathlib import Path

RUN = """
import sys
from logprobe import LLM
from logprobe.scoring import score_dataset
model, source, out = sys.argv[1:4]
with LLM(model, kv_bytes=1 << 21) as llm:
    score_dataset(llm, source, out, resume="--resume" in sys.argv)
"""


def test_a_run_killed_three_times_ends_as_one_that_was_not(
    tiny_llm: LLM, tiny_model_folder: Path, tmp_path: Path
) -> None:
    chance = random.Random(7)  # noqa: S311 - no secret
    words = ["the", "cat", "and", "dog", "é", "🌊"]
    lines = [json.dumps({"text": " ".join(chance.choices(words, k=8))}) for _ in range(5000)]
    for place in (3, 1500, 4999):
        lines[place] = "{broken"
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(lines))
    out = tmp_path / "o.parquet"
    command = [sys.executable, "-c", RUN, str(tiny_model_folder), str(source), str(out), "--resume"]
    for num_new in (0, 1, 1):  # parts, of which there are five or more
        num_parts = len(parts_of(out)) + num_new
        with subprocess.Popen(command) as run:
            eventually(lambda: has_come_to(num_parts, out, run), "the run gets nowhere")  # noqa: B023 - at once
            time.sleep(chance.uniform(0, 0.5))
            run.send_signal(signal.SIGKILL)
        if out.exists():
            break
    if not out.exists():
        with pytest.raises(InputError, match="had another truncation"):
            score_dataset(tiny_llm, str(source), out, resume=True, settings=DataSettings(truncation="left"))
    with LLM(str(tiny_model_folder), kv_bytes=1 << 21) as llm:  # as `RUN` has it
        if not out.exists():
            score_dataset(llm, str(source), out, resume=True)
        score_dataset(llm, str(source), tmp_path / "whole.parquet")
    got, want = pq.read_table(out), pq.read_table(tmp_path / "whole.parquet")
    assert got.schema.equals(want.schema, check_metadata=True)
    for name in got.column_names:
        mine, theirs = got[name].to_pylist(), want[name].to_pylist()
        if isinstance(mine[0], float):  # what else a step holds may change a last bit
            assert mine == pytest.approx(theirs, rel=1e-4), name
        else:
            assert mine == theirs, name
    assert got.num_rows == 4997
    name = "o.parquet.errors.jsonl"
    assert (tmp_path / name).read_text() == (tmp_path / "whole.parquet.errors.jsonl").read_text()


def parts_of(out: Path) -> list[Path]:
    return list(out.with_name(f"{out.name}.parts").glob("*.parquet"))


def has_come_to(num_parts: int, out: Path, run: subprocess.Popen[bytes]) -> bool:
    """Whether a run has noted its settings and has so many parts, or has ended."""
    has_begun = out.with_name(f"{out.name}.parts").joinpath("settings.json").exists()
    return (has_begun and len(parts_of(out)) >= num_parts) or run.poll() is not None


DYING = """
import os, signal, sys
from logprobe import LLM
from logprobe.scoring import score_dataset
from logprobe.scoring.data import journal, run

plain, writes = journal.pq.write_table, 0

def dying(table, path, **options):
    global writes
    writes += 1
    plain(table, path, **options)
    if writes == 3:
        os.truncate(path, 100)
        os.kill(os.getpid(), signal.SIGKILL)

journal.pq.write_table, run.ROWS_A_PART, run.SECONDS_A_PART = dying, 256, float("inf")
with LLM(sys.argv[1], kv_bytes=1 << 20) as llm:
    score_dataset(llm, sys.argv[2], sys.argv[3])
"""


def test_a_run_killed_while_it_writes_a_part_loses_that_part_alone(
    tiny_llm: LLM, tiny_model_folder: Path, tmp_path: Path
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "o.parquet"
    lines = [json.dumps({"text": f"the cat {i}"}) for i in range(1500)]
    lines[600] = "{broken"  # its part's side file is there, the part is not
    source.write_text("\n".join(lines))
    command = [sys.executable, "-c", DYING, str(tiny_model_folder), str(source), str(out)]
    died = subprocess.run(command, check=False, capture_output=True)
    assert died.returncode == -signal.SIGKILL
    parts = tmp_path / "o.parquet.parts"
    assert len(list(parts.glob("*.parquet"))) == 2
    assert len(list(parts.glob("*.tmp"))) == 1
    summary = score_dataset(tiny_llm, str(source), out, resume=True)
    assert (summary.num_rows, summary.num_bad) == (1499, 1)
    assert pq.read_table(out)["row"].to_pylist() == [row for row in range(1500) if row != 600]
    errors = (tmp_path / "o.parquet.errors.jsonl").read_text().splitlines()
    assert [json.loads(line)["row"] for line in errors] == [600]
    assert not parts.exists()
