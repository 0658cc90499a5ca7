"""Tokens as running text in the shade of their surprisal: the colours of the page, on a terminal.

Before it: tokens' bytes and log-probabilities. After it: rich, which fits the colours to the terminal.
"""

from __future__ import annotations

import codecs
import re
from typing import TYPE_CHECKING

from rich.style import Style
from rich.text import Text

from logprobe.records.forms.html import SHADES, shade_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.console import Console

# All but line feed and tab: a text must not move the cursor or rename the window.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
# Of 16 colours several shades become one.
COLOURFUL = ("256", "truecolor")
LINE_END = "↵"
_BARE = Style()


def can_shade(screen: Console) -> bool:
    """Whether there is somebody to see colours, who did not say no (NO_COLOR)."""
    return screen.is_terminal and screen.color_system in COLOURFUL and not screen.no_color


def harmless(text: str) -> str:
    """A text for a terminal: its control characters show as escapes."""
    return CONTROL.sub(lambda match: repr(match[0])[1:-1], text)


class Shader:
    """Shades a text that comes in parts; tokens that share a character share the highest surprisal."""

    def __init__(self, *, marks_line_ends: bool = False) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._lowest: float | None = None
        self._line_end = f"{LINE_END}\n" if marks_line_ends else "\n"

    def feed(
        self, tokens: Iterable[tuple[bytes, float | None]], *, final: bool = False, most: int | None = None
    ) -> Text:
        """What became certain of (bytes, logprob) tokens; at most `most` characters, None: all."""
        shaded = Text()
        for text, logprob in self._pieces(tokens, final=final):
            cut = text if most is None else text[:most]
            most = None if most is None else most - len(cut)
            shown = harmless(cut).replace("\n", self._line_end)
            shaded.append(shown, _BARE if logprob is None else style_of(shade_of(logprob)))
        return shaded

    def _pieces(
        self, tokens: Iterable[tuple[bytes, float | None]], *, final: bool
    ) -> Iterator[tuple[str, float | None]]:
        for data, logprob in tokens:
            if logprob is not None:
                self._lowest = logprob if self._lowest is None else min(self._lowest, logprob)
            if text := self._decoder.decode(data):
                yield text, self._lowest
                self._lowest = None
        if final and (text := self._decoder.decode(b"", final=True)):
            yield text, self._lowest


def style_of(shade: int) -> Style:
    """The style of a shade; the lowest is the terminal's own."""
    background, color = SHADES[shade]
    return Style(bgcolor=background, color=color) if shade else _BARE


def legend() -> Text:
    """What the shades stand for."""
    shades = [(f" {shade} ", style_of(shade)) for shade in range(len(SHADES))]
    shades[-1] = (f" {len(SHADES) - 1}+ ", shades[-1][1])
    return Text.assemble("surprisal in nats: ", *shades)
