"""`logprobe dataset` and `distil` with `--resume`, after a full disk or Ctrl-C."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from limited_command import limited_command

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("resource", reason="Windows limits no file sizes")

RUNS: dict[str, tuple[str, ...]] = {
    "o.parquet": ("dataset", "--tokens"),
    "o.jsonl": ("dataset", "--tokens"),
    "o": ("distil", "--logprobs", "16"),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short rows, then long ones, which make larger parts; each half has one bad row."""
    path = tmp_path_factory.mktemp("data") / "in.jsonl"
    lines = [json.dumps({"text": f"the cat {index}"}) for index in range(600)]
    lines += [json.dumps({"text": f"the dog {index} " * 8}) for index in range(600)]
    lines[50] = lines[650] = "{broken"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module", params=RUNS)
def run(request: pytest.FixtureRequest, source: Path, tiny_model_folder: Path) -> Any:
    """A run into a folder by `limited_command`; `output` is the file's name there."""

    def started(folder: Path, *flags: str, **limits: Any) -> Any:
        command, *own = RUNS[request.param]
        words = (command, source, "--model", tiny_model_folder, "-o", folder / request.param, *own, *flags)
        return limited_command(*words, **limits)

    started.output = request.param  # type: ignore[attr-defined]
    return started


@pytest.fixture(scope="module")
def whole(run: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    done = run(folder)
    assert (done.returncode, done.stderr.splitlines()[-1][:17]) == (1, "error: 2 bad rows")
    return files_of(folder)


def files_of(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def main_file(files: dict[str, bytes]) -> str:
    return max(files, key=lambda name: len(files[name]))


def num_parts(files: dict[str, bytes]) -> int:
    return sum(".parts/" in name and name.endswith(".parquet") for name in files)


def check_resumes(run: Any, folder: Path, whole: dict[str, bytes]) -> None:
    done = run(folder, "--resume")
    assert (done.returncode, done.stderr.splitlines()[-1][:17]) == (1, "error: 2 bad rows")
    assert files_of(folder) == whole


@pytest.mark.parametrize("share", [4, 1], ids=["in a part", "at the end"])
def test_a_full_disk_is_one_error_and_costs_no_row(
    run: Any, whole: dict[str, bytes], tmp_path: Path, share: int
) -> None:
    most_bytes = len(whole[main_file(whole)]) // share - 1
    done = run(tmp_path, most_bytes=most_bytes)
    assert done.returncode == 1
    *_, error = done.stderr.splitlines()
    assert error.startswith(f"error: {tmp_path / run.output}")
    assert "File too large" in error
    assert "--resume" in error
    kept = files_of(tmp_path)
    assert num_parts(kept) > 0
    assert not [name for name in kept if name.endswith(".tmp")], "takes room that nobody uses"
    if share > 1:  # still no space
        assert run(tmp_path, "--resume", most_bytes=most_bytes).returncode == 1
        assert num_parts(files_of(tmp_path)) == num_parts(kept)
    check_resumes(run, tmp_path, whole)


def test_an_output_that_is_written_anew_stays_until_the_new_one_is_whole(
    run: Any, whole: dict[str, bytes], tmp_path: Path
) -> None:
    for name, data in whole.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(data)
    done = run(tmp_path, "--force", interrupted_at=3)
    assert done.returncode == 130
    assert files_of(tmp_path).items() >= whole.items()
    check_resumes(run, tmp_path, whole)


def test_ctrl_c_ends_with_130_and_says_how_to_go_on(
    run: Any, whole: dict[str, bytes], tmp_path: Path
) -> None:
    done = run(tmp_path, interrupted_at=3)
    assert (done.returncode, done.stdout) == (130, "")
    *talk, last = done.stderr.splitlines()
    assert all(line.startswith("loading ") for line in talk), talk
    assert last.startswith(f"{tmp_path / run.output}: interrupted")
    assert "--resume" in last
    assert num_parts(files_of(tmp_path)) == 2
    assert run(tmp_path, "--resume", interrupted_at=1).returncode == 130
    check_resumes(run, tmp_path, whole)


def test_ctrl_c_before_the_first_row_leaves_nothing(run: Any, tmp_path: Path) -> None:
    done = run(tmp_path, interrupted_at=1)
    assert done.returncode == 130
    assert done.stderr.splitlines()[-1].endswith("interrupted; no rows were stored")
    assert files_of(tmp_path) == {}
