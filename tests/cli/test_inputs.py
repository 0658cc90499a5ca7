from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from logprobe.cli.inputs import STDIN, read_text
from logprobe.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_bytes_are_decoded_as_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes("\ufeffa\r\nb\x00é".encode())
    assert read_text(str(path)) == "\ufeffa\r\nb\x00é"


def test_standard_input_ends_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal that is read again after EOF waits for a second EOF."""
    reads = iter([b"the cat"])
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=SimpleNamespace(read=lambda _: next(reads))))
    assert read_text(STDIN) == "the cat"


def test_each_unreadable_file_is_named_with_a_remedy(cli: Callable[..., Any], tmp_path: Path) -> None:
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9")
    empty = tmp_path / "empty.txt"
    empty.touch()
    (tmp_path / "folder").mkdir()
    wrong = {
        str(latin): "is not UTF-8 text (byte 0xe9 at byte 3); convert it first",
        str(empty): "is empty; at least one character is required",
        str(tmp_path / "none.txt"): "no such file; use a text file, or - for standard input",
        str(latin / "below"): "cannot be read (Not a directory); use another file",
    }
    for name, message in wrong.items():
        done = cli("score", name)
        assert done.code == 1
        assert done.error_line.startswith(f"{name}: {message}")


@pytest.mark.parametrize("size", range(1, 8))
def test_a_bad_byte_is_counted_from_the_start_wherever_a_part_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr("logprobe.cli.inputs.PART_BYTES", size)
    path = tmp_path / "text.txt"
    path.write_bytes("the 🌊é".encode())
    assert read_text(str(path)) == "the 🌊é"
    for data in (b"the \xf0\x9fx", b"the \xf0\x9f"):
        path.write_bytes(data)
        with pytest.raises(InputError, match="byte 0xf0 at byte 4"):
            read_text(str(path))


def test_standard_input_is_named_as_such(cli: Callable[..., Any]) -> None:
    assert cli("score", "-").error_line.startswith("standard input: is empty")
    assert cli("generate", "-").error_line.startswith("standard input: is empty")
    done = cli("score", "-", stdin=b"\xff")
    assert done.error_line.startswith("standard input: is not UTF-8 text (byte 0xff at byte 0)")


def test_an_empty_text_is_refused(cli: Callable[..., Any]) -> None:
    done = cli("score", "--text", "")
    assert (done.code, done.error_line) == (1, "--text: is empty; at least one character is required")


def test_a_name_that_no_file_can_have_is_an_input_error() -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_text("a\x00b")
