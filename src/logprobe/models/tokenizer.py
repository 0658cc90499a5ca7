"""A fast tokenizer that adds no special tokens by default."""

from __future__ import annotations

from typing import Any, final

from transformers import BatchEncoding, PreTrainedTokenizerFast


@final
class ExactTokenizer(PreTrainedTokenizerFast):
    """transformers' fast tokenizer with `add_special_tokens=False` as the default."""

    def __call__(self, *args: Any, add_special_tokens: bool = False, **options: Any) -> BatchEncoding:
        """Encode text or a batch of texts; see transformers' `PreTrainedTokenizerBase.__call__`."""
        encoding: BatchEncoding = super().__call__(*args, add_special_tokens=add_special_tokens, **options)
        return encoding

    def encode(self, *args: Any, add_special_tokens: bool = False, **options: Any) -> list[int]:
        """Encode one text to token ids; see transformers' `PreTrainedTokenizerBase.encode`."""
        token_ids: list[int] = super().encode(*args, add_special_tokens=add_special_tokens, **options)
        return token_ids
