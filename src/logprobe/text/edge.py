"""Where text meets ids: prompts in, completions out.

Only this edge knows text; between it and the records everything is ids. Text of completions comes from the
exact bytes of their tokens, special tokens left out.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from itertools import compress
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from logprobe.errors import ParameterError, require
from logprobe.models import Vocabulary
from logprobe.models.stored.tokenizer import TokenizerFacts
from logprobe.text.spans import byte_spans

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tokenizers import Encoding, Tokenizer

    from logprobe.records.values import IntArray
    from logprobe.text.spans import Spans

logger = logging.getLogger("logprobe")


@dataclass(frozen=True, slots=True)
class TextEdge:
    """A model's tokenizer with the exact bytes of its tokens.

    Texts are cut by the backend that transformers has set up; transformers is loaded for who asks for its own
    `tokenizer`.
    """

    backend: Tokenizer
    facts: TokenizerFacts
    vocabulary: Vocabulary
    load_tokenizer: Callable[[], Any]  # gives the same one each time, from any thread
    # Chat template → shapes of conversations of which it is known to drop nothing (`chat.lay_out`).
    sound_shapes: dict[str, set[str]] = field(default_factory=dict, compare=False, repr=False)
    logged_warnings: set[str] = field(default_factory=set, compare=False, repr=False)
    # How replies are written, by chat template (`channels.template_of`).
    response_forms: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, tokenizer: Any) -> Self:
        """Of a tokenizer that transformers has loaded."""
        backend: Tokenizer = tokenizer.backend_tokenizer
        vocabulary = Vocabulary.from_tokenizer(backend)
        return cls(backend, TokenizerFacts.of(tokenizer), vocabulary, lambda: tokenizer)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer as transformers has it, loaded when first asked for.

        Raises:
            ModelError: its files can no longer be read.
        """
        return self.load_tokenizer()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> IntArray:
        """Token ids of a text, (num_tokens,) int32; BOS comes first where the model wants one.

        Raises:
            ParameterError: the text is not valid Unicode, or the tokenizer would drop part of it.
        """
        data = _utf8(text)
        ids = self._encoding(text, add_special_tokens=add_special_tokens).ids
        self._check_nothing_dropped(data, ids)
        self._warn_of_second_bos(ids)
        return np.array(ids, dtype=np.int32)

    def encode_with_starts(self, text: str) -> tuple[IntArray, IntArray]:
        """Token ids of a text without special tokens, and the character at which each begins.

        Raises:
            ParameterError: as `encode` does.
        """
        data = _utf8(text)
        coded = self._encoding(text, add_special_tokens=False)
        ids = coded.ids
        self._check_nothing_dropped(data, ids)
        starts = [start for start, _ in coded.offsets]
        return np.array(ids, dtype=np.int32), np.array(starts, dtype=np.int32)

    def encode_with_spans(self, text: str, *, add_special_tokens: bool = False) -> tuple[IntArray, Spans]:
        """Token ids of a text, and the bytes [start, end) of it that each comes from, (num_tokens, 2).

        Tokens that the tokenizer adds (BOS) have an empty span. See `text.spans.byte_spans`.

        Raises:
            ParameterError: as `encode` does.
        """
        data = _utf8(text)
        coded = self._encoding(text, add_special_tokens=add_special_tokens)
        ids = coded.ids
        self._check_nothing_dropped(data, ids)
        self._warn_of_second_bos(ids)
        is_added = np.array(coded.special_tokens_mask, np.bool_)
        pieces = [
            self.vocabulary.token_bytes(token_id)
            for token_id, added in zip(ids, is_added, strict=True)
            if not added
        ]
        spans = np.full((len(ids), 2), len(data), np.int64)  # of EOS
        spans[: len(pieces) and is_added.argmin()] = 0  # of BOS
        spans[~is_added] = byte_spans(text, pieces, lambda: list(compress(coded.offsets, ~is_added)))
        return np.array(ids, dtype=np.int32), spans

    def bytes_from(
        self, text: str, token_ids: IntArray, start: int, *, expected: str, add_special_tokens: bool = False
    ) -> bytes:
        """The UTF-8 of the part of `text` that its tokens from `start` on come from.

        Args:
            text: what was encoded.
            token_ids: its tokens, (num_tokens,).
            start: the first of those that are asked for.
            expected: the likely answer, which saves encoding the text once more.
            add_special_tokens: as the text was encoded.
        """
        if self.vocabulary.bytes_of(token_ids[start:].tolist()) == expected.encode():
            return expected.encode()
        _, spans = self.encode_with_spans(text, add_special_tokens=add_special_tokens)
        num_tokens = len(token_ids) - start  # `token_ids` may begin with a BOS of the caller's
        before = spans[: len(spans) - num_tokens, 1]
        return text.encode()[before[-1] if len(before) else 0 :]

    def plain_ids(self, text: str) -> list[int]:
        """Token ids of a text, special tokens within it included, none added; it may drop some of it."""
        return self._encoding(text, add_special_tokens=False).ids

    @property
    def bos_token_id(self) -> int | None:
        """What the model puts before a text; None where it has no such token."""
        return self.facts.bos_token_id

    @property
    def eos_token_id(self) -> int | None:
        """What ends a text; None where the tokenizer has no such token."""
        return self.facts.eos_token_id

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids whose text is left out of a completion."""
        return self.facts.special_token_ids

    def prefix(self) -> IntArray:
        """What stands before a text that has no context: BOS, or EOS where the model has no BOS."""
        first = self.eos_token_id if self.bos_token_id is None else self.bos_token_id
        if first is None:
            raise ParameterError("context", "is empty and the model has no BOS or EOS; give a context")
        return np.array([first], dtype=np.int32)

    def text_of(self, token_ids: Sequence[int], num_bytes: int | None = None) -> str:
        """The text of tokens, of its first `num_bytes` bytes; incomplete characters show as U+FFFD."""
        return self.bytes_of(token_ids)[:num_bytes].decode("utf-8", "replace")

    def bytes_of(self, token_ids: Sequence[int]) -> bytes:
        """The bytes of tokens without the special ones."""
        special = self.special_token_ids
        return self.vocabulary.bytes_of(i for i in token_ids if i not in special)

    def _encoding(self, text: str, *, add_special_tokens: bool) -> Encoding:
        backend, splits = self.backend, self.facts.splits_special_tokens
        # As transformers does at each call: one that shares the backend may have had it do otherwise.
        if backend.truncation is not None:
            backend.no_truncation()
        if backend.padding is not None:
            backend.no_padding()
        if backend.encode_special_tokens != splits:
            backend.encode_special_tokens = splits
        # Of a batch: other threads run meanwhile.
        return backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def _warn_of_second_bos(self, ids: Sequence[int]) -> None:
        """Log once that a text begins with BOS, and the tokenizer puts another before it."""
        bos = self.bos_token_id
        if bos is None or "two BOS" in self.logged_warnings or list(ids[:2]) != [bos, bos]:
            return
        self.logged_warnings.add("two BOS")
        logger.warning(
            "prompt: begins with %s, and the tokenizer adds another; give add_special_tokens=False for the "
            "text of a chat template, or use chat",
            self.vocabulary.token_text(bos),
        )

    def _check_nothing_dropped(self, data: bytes, ids: Sequence[int]) -> None:
        missing = self.vocabulary.missing_bytes
        if not missing or set(missing).isdisjoint(data):
            return
        kept = self.vocabulary.bytes_of(ids)
        if data not in kept:
            at = next((i for i, (a, b) in enumerate(zip(data, kept, strict=False)) if a != b), len(kept))
            raise ParameterError(
                "prompt",
                f"the model's tokenizer has no token for byte 0x{data[at]:02x} (at byte {at}); remove it",
            )


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ParameterError("prompt", f"is not valid Unicode text ({error})") from error


def as_token_ids(prompt: Any, name: str = "prompt") -> IntArray:
    """Token ids of any integer sequence, (num_tokens,) int32, an array of its own.

    Raises:
        ParameterError: it is nothing of the kind, or an id lies outside every vocabulary.
    """
    try:
        ids = np.asarray(prompt)
    except ValueError:  # lists of different lengths within
        ids = np.array(None)
    is_ids = ids.ndim == 1 and (ids.size == 0 or np.issubdtype(ids.dtype, np.integer))
    require(is_ids, name, "must be a list of token ids", got=prompt)
    outside = ids[(ids < 0) | (ids > np.iinfo(np.int32).max)][:1]
    if len(outside):  # numpy takes longer to print an array than all the rest here
        raise ParameterError(name, f"token id {outside} lies outside every vocabulary")
    return ids.astype(np.int32)
