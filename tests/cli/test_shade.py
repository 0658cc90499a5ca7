"""Shaded text: every character once, in the colours of the web page."""

from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from logprobe.cli.shade import Shader, can_shade, harmless, legend, style_of
from logprobe.records.forms.html import SHADES

WAVE = "🌊".encode()


def test_each_token_has_the_shade_of_its_whole_nats() -> None:
    tokens = [(b"the", None), (b" cat", -0.4), (b" sat", -3.7), (b"!", -math.inf)]
    shaded = Shader().feed(tokens)
    assert shaded.plain == "the cat sat!"
    found = [(shaded.plain[span.start : span.end], span.style) for span in shaded.spans if span.style]
    assert found == [(" sat", style_of(3)), ("!", style_of(len(SHADES) - 1))]


def test_tokens_of_one_character_share_the_highest_surprisal() -> None:
    shader = Shader()
    assert shader.feed([(WAVE[:2], -1.0)]).plain == ""
    shaded = shader.feed([(WAVE[2:3], -6.0), (WAVE[3:], -2.0), (b".", -0.1)])
    assert shaded.plain == "🌊."
    assert shaded.spans[0].style == style_of(6)


def test_half_a_character_at_the_end_is_not_lost() -> None:
    assert Shader().feed([(WAVE[:2], -1.0)], final=True).plain == "\ufffd"


def test_a_text_that_was_cut_is_shaded_so_far() -> None:
    assert Shader().feed([(b"one", -1.0), (b" two", -2.0), (b"x", -2.0)], most=5).plain == "one t"


def test_a_text_cannot_drive_the_terminal() -> None:
    assert harmless("a\x1b]0;title\x07\r\n\tb\x9b1m") == "a\\x1b]0;title\\x07\\r\n\tb\\x9b1m"
    assert Shader().feed([(b"\x1b[2J", -1.0)]).plain == "\\x1b[2J"


def test_line_ends_can_be_seen() -> None:
    assert Shader(marks_line_ends=True).feed([(b"a\n\nb", -1.0)]).plain == "a↵\n↵\nb"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"TERM": "xterm-256color"}, True),
        ({"TERM": "xterm", "COLORTERM": "truecolor"}, True),
        ({"TERM": "xterm-256color", "NO_COLOR": "1"}, False),
        ({"TERM": "xterm"}, False),  # with 16 colours several shades would coincide
        ({"TERM": "dumb"}, False),
    ],
)
def test_shades_are_for_terminals_that_have_them(environment: dict[str, str], expected: bool) -> None:
    assert can_shade(Console(file=io.StringIO(), force_terminal=True, _environ=environment)) is expected
    assert not can_shade(Console(file=io.StringIO(), force_terminal=False, _environ=environment))


def test_the_legend_names_every_shade() -> None:
    assert legend().plain.split() == ["surprisal", "in", "nats:", *"01234567", "8+"]
    assert {span.style for span in legend().spans if span.style} == {style_of(shade) for shade in range(1, 9)}
