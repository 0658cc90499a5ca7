"""Parts of an output: numbers of a single model per file, and no leftovers of a run that wrote none."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from logprobe.analysis import DataSettings
from logprobe.analysis.datasets.run import Summary
from logprobe.analysis.datasets.tasks import schema_of
from logprobe.analysis.io.journal import Journal
from logprobe.errors import InputError, OutputError

if TYPE_CHECKING:
    from pathlib import Path

ASKED = {"inputs": ["in.jsonl"], "text_column": "text"}
OURS = {"model": "m", "weights": "float32 published"}
THEIRS = {"model": "m", "weights": "bfloat16 plain"}


def journal(folder: Path, *, resume: bool = True, **known: str) -> Journal[Summary]:
    schema = schema_of(DataSettings())
    return Journal(folder / "o.parquet", schema, ASKED | known, Summary, resume=resume, force=False)


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    """The folder of a run that learns from its first row which model produced it."""
    with journal(tmp_path, resume=False) as run:
        run.agree(OURS)
        rows = [{"row": 0, "logprob": -1.0}]
        run.write(1, pa.Table.from_pylist(rows, schema_of(DataSettings())), [], None)
        run.agree(OURS)
        with pytest.raises(
            InputError, match="weights is 'bfloat16 plain', but earlier rows have 'float32 published'"
        ):
            run.agree(THEIRS)
    return tmp_path


def test_what_gave_the_first_rows_is_noted_beside_them(begun: Path) -> None:
    noted: Any = json.loads((begun / "o.parquet.parts/settings.json").read_text())
    assert noted == {"version": 1, "settings": ASKED | OURS}


def test_a_run_goes_on_with_the_same_model_however_late_it_is_known(begun: Path) -> None:
    with journal(begun, **OURS) as run:
        assert run.num_done == 1
    with journal(begun) as late:
        late.agree(OURS)
        with pytest.raises(InputError, match="but earlier rows have 'float32 published'"):
            late.agree(THEIRS)
    with pytest.raises(InputError, match=r"had different settings \(weights\)"):
        journal(begun, **THEIRS)


def test_a_run_that_wrote_nothing_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), journal(tmp_path, resume=False):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_cannot_begin_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("logprobe.analysis.io.journal.write_durably", full)
    with pytest.raises(OutputError, match="No space left"):
        journal(tmp_path, resume=False)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_may_not_resume_keeps_the_parts(begun: Path) -> None:
    files = sorted(begun.rglob("*"))
    with pytest.raises(InputError, match="an earlier run was interrupted"):
        journal(begun, resume=False)
    assert sorted(begun.rglob("*")) == files


HOLD = """
import sys
from pathlib import Path
from logprobe.analysis import DataSettings
import pyarrow as pa
from logprobe.analysis.datasets.run import Summary
from logprobe.analysis.datasets.tasks import schema_of
from logprobe.analysis.io.journal import Journal

asked = {"inputs": ["in.jsonl"], "text_column": "text"}
schema = schema_of(DataSettings())
with Journal(Path(sys.argv[1]), schema, asked, Summary, resume=True, force=False) as run:
    run.write(2, pa.Table.from_pylist([{"row": 1, "logprob": -2.0}], schema), [], None)
    print("has it", flush=True)
    sys.stdin.read()
"""


def test_two_processes_never_write_one_output(begun: Path) -> None:
    output = begun / "o.parquet"
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(output)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert other.stdin is not None
    assert other.stdout is not None
    try:
        assert other.stdout.readline() == b"has it\n"
        for resume, force in ((True, False), (False, False), (False, True)):
            with pytest.raises(InputError, match="another process is writing it"):
                Journal(output, schema_of(DataSettings()), ASKED, Summary, resume=resume, force=force)
    finally:
        other.communicate()
    assert other.returncode == 0
    with journal(begun) as run:
        assert run.num_done == 2


def test_a_killed_process_leaves_its_output_to_the_next(begun: Path) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(begun / "o.parquet")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert other.stdout is not None
    try:
        assert other.stdout.readline() == b"has it\n"
    finally:
        other.kill()
        other.communicate()
    with journal(begun) as run:
        assert run.num_done == 2


@pytest.mark.parametrize("name", ["000000000000-000000000003.parquet", "000000000002-000000000003.parquet"])
def test_parts_that_do_not_follow_one_another_are_refused_when_they_are_read(begun: Path, name: str) -> None:
    parts = begun / "o.parquet.parts"
    with journal(begun) as run:
        shutil.copyfile(parts / "000000000000-000000000001.parquet", parts / name)
        with pytest.raises(InputError, match=r"start again"):
            list(run.groups())
    with pytest.raises(InputError, match=r"start again"):
        journal(begun)


def damaged_part(folder: Path) -> None:
    part = next(folder.glob("*.parquet"))
    part.write_bytes(part.read_bytes()[:-20])


def damaged_settings(folder: Path, data: bytes) -> None:
    (folder / "settings.json").write_bytes(data)


DAMAGE = {
    "a part cut short": damaged_part,
    "a part of no bytes": lambda folder: next(folder.glob("*.parquet")).write_bytes(b""),
    "a part of other columns": lambda folder: pq.write_table(
        pa.table({"a": [1]}), next(folder.glob("*.parquet"))
    ),
    "a part of another name": lambda folder: (folder / "x.parquet").write_bytes(b""),
    "settings cut short": lambda folder: damaged_settings(folder, b'{"a"'),
    "settings that are a list": lambda folder: damaged_settings(folder, b"[]"),
    "settings that are nested deeply": lambda folder: damaged_settings(folder, b"[" * 100_000),
    "settings that are no UTF-8": lambda folder: damaged_settings(folder, b"\xff\xfe"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_run_to_resume_that_is_damaged_is_refused_by_the_files_name(begun: Path, name: str) -> None:
    DAMAGE[name](begun / "o.parquet.parts")

    def resume() -> None:
        with journal(begun) as run:
            list(run.groups())

    with pytest.raises(InputError, match=r"o\.parquet\.parts.*use force"):
        resume()
