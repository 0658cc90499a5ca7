"""What lies on the disk of each model: told by its folder, or by its name where that is not known."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from huggingface_hub import constants

from logprobe.errors import InputError
from logprobe.models import cache
from logprobe.models.stored import disk, identity

if TYPE_CHECKING:
    from pathlib import Path

SOURCE, OTHER_SOURCE, DIGEST = ("0" * 16, "1" * 16, "a" * 16)
COMMIT = "0123456789" * 4


def write(folder: Path, num_bytes: int, name: str = "file") -> Path:
    """A folder with one file."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(bytes(num_bytes))
    return folder


def half_made(entry: Path) -> Path:
    return entry.with_name(f".{entry.name}.partial")


def test_a_model_of_the_cache_has_its_files_and_all_that_was_ever_made_of_it(home: Path) -> None:
    folder = write(home / "models" / "own-0123456789abcdef-c2", 1000)
    converted_again = [
        write(home / kind / f"{folder.name}-{source}-{DIGEST}", num_bytes)
        for kind, source, num_bytes in [
            ("panels", SOURCE, 4),
            ("loads", SOURCE, 7),
            ("loads", OTHER_SOURCE, 8),
        ]
    ]
    write(home / "loads" / f"{folder.name}-else-{SOURCE}-{DIGEST}", 10_000)
    (home / "loads" / ".any.lock").touch()
    one = disk.of_folder(folder)
    assert one == disk.OnDisk(folder, (folder, *converted_again))
    assert (one.files_bytes, one.panels_bytes, one.records_bytes) == (1000, 4, 15)
    assert one.size_bytes == 1019


def test_what_was_left_half_made_counts_and_goes_with_its_entry(home: Path) -> None:
    folder = home / "models" / "own-0123456789abcdef-c2"
    write(half_made(folder) / "fetched" / "wheels", 500)
    packed = home / "panels" / f"{folder.name}-{SOURCE}-{DIGEST}"
    write(half_made(packed), 60)
    one = disk.of_folder(folder)
    assert one == disk.OnDisk(None, (folder, packed))
    assert (one.files_bytes, one.panels_bytes, one.records_bytes) == (500, 60, 0)
    for entry in one.entries:
        cache.remove_entry(entry)
    assert not [path for path in home.rglob("*") if path.is_file() and path.suffix != ".lock"]


@pytest.mark.parametrize("name", ["tiny", "a model [of] mine", "n" * 60])
def test_a_folder_elsewhere_has_what_was_made_of_its_files(home: Path, tmp_path: Path, name: str) -> None:
    own = write(tmp_path / "here" / name, 100, "model.safetensors")
    other = write(tmp_path / "there" / name, 101, "model.safetensors")
    made = [
        write(place(folder, identity.source_key(folder)), 5)
        for folder in (own, other)
        for place in (identity.panels_folder, identity.record_folder)
    ]
    older = write(made[1].with_name(f"{made[1].name[:-16]}{DIGEST}"), 6)  # by other code
    one = disk.of_folder(own)
    assert one.folder == own
    assert sorted(one.entries) == sorted([*made[:2], older])
    assert (one.files_bytes, one.panels_bytes, one.records_bytes) == (100, 5, 11)
    assert disk.left_by_others([]).keys() == {name[:40]}
    assert sorted(disk.left_by_others([])[name[:40]].entries) == sorted([*made, older])
    assert home in made[0].parents


def test_a_folder_that_cannot_be_read_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def source_key(folder: Path) -> str:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(identity, "source_key", source_key)
    with pytest.raises(InputError, match=rf"{tmp_path}: cannot be read \(Permission denied\)"):
        disk.of_folder(tmp_path)


def test_what_others_left_goes_by_their_names(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot = write(tmp_path / "hub" / "models--owner--model" / "snapshots" / COMMIT, 900)
    unknown = COMMIT[::-1]
    kept = home / "models" / "own-0123456789abcdef-c2"
    write(home / "loads" / f"{kept.name}-{SOURCE}-{DIGEST}", 1)
    left = {
        unknown: [write(home / "loads" / f"{unknown}-{SOURCE}-{DIGEST}", 1)],
        "own-0123456789abcdef-c1": [write(home / "models" / "own-0123456789abcdef-c1", 1)],
        "tiny": [
            write(home / kind / f"tiny-{source}-{DIGEST}", 1)
            for kind, source in [("panels", SOURCE), ("panels", OTHER_SOURCE), ("loads", SOURCE)]
        ],
    }
    hub = [write(home / kind / f"{COMMIT}-{SOURCE}-{DIGEST}", 20) for kind in ("panels", "loads")]
    found = disk.left_by_others([kept])
    assert found.pop("owner/model") == disk.OnDisk(snapshot, tuple(hub))
    assert found == {name: disk.OnDisk(None, tuple(entries)) for name, entries in left.items()}
    assert [*found] == sorted(found)
    assert found["tiny"].files_bytes is None
    assert found["own-0123456789abcdef-c1"].files_bytes == 1


def test_an_empty_cache_holds_nothing_and_is_not_made(home: Path) -> None:
    folder = home / "models" / "own-0123456789abcdef-c2"
    assert disk.of_folder(folder) == disk.OnDisk(None, ())
    assert disk.left_by_others([folder]) == {}
    assert not home.exists()
