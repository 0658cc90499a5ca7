"""What a data set is asked: which columns hold what, and how rows are read.

Before it: the command's flags, Python callers. After it: `rows`, and what a resumed run must share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from logprobe.config import strict_keywords
from logprobe.errors import require

Truncation: TypeAlias = Literal["error", "left", "window"]
TRUNCATIONS = ("error", "left", "window")
HITS = ("acc", "acc_norm", "acc_bytes")


@strict_keywords
@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Which columns hold what, and how rows are read; all of it belongs to a run that is resumed.

    Args:
        text_column: the text, or the continuation where there is a context.
        context_column: what stands before the text or the choices.
        choices_column: a list of texts, of which the most likely is the answer.
        answer_column: the right choice: its place from 0, its letter from A, or its text.
        keep_columns: columns copied to the output (what is no text as JSON).
        delimiter: what stands between a context and a choice.
        tokens: give each token's id, logprob, rank and entropy.
        unconditional: score each continuation after nothing too, which gives PMI.
        bos: put BOS (EOS where there is none) before texts without context; None: as the tokenizer does.
        truncation: what becomes of a row longer than the context: a bad row, its end, or sliding windows.
        window: tokens a window; None: the model's context.
        stride: tokens from one window to the next; None: half a window.
        lora: the adapter to run on.
    """

    text_column: str = "text"
    context_column: str | None = None
    choices_column: str | None = None
    answer_column: str | None = None
    keep_columns: tuple[str, ...] = ()
    delimiter: str = " "
    tokens: bool = False
    unconditional: bool = False
    bos: bool | None = None
    truncation: Truncation = "error"
    window: int | None = None
    stride: int | None = None
    lora: str | None = None

    def __post_init__(self) -> None:
        known = f"must be one of {', '.join(TRUNCATIONS)}, got {self.truncation!r}"
        require(self.truncation in TRUNCATIONS, "truncation", known)
        has_choices = self.choices_column is not None
        require(has_choices or self.answer_column is None, "answer_column", "comes with choices_column")
        is_plain = not (has_choices and (self.tokens or self.unconditional))
        require(is_plain, "tokens", "and unconditional are for texts, not for choices")
        is_cut = self.truncation == "window"
        for name in ("window", "stride"):
            require(is_cut or getattr(self, name) is None, name, "comes with truncation='window'")
        require(not (is_cut and self.unconditional), "unconditional", "has no meaning for windows")

    @property
    def columns(self) -> list[str]:
        """The columns to read, the main one first, none twice."""
        main = [self.choices_column, self.context_column, self.answer_column]
        named = main if self.choices_column else [self.text_column, self.context_column]
        return list(dict.fromkeys([*(name for name in named if name is not None), *self.keep_columns]))
