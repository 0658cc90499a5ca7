"""A first load that was interrupted, at any moment: the next one goes on or begins anew, and tells no lie."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from logprobe.kernels.layers.forms import PanelWeights, pack_floats
from logprobe.models.cache import new_entry
from logprobe.models.stored import panels as panels_module
from logprobe.models.stored.panels import INDEX, LINES, ON_DISK, PANELS, read_panels, write_panels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

PARTS = [("embedding", "head"), ("first",), ("second",), ("third",)]
NUM_KILLS = 4


def weights() -> list[PanelWeights]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(100, 40), (48, 64), (50, 40), (96, 32)]
    return [pack_floats(torch.randn(*shape, generator=generator).bfloat16()) for shape in shapes]


def packed(start: int) -> Iterator[PanelWeights]:
    return iter(weights()[start:])


def interrupted(after: int) -> Callable[[int], Iterator[PanelWeights]]:
    """Stops when so many have been packed."""

    def pack(start: int) -> Iterator[PanelWeights]:
        yield from weights()[start:after]
        raise KeyboardInterrupt

    return pack


def write_entry(entry: Path, pack: Callable[[int], Iterator[PanelWeights]]) -> None:
    with new_entry(entry, resumes=True) as partial:
        assert partial is not None
        write_panels(PARTS, pack, partial)


def bytes_of(folder: Path) -> tuple[bytes, Any]:
    return (folder / PANELS).read_bytes(), json.loads((folder / INDEX).read_text(encoding="utf-8"))


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """Panels that were written in one go."""
    folder = tmp_path / "whole"
    folder.mkdir()
    write_panels(PARTS, packed, folder)
    return folder


@pytest.mark.parametrize("after", range(5))
def test_an_interrupted_file_is_gone_on_with(whole: Path, tmp_path: Path, after: int) -> None:
    entry = tmp_path / "entry"
    with pytest.raises(KeyboardInterrupt):
        write_entry(entry, interrupted(after))
    assert not entry.exists()
    starts: list[int] = []

    def noting(start: int) -> Iterator[PanelWeights]:
        starts.append(start)
        return packed(start)

    write_entry(entry, noting)
    assert starts == [after]
    assert bytes_of(entry) == bytes_of(whole)
    assert sorted(read_panels(entry)) == ["embedding", "first", "head", "second", "third"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / LINES).write_bytes((folder / LINES).read_bytes()[:-9]),
        lambda folder: os.truncate(folder / PANELS, (folder / PANELS).stat().st_size - 1),
        lambda folder: (folder / LINES).write_bytes(b"nonsense\n"),
        lambda folder: (folder / LINES).unlink(),
        lambda folder: (folder / PANELS).write_bytes((folder / PANELS).read_bytes() + b"of the next one"),
    ],
)
def test_what_an_interruption_cut_off_is_written_again(
    whole: Path, tmp_path: Path, damage: Callable[[Path], Any]
) -> None:
    folder = tmp_path / "partial"
    folder.mkdir()
    with pytest.raises(KeyboardInterrupt):
        write_panels(PARTS, interrupted(2), folder)
    damage(folder)
    write_panels(PARTS, packed, folder)
    assert bytes_of(folder) == bytes_of(whole)


def test_what_was_written_before_the_machine_was_started_anew_is_not_gone_on_with(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "partial"
    folder.mkdir()
    with pytest.raises(KeyboardInterrupt):
        write_panels(PARTS, interrupted(2), folder)
    monkeypatch.setattr(panels_module, "boot_id", lambda: "another")
    with pytest.raises(KeyboardInterrupt):
        write_panels(PARTS, interrupted(0), folder)
    assert (folder / PANELS).stat().st_size == 0
    assert read_panels(whole) == {}  # it may not have reached the disk


def test_panels_that_have_reached_the_disk_outlive_the_machine(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_panels(whole)
    assert not (whole / ON_DISK).exists()
    os.utime(whole / INDEX, (0, 0))
    assert read_panels(whole)
    assert (whole / ON_DISK).exists()
    monkeypatch.setattr(panels_module, "boot_id", lambda: "another")
    assert read_panels(whole)


def test_panels_that_cannot_be_noted_as_on_the_disk_are_used_all_the_same(
    whole: Path, tmp_path: Path
) -> None:
    os.utime(whole / INDEX, (0, 0))
    (whole / ON_DISK).symlink_to(tmp_path / "no folder" / "file")  # cannot be made, whoever runs this
    assert len(read_panels(whole)) == 5
    assert not (whole / ON_DISK).exists()


def test_where_the_system_does_not_tell_its_starts_apart_a_load_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(panels_module, "boot_id", lambda: "")
    with pytest.raises(KeyboardInterrupt):
        write_panels(PARTS, interrupted(2), tmp_path)
    write_panels(PARTS, packed, tmp_path)
    assert (tmp_path / ON_DISK).exists()
    assert len(read_panels(tmp_path)) == 5


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    entry = tmp_path / "entry"

    def full(start: int) -> Iterator[PanelWeights]:
        yield weights()[start]
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left on device"):
        write_entry(entry, full)
    assert [path.name for path in tmp_path.iterdir()] == [".entry.lock"]


KILLED = """
import json, os, shutil, signal, sys
from unittest import mock

import torch

from logprobe import LLM, SamplingParams
from logprobe.engine.forward.native import NativeForward
from logprobe.models import cache
from logprobe.models.stored import panels, record, store

folder, num_kills = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)


def numbers():
    # The engine runs in this thread alone, so that a child can be forked once more.
    with LLM(folder, kv_bytes=1 << 21, weights="published") as llm:
        output = llm.generate([[5, 6, 7, 8]], SamplingParams(max_tokens=3, temperature=0, logprobs=2))[0]
        return [(one, entry.logprob) for row in output.outputs[0].logprobs for one, entry in row.items()]


class Killing:
    def __init__(self, moments):
        self.moments = moments

    def around(self, function):
        def call(*args, **settings):
            self.tick()
            result = function(*args, **settings)
            self.tick()
            return result

        return call

    def tick(self):
        self.moments -= 1
        if not self.moments:
            os.kill(os.getpid(), signal.SIGKILL)


def run(moments):
    kill = Killing(moments)
    patches = [
        mock.patch.object(panels.zlib, "crc32", kill.around(panels.zlib.crc32)),
        mock.patch.object(panels, "_line", kill.around(panels._line)),
        mock.patch.object(cache.Path, "replace", kill.around(cache.Path.replace)),
        mock.patch.object(cache.Path, "unlink", kill.around(cache.Path.unlink)),
        mock.patch.object(store, "write_record", kill.around(store.write_record)),
        mock.patch.object(store, "read_panels", kill.around(store.read_panels)),
    ]
    for patch in patches:
        patch.start()
    said = numbers()
    return kill.moments, said


def in_child(moments):
    read, write = os.pipe()
    child = os.fork()
    if not child:
        left, said = run(moments)
        os.write(write, json.dumps([moments - left, said]).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status), text


def forget():
    shutil.rmtree(os.environ["LOGPROBE_HOME"], ignore_errors=True)


was_killed, text = in_child(0)
assert not was_killed
total, wanted = json.loads(text)
for number in range(num_kills):
    forget()
    moment = 1 + number * (total - 1) // (num_kills - 1)
    was_killed, _ = in_child(moment)
    assert was_killed, moment
    was_killed, text = in_child(0)
    assert not was_killed, moment
    assert json.loads(text)[1] == wanted, moment
print(total, "moments")
"""


def test_a_first_load_that_is_killed_at_any_moment_leaves_no_wrong_number(
    tiny_model_folder: Path, tmp_path: Path
) -> None:
    settings = {**os.environ, "LOGPROBE_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", KILLED, str(tiny_model_folder), str(NUM_KILLS)]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[0]) > NUM_KILLS
