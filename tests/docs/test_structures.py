"""docs/structures.md names what there is."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "logprobe"
PAGE = (ROOT / "docs" / "structures.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL))


def is_path(word: str) -> bool:
    return "/" in word or word.endswith((".py", ".md", ".json", ".toml"))


def test_every_path_is_there() -> None:
    paths = {word.partition(":")[0] for named in NAMED for word in named.split() if is_path(word)}
    assert len(paths) > 1
    assert [path for path in sorted(paths) if not any((top / path).exists() for top in (SOURCE, ROOT))] == []


def test_every_name_stands_in_the_code() -> None:
    files = [*SOURCE.rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    code = "".join(file.read_text(encoding="utf-8") for file in files if file != Path(__file__))
    names = {named for named in NAMED if named.isidentifier()}
    assert len(names) > 1
    assert names - set(re.findall(r"\w+", code)) == set()


def test_every_room_is_listed() -> None:
    rooms = {path for path in SOURCE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert {f"{room.name}/" for room in rooms} <= set(NAMED)
