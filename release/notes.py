"""Print the section of CHANGELOG.md for a tag such as v0.1.0, which becomes the notes of the release.

Exits with an error if the tag is not the version of the package, or if the section is missing, empty or has
no date.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def notes(tag: str, changelog: str, version: str) -> str:
    """Return the section of a version in the changelog, without its title.

    Raises:
        ValueError: the tag and the version differ, or the changelog is not ready for the release.
    """
    if tag != f"v{version}":
        raise ValueError(f"the tag is {tag}, but the package has version {version}; tag v{version}")
    match = re.search(rf"^## {re.escape(version)} - (.+)\n((?:(?!## ).*\n)*)", changelog, re.MULTILINE)
    if match is None or not match[2].strip():
        raise ValueError(f"CHANGELOG.md has no section `## {version} - YYYY-MM-DD` with text; write it")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", match[1]):
        raise ValueError(f"CHANGELOG.md gives {match[1]!r} as the date of {version}; write YYYY-MM-DD")
    return match[2].strip() + "\n"


if __name__ == "__main__":
    source = (ROOT / "src" / "logprobe" / "_version.py").read_text("utf-8")
    [number] = re.findall(r'__version__ = "(.+)"', source)
    try:
        sys.stdout.write(notes(sys.argv[1], (ROOT / "CHANGELOG.md").read_text("utf-8"), number))
    except ValueError as error:
        sys.exit(f"error: {error}")
