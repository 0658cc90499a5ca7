"""A first load that was interrupted, at any moment: the next one goes on or begins anew, and tells no lie."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from logprobe.kernels.layers.forms import PanelWeights, pack_floats
from logprobe.models.cache import new_entry
from logprobe.models.stored.panels import INDEX, JOURNAL, PANELS, read_panels, write_panels
from logprobe.models.stored.store import LoadStore

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
        lambda folder: (folder / JOURNAL).write_bytes((folder / JOURNAL).read_bytes()[:-9]),
        lambda folder: os.truncate(folder / PANELS, (folder / PANELS).stat().st_size - 1),
        lambda folder: (folder / JOURNAL).write_bytes(b"nonsense\n"),
        lambda folder: (folder / JOURNAL).unlink(),
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


def test_what_did_not_reach_the_disk_is_written_again(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "partial"
    folder.mkdir()
    with pytest.raises(KeyboardInterrupt):
        write_panels(PARTS, interrupted(3), folder)
    second = json.loads((whole / INDEX).read_text())["tensors"]["first"][-1]
    with (folder / PANELS).open("r+b") as file:  # a machine without power may leave zeros
        file.seek(second)
        file.write(bytes(64))
    starts: list[int] = []

    def noting(start: int) -> Iterator[PanelWeights]:
        starts.append(start)
        return packed(start)

    write_panels(PARTS, noting, folder)
    assert starts == [1]
    assert bytes_of(folder) == bytes_of(whole)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/fd")
def test_panels_are_on_the_disk_before_they_have_their_name(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGPROBE_HOME", str(tmp_path))
    fsync = os.fsync
    synced: list[tuple[str, int, int]] = []

    def noting(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        num_bytes = path.stat().st_size if path.is_file() else 0
        synced.append((path.name, num_bytes, len([*tmp_path.glob("panels/[!.]*")])))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    assert LoadStore(tiny_model_folder).write_panels(PARTS, packed)
    [entry] = tmp_path.glob("panels/[!.]*")
    sizes = {name: (entry / name).stat().st_size for name in (PANELS, INDEX)}
    assert synced == [
        (PANELS, sizes[PANELS], 0),
        (INDEX, sizes[INDEX], 0),
        (f".{entry.name}.partial", 0, 0),
        ("panels", 0, 1),
    ]


def test_a_disk_that_reports_an_error_leaves_no_panels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match="Input/output error"):
        write_entry(tmp_path / "entry", packed)
    assert [path.name for path in tmp_path.iterdir()] == [".entry.lock"]


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
from logprobe.kernels import threads
from logprobe.models import cache
from logprobe.models.stored import panels, store

folder, num_kills = sys.argv[1], int(sys.argv[2])
threads.set_num_threads(1)


def numbers():
    # The engine runs in this thread alone, so that a child can be forked once more.
    with LLM(folder, kv_cache_memory_bytes=1 << 21, weights="checkpoint") as llm:
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
        mock.patch.object(panels, "_encode", kill.around(panels._encode)),
        mock.patch.object(cache.Path, "replace", kill.around(cache.Path.replace)),
        mock.patch.object(cache.Path, "unlink", kill.around(cache.Path.unlink)),
        mock.patch.object(store, "save_tensors", kill.around(store.save_tensors)),
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
