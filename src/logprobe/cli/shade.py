"""Print running text on a terminal: tokens shaded by surprisal, and completions as they are generated.

The colors are those of the web page; rich adapts them to the terminal. Files and pipes get plain text.
"""

from __future__ import annotations

import codecs
import re
import sys
from contextlib import closing
from typing import TYPE_CHECKING

from rich.style import Style
from rich.text import Text

from logprobe.records.forms.html import SHADES, shade_of
from logprobe.text.pieces import Cutter

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from rich.console import Console

    from logprobe.engine.request import CompletionOutput, CompletionPiece, RequestOutput
    from logprobe.llm import LLM
    from logprobe.sampling import SamplingParams
    from logprobe.text.prompts import Prompt

# All control characters except line feed and tab; a text must not move the cursor or rename the window.
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
# With 16 colors, several shades would look the same.
COLOURFUL = ("256", "truecolor")
LINE_END = "↵"
_BARE = Style()


def can_shade(screen: Console) -> bool:
    """Return True if the console is a terminal with enough colors and `NO_COLOR` is not set."""
    return screen.is_terminal and screen.color_system in COLOURFUL and not screen.no_color


def harmless(text: str) -> str:
    """Escape the control characters in a text, so that they do not affect the terminal."""
    return CONTROL.sub(lambda match: repr(match[0])[1:-1], text)


class Shader:
    """Shades a text that comes in parts.

    Tokens that share a character are shaded alike, by the highest surprisal among them.
    """

    def __init__(self, *, marks_line_ends: bool = False) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._lowest: float | None = None
        self._line_end = f"{LINE_END}\n" if marks_line_ends else "\n"

    def feed(
        self, tokens: Iterable[tuple[bytes, float | None]], *, final: bool = False, most: int | None = None
    ) -> Text:
        """Add tokens, and return the shaded text that is complete with them.

        Args:
            tokens: bytes and log-probability (nats) of each token; a token with None is not shaded.
            final: also return incomplete UTF-8 at the end, as U+FFFD.
            most: maximum number of characters to return; None: all.
        """
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
    """Return the style for a shade; the lowest shade has the terminal's default colors."""
    background, color = SHADES[shade]
    return Style(bgcolor=background, color=color) if shade else _BARE


def legend() -> Text:
    """Return a legend that explains the shades."""
    shades = [(f" {shade} ", style_of(shade)) for shade in range(len(SHADES))]
    shades[-1] = (f" {len(SHADES) - 1}+ ", shades[-1][1])
    return Text.assemble("surprisal in nats: ", *shades)


class CompletionPrinter:
    """Prints a completion as it is generated; Ctrl-C stops it and keeps the text so far.

    `screen` is the console to print on (None: do not print); `is_shaded` requires `logprobs` in `params`.
    """

    def __init__(self, llm: LLM, params: SamplingParams, screen: Console | None, *, is_shaded: bool) -> None:
        self._llm = llm
        self._params = params
        self._screen = screen
        self._shader = Shader() if is_shaded else None
        self._cutter: Cutter[CompletionOutput] = Cutter(llm.text.bytes_of, params.stop, params.min_tokens)
        self.text = ""
        self.output: RequestOutput | None = None  # the output so far
        self.is_interrupted = False

    def run(self, prompt: Prompt) -> None:
        """Generate and print until the completion ends or is interrupted.

        Raises:
            LogprobeError: as `LLM.stream`.
        """
        try:
            with closing(self._llm.stream(prompt, self._params)) as outputs:
                for output in outputs:
                    self.output = output
                    if (piece := self._cutter.take(output.outputs[0])) is not None:
                        self.text += piece.text
                        self._show(piece)
        except KeyboardInterrupt:
            self.is_interrupted = True
        finally:
            if self.output is not None and self._screen is not None:
                self._write("\n")

    def _show(self, piece: CompletionPiece) -> None:
        if self._screen is None:
            return
        if self._shader is None:
            self._write(harmless(piece.text) if self._screen.is_terminal else piece.text)
            return
        record = piece.completion.logprobs
        assert record is not None, "shading requires logprobs"
        logprobs = record[piece.start : piece.stop].chosen_entries().logprobs.tolist()
        ids = piece.completion.token_ids[piece.start : piece.stop]
        tokens = zip((self._llm.text.bytes_of([token_id]) for token_id in ids), logprobs, strict=True)
        is_last = piece.finish_reason is not None
        shaded = self._shader.feed(tokens, final=is_last, most=len(piece.text))
        self._screen.print(shaded, end="", soft_wrap=True)

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
