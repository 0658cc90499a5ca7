"""What a teacher's rows are taken of, and which tool reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from logprobe.config import strict_keywords
from logprobe.errors import require

TrainingFormat: TypeAlias = Literal["parquet", "distillkit", "axolotl"]
FORMATS: Final = ("parquet", "distillkit", "axolotl")
MAX_TOP: Final = 4096


@strict_keywords
@dataclass(frozen=True, kw_only=True)
class DistilSettings:
    """What a teacher's rows are taken of, and which tool reads them.

    Args:
        top: the most likely tokens that are kept of each row.
        text_column: the text.
        messages_column: a conversation, in the place of a text: each of its assistant's turns is a row.
        bos: put BOS (EOS where there is none) before texts; None: as the tokenizer does.
        max_tokens: cut texts to their first so many tokens; None: one longer than the context is a bad row.
    """

    top: int = 64
    text_column: str = "text"
    messages_column: str | None = None
    bos: bool | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        require(1 <= self.top <= MAX_TOP, "top", f"must lie in [1, {MAX_TOP}], got {self.top}")
        is_some = self.max_tokens is None or self.max_tokens >= 1
        require(is_some, "max_tokens", f"must be 1 or more, got {self.max_tokens}")
        is_text = self.messages_column is None
        remedy = "is for texts; a template lays conversations out"
        require(is_text or self.max_tokens is None, "max_tokens", "is for texts; a turn is not cut")
        require(is_text or self.bos is None, "bos", remedy)

    @property
    def column(self) -> str:
        """The column to read."""
        return self.messages_column or self.text_column
