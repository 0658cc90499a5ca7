"""Tables: complete lines in files, and fitted to the width of a terminal."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import pytest
import typer
from rich.cells import cell_len

from logprobe.cli.tables import print_facts, print_tokens, refuse_vocabulary, table, token_table

if TYPE_CHECKING:
    from collections.abc import Callable

    from logprobe.cli.rows import TokenRow

TEXTS = (b" the", " Löwe".encode(), b" and so on", b"\xf0\x9f", b" " * 90)
WIDTHS = (60, 80, 120)


def row(text: bytes, *, num_top: int) -> TokenRow:
    shown = text.decode(errors="replace")
    top = [
        {"token_id": place, "token": shown, "bytes": [*text], "logprob": -12.3456 - place, "rank": place}
        for place, text in enumerate((TEXTS * 4)[:num_top])
    ]
    return {
        "token_id": 1,
        "token": shown,
        "bytes": [*text],
        "logprob": -10.1234,
        "rank": 49152,
        "top_logprobs": top,
        "entropy": 10.1234,
    }  # type: ignore[typeddict-item]


@pytest.fixture
def rows() -> list[TokenRow]:
    return [row(text, num_top=4) for text in TEXTS]


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """Return the lines that a call prints on a terminal of a given width, without colours."""
    monkeypatch.setenv("FORCE_COLOR", "1")  # a terminal, although pytest captures the output
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")

    def shown(width: int, show: Callable[[], None]) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(width))
        show()
        return capsys.readouterr().out.splitlines()

    return shown


def test_columns_stay_aligned_with_wide_characters() -> None:
    lines = table([["#", "token", "x"], ["0", "🌊", "1"], ["10", "漢字", "22"]]).splitlines()
    assert lines[0] == " #  token   x"
    assert len({cell_len(line) for line in lines}) == 1


def test_a_line_may_end_early_and_leaves_no_space_behind() -> None:
    assert table([["a", "b"], ["long"]], is_left=[True, True]) == "a     b\nlong"


@pytest.mark.parametrize("width", WIDTHS)
def test_tokens_fit_the_width_and_none_is_broken(screen: Callable, rows: list[TokenRow], width: int) -> None:
    lines = screen(width, lambda: print_tokens(rows, 4))
    assert all(cell_len(line) <= width for line in lines)
    for whole in ('" the" -12.3456', '" Löwe" -13.3456', '" and so on" -14.3456', '"\\xf0\\x9f" -15.3456'):
        assert sum(line.count(whole) for line in lines) == len(rows)
    assert sum(" 49152 " in line and "-10.1234" in line for line in lines) == len(rows)
    assert lines[0].split()[:5] == ["#", "token", "logprob", "rank", "entropy"]


@pytest.mark.parametrize("width", WIDTHS)
def test_a_token_wider_than_its_column_is_cut_and_says_so(screen: Callable, width: int) -> None:
    lines = screen(width, lambda: print_tokens([row(b" " * 90, num_top=0)], 0))
    assert len(lines) == 2
    assert "…" in lines[1]
    assert all(cell_len(line) <= width for line in lines)


def test_rows_that_go_on_have_no_header(screen: Callable, rows: list[TokenRow]) -> None:
    lines = screen(120, lambda: print_tokens(rows[:1], 0, first=7))
    assert [line.split()[0] for line in lines] == ["7"]


def test_a_pipe_has_each_token_in_one_line(
    capsys: pytest.CaptureFixture[str], rows: list[TokenRow], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    print_tokens(rows, 4)
    assert capsys.readouterr().out == token_table(rows, 4) + "\n"
    assert len(token_table(rows, 4).splitlines()) == 1 + len(rows)


@pytest.mark.parametrize("width", WIDTHS)
def test_facts_fit_the_width_and_lose_nothing(screen: Callable, width: int) -> None:
    value = "word " * 40 + "x" * 200
    lines = screen(width, lambda: print_facts([["name", value], ["other", "short"]]))
    assert all(cell_len(line) <= width for line in lines)
    text = "".join(line[len("other") :] for line in lines).replace(" ", "")
    assert text == ("word" * 40 + "x" * 200 + "short")


def test_the_whole_vocabulary_is_for_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", io.StringIO())
    refuse_vocabulary(-1, "--logprobs")
    monkeypatch.setenv("FORCE_COLOR", "1")
    refuse_vocabulary(20, "--logprobs")
    with pytest.raises(typer.BadParameter, match="too much for a terminal"):
        refuse_vocabulary(-1, "--logprobs")
