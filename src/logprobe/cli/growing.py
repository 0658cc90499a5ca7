"""A completion on standard output while it grows, in plain text or shaded.

Before it: `LLM.stream`. After it: the terminal, a file or a pipe, which has what came, whenever it ends.
"""

from __future__ import annotations

import sys
from contextlib import closing
from typing import TYPE_CHECKING

from logprobe.cli.shade import Shader, harmless
from logprobe.text.pieces import Cutter

if TYPE_CHECKING:
    from rich.console import Console

    from logprobe.engine.client import Prompt
    from logprobe.engine.request import CompletionOutput, CompletionPiece, RequestOutput
    from logprobe.llm import LLM
    from logprobe.sampling import SamplingParams


class Growing:
    """One completion as it is written; what came stays when somebody interrupts.

    `screen` is where it is shown (None: nowhere); `is_shaded` needs the record of the chosen tokens.
    """

    def __init__(self, llm: LLM, params: SamplingParams, screen: Console | None, *, is_shaded: bool) -> None:
        self._llm = llm
        self._params = params
        self._screen = screen
        self._shader = Shader() if is_shaded else None
        self._cutter: Cutter[CompletionOutput] = Cutter(llm.text.bytes_of, params.stop, params.min_tokens)
        self.text = ""
        self.output: RequestOutput | None = None  # what came; None: nothing yet
        self.is_interrupted = False

    def run(self, prompt: Prompt) -> None:
        """Write until the completion or an interrupt ends it.

        Raises:
            LogprobeError: what `LLM.stream` raises.
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
        assert record is not None, "a shade needs the chosen tokens' numbers"
        logprobs = record[piece.start : piece.stop].chosen_entries().logprobs.tolist()
        ids = piece.completion.token_ids[piece.start : piece.stop]
        tokens = zip((self._llm.text.bytes_of([token_id]) for token_id in ids), logprobs, strict=True)
        is_last = piece.finish_reason is not None
        shaded = self._shader.feed(tokens, final=is_last, most=len(piece.text))
        self._screen.print(shaded, end="", soft_wrap=True)

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
