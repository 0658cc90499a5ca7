"""First loads that share an empty cache, or whose cache is full: the numbers are those of any load."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from limited_command import limited_command
from logprobe import LLM
from logprobe.cli.app import run
from logprobe.kernels.layers.forms import PanelWeights, pack_floats
from logprobe.models.stored.panels import PANELS
from logprobe.models.stored.store import MAX_RECORDS, LoadStore

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NUM_PROCESSES = 3
LOAD = """
import logging, sys
logging.basicConfig(level=logging.WARNING)
from logprobe import LLM, SamplingParams
print("imported", flush=True)
sys.stdin.readline()
with LLM(sys.argv[1], kv_cache_memory_bytes=1 << 21) as llm:
    output = llm.generate([[5, 6, 7, 8]], SamplingParams(max_tokens=3, temperature=0, logprobs=2))[0]
    print([(one, entry.logprob) for row in output.outputs[0].logprobs for one, entry in row.items()])
"""


def entries(home: Path) -> list[Path]:
    """All that a cache holds but for locks, two levels deep."""
    found = [*home.iterdir(), *home.glob("*/*")]
    return sorted(path.relative_to(home) for path in found if path.suffix != ".lock")


def load(model: Path, home: Path, count: int) -> tuple[set[str], str]:
    """What so many processes that load at the same time say, and their warnings."""
    environment = os.environ | {
        "LOGPROBE_HOME": str(home),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = [sys.executable, "-c", LOAD, str(model)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    loads = [subprocess.Popen(command, env=environment, text=True, **pipes) for _ in range(count)]
    try:
        for one in loads:
            assert one.stdout is not None
            assert one.stdout.readline() == "imported\n"
        for one in loads:
            assert one.stdin is not None
            one.stdin.write("\n")
            one.stdin.flush()
        told = [one.communicate() for one in loads]
    finally:
        for one in loads:
            one.kill()
            one.communicate()
    assert [one.returncode for one in loads] == [0] * count, told
    return {out for out, _ in told}, "".join(err for _, err in told)


def test_first_loads_at_once_give_the_same_numbers_and_leave_one_whole_cache(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    alone, _ = load(tiny_model_folder, tmp_path / "alone", 1)
    numbers, warnings = load(tiny_model_folder, tmp_path / "home", NUM_PROCESSES)
    assert numbers == alone
    assert "WARNING" not in warnings
    assert entries(tmp_path / "home") == entries(tmp_path / "alone")
    before = {path: path.stat().st_ino for path in (tmp_path / "home").rglob("*")}
    later, warnings = load(tiny_model_folder, tmp_path / "home", 1)
    assert later == alone
    assert warnings == ""
    assert {path: path.stat().st_ino for path in (tmp_path / "home").rglob("*")} == before, "all was used"


def test_panels_that_another_process_wrote_meanwhile_are_used(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGPROBE_HOME", str(tmp_path))
    first, second = LoadStore(tiny_model_folder), LoadStore(tiny_model_folder)
    parts = [("a",), ("b",)]
    starts = []

    def packed(start: int) -> Iterator[PanelWeights]:
        starts.append(start)
        return iter([pack_floats(torch.ones(48, 32).bfloat16())] * (len(parts) - start))

    assert second.panels() == {}
    assert set(first.write_panels(parts, packed)) == {"a", "b"}
    assert set(second.write_panels(parts, packed)) == {"a", "b"}
    assert starts == [0]
    [file] = tmp_path.glob(f"panels/*/{PANELS}")
    file.write_bytes(bytes(file.stat().st_size))
    assert set(second.write_panels(parts, packed)) == {"a", "b"}
    assert set(first.write_panels(parts, packed)) == {"a", "b"}
    assert starts == [0, 0], "damaged ones are written again"


def test_as_many_records_are_kept_as_there_may_be(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Locks, and what another process is writing, are no records."""
    monkeypatch.setenv("LOGPROBE_HOME", str(tmp_path))
    LLM(str(tiny_model_folder), kv_cache_memory_bytes=1 << 21).close()
    [record] = (tmp_path / "loads").glob("[!.]*")
    for number in range(MAX_RECORDS):
        older = record.with_name(f"{record.name[:-4]}{number:04d}")
        shutil.copytree(record, older)
        os.utime(older, (number, number))
        older.with_name(f".{older.name}.lock").touch()
    partial = record.with_name(f".{record.name[:-4]}9999.partial")
    partial.mkdir()
    shutil.rmtree(record)
    LLM(str(tiny_model_folder), kv_cache_memory_bytes=1 << 21).close()
    kept = {one.name for one in (tmp_path / "loads").glob("[!.]*")}
    assert len(kept) == MAX_RECORDS
    assert record.name in kept
    assert partial.is_dir()


# Of the tiny model the record takes 8 kB, the panels 460.
@pytest.mark.parametrize("most_bytes", [2_000, 100_000])
def test_a_cache_without_room_costs_a_load_nothing_but_time(
    tiny_model_folder: Path,
    tmp_path: Path,
    most_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("resource", reason="Windows limits no file sizes")
    asked = ("score", "--text", "the cat and the dog", "--json", "--model", str(tiny_model_folder))
    home = tmp_path / "home"
    full = limited_command(*asked, most_bytes=most_bytes, LOGPROBE_HOME=str(home))
    assert full.returncode == 0, full.stderr
    [warning] = full.stderr.splitlines()[1:]
    assert str(home / "panels") in warning
    assert "LOGPROBE_HOME" in warning
    assert list(home.glob("panels/[!.]*")) == []
    assert list(home.rglob("*.partial")) == []
    monkeypatch.setenv("LOGPROBE_HOME", str(home))
    assert run(asked) == 0
    roomy = capsys.readouterr().out
    assert json.loads(roomy) == json.loads(full.stdout)
    assert len(list(home.glob("panels/[!.]*"))) == 1
    assert run(asked) == 0
    again = capsys.readouterr()
    assert (again.out, len(again.err.splitlines())) == (roomy, 1)
