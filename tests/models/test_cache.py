from __future__ import annotations

import errno
import os
import select
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from logprobe.errors import ChecksumError, DownloadError
from logprobe.models import cache

if TYPE_CHECKING:
    from collections.abc import Iterator

SOON_S = 0.3  # that something is watched not to happen
HOLD = """
import sys
from logprobe.models.cache import entry_folder, new_entry
print("asking", flush=True)
with new_entry(entry_folder("held", "0" * 64)) as partial:
    if partial is None:
        print("found", flush=True)
    else:
        (partial / "half").write_text("half")
        print("writing", flush=True)
        sys.stdin.readline()
"""


def test_the_home_is_logprobe_home_when_set(home: Path) -> None:
    assert cache.home() == home


@pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="the XDG rule is for Linux")
def test_the_home_follows_the_xdg_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("LOGPROBE_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.home() == tmp_path / "logprobe"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.home() == Path.home() / ".cache" / "logprobe"


def entry() -> Path:
    return cache.entry_folder("held", "0" * 64)


def write_half(error: Exception) -> None:
    with cache.new_entry(entry()) as partial:
        assert partial is not None
        (partial / "file").write_text("half")
        raise error


def names(home: Path) -> list[str]:
    return sorted(path.name for path in (home / "models").iterdir() if path.suffix != ".lock")


def test_an_entry_appears_when_its_block_ends_well(home: Path) -> None:
    with cache.new_entry(entry()) as partial:
        assert partial is not None
        (partial / "file").write_text("whole")
        assert not entry().exists()
    assert names(home) == [entry().name]
    assert cache.entries() == [entry()]
    assert cache.entry_size_bytes(entry()) == len("whole")
    with cache.new_entry(entry()) as again:
        assert again is None


def test_an_error_leaves_nothing_and_passes_through(home: Path) -> None:
    with pytest.raises(ChecksumError, match="wrong"):
        write_half(ChecksumError("wrong"))
    assert names(home) == []


def test_a_full_disk_is_a_download_error_that_names_the_remedy(home: Path) -> None:
    with (
        pytest.raises(DownloadError, match=r"No space left.*LOGPROBE_HOME") as caught,
        cache.new_entry(entry()),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert "\n" not in str(caught.value)
    assert names(home) == []


def write_to_full_device() -> None:
    with cache.new_entry(entry()) as partial:
        assert partial is not None
        (partial / "weights").symlink_to("/dev/full")
        (partial / "weights").write_bytes(b"x" * 10_000)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's always full device")
def test_a_write_that_finds_no_space_is_a_download_error(home: Path) -> None:
    with pytest.raises(DownloadError, match="No space left"):
        write_to_full_device()
    assert names(home) == []


def test_a_cache_that_is_a_file_is_a_download_error(home: Path) -> None:
    home.write_text("in the way")
    with pytest.raises(DownloadError, match="cannot write below"), cache.new_entry(entry()):
        pytest.fail("the block must not run")


@contextmanager
def holder(home: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that asks for the entry, and writes it until it is told to end."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD],
        env={**os.environ, "LOGPROBE_HOME": str(home)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert next_line(process) == "asking"
        yield process
    finally:
        process.kill()
        process.communicate()


def next_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_what_a_killed_process_left_is_cleared_by_the_next(home: Path) -> None:
    with holder(home) as process:
        assert next_line(process) == "writing"
        process.kill()
        process.wait()
    assert names(home) == [f".{entry().name}.partial"]
    assert cache.entries() == []
    with cache.new_entry(entry()) as partial:
        assert partial is not None
        assert list(partial.iterdir()) == []
    assert names(home) == [entry().name]


def test_a_second_process_waits_and_finds_the_entry(home: Path) -> None:
    with holder(home) as first:
        assert next_line(first) == "writing"
        with holder(home) as second:
            assert not select.select([second.stdout], [], [], SOON_S)[0], "it did not wait"
            first.communicate("end\n")
            assert next_line(second) == "found"
            assert (first.wait(), second.wait()) == (0, 0)
    assert names(home) == [entry().name]
