"""Dataset runs that are killed and resumed: no row is lost or repeated."""

from __future__ import annotations

import itertools
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from logprobe import LLM
from logprobe.analysis import DataSettings, score_dataset
from logprobe.analysis.datasets.run import DatasetRun, OneModel
from logprobe.analysis.io.sources import find_sources
from logprobe.errors import InputError
from server_process import eventually

RUN = """
import sys
from logprobe import LLM
from logprobe.analysis import score_dataset
model, source, out = sys.argv[1:4]
with LLM(model, kv_cache_memory_bytes=1 << 21) as llm:
    score_dataset(llm, source, out, resume="--resume" in sys.argv)
"""


def test_a_run_killed_three_times_ends_as_one_that_was_not(
    tiny_llm: LLM, tiny_model_folder: Path, tmp_path: Path
) -> None:
    chance = random.Random(7)  # noqa: S311 - not a secret
    words = ["the", "cat", "and", "dog", "é", "🌊"]
    lines = [json.dumps({"text": " ".join(chance.choices(words, k=8))}) for _ in range(5000)]
    for place in (3, 1500, 4999):
        lines[place] = "{broken"
    source = tmp_path / "in.jsonl"
    source.write_text("\n".join(lines))
    out = tmp_path / "o.parquet"
    command = [sys.executable, "-c", RUN, str(tiny_model_folder), str(source), str(out), "--resume"]
    for num_new in (0, 1, 1):  # new parts, of at least five in total
        num_parts = len(parts_of(out)) + num_new
        with subprocess.Popen(command) as run:
            eventually(lambda: has_come_to(num_parts, out, run), "the run gets nowhere")  # noqa: B023 - at once
            time.sleep(chance.uniform(0, 0.5))
            run.send_signal(signal.SIGKILL)
        if out.exists():
            break
    if not out.exists():
        with pytest.raises(InputError, match=r"had different settings \(truncation\)"):
            score_dataset(tiny_llm, str(source), out, resume=True, settings=DataSettings(truncation="left"))
    with LLM(str(tiny_model_folder), kv_cache_memory_bytes=1 << 21) as llm:  # with the settings of `RUN`
        if not out.exists():
            score_dataset(llm, str(source), out, resume=True)
        score_dataset(llm, str(source), tmp_path / "whole.parquet")
    got, want = pq.read_table(out), pq.read_table(tmp_path / "whole.parquet")
    assert got.schema.equals(want.schema, check_metadata=True)
    for name in got.column_names:
        assert got[name].to_pylist() == want[name].to_pylist(), name  # bit for bit
    assert got.num_rows == 4997
    name = "o.parquet.errors.jsonl"
    assert (tmp_path / name).read_text() == (tmp_path / "whole.parquet.errors.jsonl").read_text()


def parts_of(out: Path) -> list[Path]:
    return list(out.with_name(f"{out.name}.parts").glob("*.parquet"))


def has_come_to(num_parts: int, out: Path, run: subprocess.Popen[bytes]) -> bool:
    """Return True if a run has written its settings and so many parts, or has ended."""
    has_begun = out.with_name(f"{out.name}.parts").joinpath("settings.json").exists()
    return (has_begun and len(parts_of(out)) >= num_parts) or run.poll() is not None


DYING = """
import os, signal, sys
from logprobe import LLM
from logprobe.analysis import score_dataset
from logprobe.analysis.io import journal

plain, writes = journal.pq.write_table, 0

def dying(table, path, **options):
    global writes
    writes += 1
    plain(table, path, **options)
    if writes == 3:
        os.truncate(path, 100)
        os.kill(os.getpid(), signal.SIGKILL)

journal.pq.write_table, journal.ROWS_A_PART, journal.SECONDS_A_PART = dying, 256, float("inf")
with LLM(sys.argv[1], kv_cache_memory_bytes=1 << 20) as llm:
    score_dataset(llm, sys.argv[2], sys.argv[3])
"""


def test_a_run_killed_while_it_writes_a_part_loses_that_part_alone(
    tiny_llm: LLM, tiny_model_folder: Path, tmp_path: Path
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "o.parquet"
    lines = [json.dumps({"text": f"the cat {i}"}) for i in range(1500)]
    lines[600] = "{broken"  # its part's side file exists, the part does not
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


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_a_run_that_dies_at_any_write_is_ended_by_its_next_resumption(
    tiny_llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    """When a rename is interrupted, the file is complete; after the last rename the run is finished."""
    monkeypatch.setattr("logprobe.analysis.io.journal.ROWS_A_PART", 256)
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"text": f"the cat {i}"}) + "\n" for i in range(400)) + "{broken\n")
    want = score_dataset(tiny_llm, str(source), tmp_path / f"whole.{suffix}")
    for number in itertools.count(1):
        out = tmp_path / f"{number}.{suffix}"
        with monkeypatch.context() as patch:
            _die_at(number, patch)
            try:
                score_dataset(tiny_llm, str(source), out)
            except KeyboardInterrupt:
                pass
            else:
                break
        was_finished = out.exists() and not out.with_name(f"{out.name}.parts").exists()
        run = DatasetRun(OneModel(tiny_llm, find_sources([str(source)]), DataSettings()))
        assert run.to_file(out, resume=True) == want
        assert run.was_finished == was_finished
        assert out.stat().st_size > 0
        again = DatasetRun(OneModel(tiny_llm, find_sources([str(source)]), DataSettings()))
        before = out.read_bytes()
        assert again.to_file(out, resume=True) == want
        assert again.was_finished
        assert out.read_bytes() == before
    assert number > 5


def _die_at(number: int, patch: pytest.MonkeyPatch) -> None:
    """Interrupt a run before its rename with this number."""
    left = itertools.count(1)

    def dying(rename: Any) -> Any:
        def renames(path: Path, target: Path) -> Any:
            if next(left) == number:
                raise KeyboardInterrupt
            return rename(path, target)

        return renames

    for name in ("replace", "rename"):
        patch.setattr(Path, name, dying(getattr(Path, name)))


def test_a_finished_run_is_resumed_with_its_own_settings_and_output_alone(
    tiny_llm: LLM, tmp_path: Path
) -> None:
    source, out = tmp_path / "in.txt", tmp_path / "o.parquet"
    source.write_text("the cat")
    score_dataset(tiny_llm, str(source), out)
    with pytest.raises(InputError, match=r"had different settings \(truncation\)"):
        score_dataset(tiny_llm, str(source), out, resume=True, settings=DataSettings(truncation="left"))
    with pytest.raises(InputError, match="exists; use force=True"):
        score_dataset(tiny_llm, str(source), out)
    out.write_bytes(b"somebody else's")
    with pytest.raises(InputError, match="exists; use force=True"):
        score_dataset(tiny_llm, str(source), out, resume=True)
    assert score_dataset(tiny_llm, str(source), out, force=True).num_rows == 1
    assert score_dataset(tiny_llm, str(source), out, resume=True).num_rows == 1
