"""The notes of a release come from the changelog, and only if tag, version and changelog agree."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import logprobe

if TYPE_CHECKING:
    from types import ModuleType

ROOT = Path(__file__).parents[2]
LOG = """# Changelog

## 0.2.0 - 2027-01-31

- **New**: one.

### Fixed

- two

## 0.1.0 - unreleased

- three

## 0.0.9 - 2026-01-01

"""


@pytest.fixture(scope="module")
def release_notes() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release_notes", ROOT / "release" / "notes.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_section_of_a_version_is_its_notes(release_notes: ModuleType) -> None:
    assert release_notes.notes("v0.2.0", LOG, "0.2.0") == "- **New**: one.\n\n### Fixed\n\n- two\n"


@pytest.mark.parametrize(
    ("tag", "version", "message"),
    [
        ("v0.2.0", "0.1.0", "v0.1.0"),
        ("v0.1.0", "0.1.0", "unreleased"),
        ("v0.0.9", "0.0.9", "no section"),
        ("v3.0.0", "3.0.0", "no section"),
        ("v0x2.0", "0x2.0", "no section"),
    ],
)
def test_a_release_that_is_not_ready_is_an_error(
    release_notes: ModuleType, tag: str, version: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        release_notes.notes(tag, LOG, version)


def test_the_changelog_has_a_section_for_the_version_of_the_package() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## {re.escape(logprobe.__version__)} - ", changelog, re.MULTILINE)
