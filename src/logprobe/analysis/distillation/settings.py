"""Settings for distillation data: columns, tokens kept per position, and file formats."""

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
    """Columns to read, and the number of tokens to keep per position.

    Args:
        top: number of most likely tokens kept at each position.
        text_column: column of the text.
        messages_column: column of a conversation, instead of a text; each assistant message becomes a row.
        bos: prepend BOS (EOS if there is none) to texts; None: as the tokenizer does.
        max_tokens: truncate texts to this many tokens; None: a text longer than the context is a bad row.
    """

    top: int = 64
    text_column: str = "text"
    messages_column: str | None = None
    bos: bool | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        require(1 <= self.top <= MAX_TOP, "top", f"must be in [1, {MAX_TOP}], got {self.top}")
        is_some = self.max_tokens is None or self.max_tokens >= 1
        require(is_some, "max_tokens", f"must be >= 1, got {self.max_tokens}")
        is_text = self.messages_column is None
        remedy = "cannot be combined with messages_column; the chat template adds BOS"
        require(is_text or self.max_tokens is None, "max_tokens", "cannot be combined with messages_column")
        require(is_text or self.bos is None, "bos", remedy)

    @property
    def column(self) -> str:
        """The column to read."""
        return self.messages_column or self.text_column
