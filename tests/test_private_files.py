"""Cached files are writable by their owner only, whatever the umask, and symbolic links are not followed."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from logprobe import LLM, private_files
from logprobe.analysis.datasets.run import Summary
from logprobe.analysis.io.journal import Journal
from logprobe.errors import DownloadError, InputError
from logprobe.models import cache
from logprobe.models.stored.store import LoadStore
from logprobe.private_files import claim, is_private, make_folder, write_private

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="files have no modes on Windows")
OTHER_USER = 54321


@pytest.fixture(autouse=True)
def _every_warning_is_new() -> None:
    private_files._told.clear()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOGPROBE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def _no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def modes(folder: Path) -> set[int]:
    found = [folder, *folder.rglob("*")]
    return {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in found if path.suffix != ".lock"}


def entry(home: Path) -> Path:
    with cache.new_entry(home / "panels" / "entry") as partial:
        assert partial is not None
        (partial / "folder").mkdir()
        (partial / "folder" / "file").write_text("whole")
    return home / "panels" / "entry"


@pytest.mark.usefixtures("_no_umask")
def test_a_cache_is_for_its_user_alone(home: Path) -> None:
    made = entry(home)
    path = home / "weights"
    path.write_bytes(b"weights")
    path.chmod(0o600)
    os.utime(path, (1, 1))
    assert cache.is_there(made)
    assert modes(home) == {0}


@pytest.mark.usefixtures("_no_umask")
def test_all_that_a_load_keeps_is_for_its_user_alone(home: Path, tiny_model_folder: Path) -> None:
    with LLM(str(tiny_model_folder), kv_cache_memory_bytes=1 << 21):
        pass
    assert {path.name for path in home.iterdir() if path.is_dir()} == {"panels", "loads"}
    assert all(
        cache.is_there(folder) for kind in ("panels", "loads") for folder in (home / kind).glob("[!.]*")
    )
    assert {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in home.rglob("*") if path.is_dir()} == {0}


@pytest.mark.parametrize("which", ["home", "kind", "entry", "file"])
def test_an_entry_that_others_may_write_is_ignored(
    home: Path, which: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = entry(home)
    file = made / "folder"
    made.chmod(0o755)
    path = {"home": home, "kind": made.parent, "entry": made, "file": file}[which]
    path.chmod(0o777)
    with caplog.at_level(logging.WARNING, "logprobe"):
        assert not cache.is_there(made)
        assert not cache.is_there(made)
    assert len(caplog.records) == 1


def test_an_entry_of_another_user_is_ignored_and_made_anew(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = entry(home)
    if os.geteuid() == 0:
        os.chown(made, OTHER_USER, OTHER_USER)
        assert not cache.is_there(made)
        assert entry(home) == made
        assert cache.is_there(made)
        assert made.stat().st_uid == 0
    else:
        monkeypatch.setattr(os, "geteuid", lambda: OTHER_USER)
        assert not cache.is_there(made)


def test_the_users_own_group_may_write(home: Path) -> None:
    made = entry(home)
    home.chmod(0o775)
    assert cache.is_there(made) == (home.stat().st_gid == os.geteuid())
    if os.geteuid() == 0:
        os.chown(home, 0, OTHER_USER)
        assert not cache.is_there(made)


def test_nothing_is_written_where_others_may_write(home: Path) -> None:
    (home / "panels").mkdir(parents=True)
    home.chmod(0o777)
    with pytest.raises(DownloadError):
        entry(home)
    assert [*(home / "panels").iterdir()] == []


def test_a_load_does_not_believe_what_others_may_have_written(home: Path, tiny_model_folder: Path) -> None:
    with LLM(str(tiny_model_folder), kv_cache_memory_bytes=1 << 21):
        pass
    store = LoadStore(tiny_model_folder)
    assert store.panels()
    assert store.record() is not None
    for kind in ("panels", "loads"):
        (home / kind).chmod(0o777)
    assert store.panels() == {}
    assert store.forms() == set()
    assert store.record() is None


def test_checksums_that_others_may_have_written_are_not_believed(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"file")
    os.utime(path, (1, 1))
    facts = path.stat()
    known = {str(path): [facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, "0" * 64]}
    home.mkdir()
    (home / cache.CHECKSUMS).write_text(json.dumps(known))
    assert cache.checksum_of(path) == "0" * 64
    (home / cache.CHECKSUMS).chmod(0o666)
    assert cache.checksum_of(path) == hashlib.sha256(b"file").hexdigest()


def test_links_are_not_followed(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("of somebody")
    for write in (lambda: write_private(link, b"new"), lambda: claim(link)):
        link.unlink(missing_ok=True)
        link.symlink_to(target)
        write()
        assert not link.is_symlink()
    assert target.read_text() == "of somebody"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def journal(output: Path, *, resume: bool = False, force: bool = False) -> Journal[Summary]:
    return Journal(output, pa.schema([]), {"a": 1}, Summary, resume=resume, force=force)


def test_the_parts_of_an_output_are_private(tmp_path: Path) -> None:
    target, parts = tmp_path / "target", tmp_path / "out.jsonl.parts"
    target.write_text("of somebody")
    with journal(tmp_path / "out.jsonl") as written:
        assert stat.S_IMODE(parts.stat().st_mode) == 0o700
        [settings] = parts.glob("*.json")
        (parts / f"{settings.name}.tmp").symlink_to(target)
        written.agree({"weight_version": "sha256:0"})
    assert "sha256:0" in settings.read_text()
    assert target.read_text() == "of somebody"
    parts.chmod(0o777)
    with pytest.raises(InputError):
        journal(tmp_path / "out.jsonl", resume=True)


def test_folders_are_made_with_their_parents(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b")
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700
    assert is_private(tmp_path / "a" / "b", tmp_path / "nothing")
