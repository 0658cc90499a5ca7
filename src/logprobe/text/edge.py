"""Tokenize prompts and decode completions.

All other layers work on token ids. Completion text is decoded from the exact bytes of the tokens, without
special tokens.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from itertools import compress
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, Self, final

import numpy as np

from logprobe.errors import ParameterError, require
from logprobe.models import Vocabulary
from logprobe.models.fast_tokenizer import TokenizerFacts
from logprobe.text.spans import byte_spans

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tokenizers import Encoding, Tokenizer

    from logprobe.models.fast_tokenizer import FastTokenizer
    from logprobe.records.values import IntArray
    from logprobe.text.spans import Spans

logger = logging.getLogger("logprobe")


@final
class LoadOnce:
    """Callable that runs `load` at its first call and returns the result at every call; thread-safe."""

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load, self._lock = load, Lock()
        self._results: list[Any] = []

    def __call__(self) -> Any:
        """Return the result of `load`, calling it if this is the first call."""
        with self._lock:
            if not self._results:
                self._results.append(self._load())
            return self._results[0]

    @property
    def is_loaded(self) -> bool:
        """True if `load` has returned."""
        return bool(self._results)


@dataclass(frozen=True, slots=True)
class TextEdge:
    """A model's tokenizer together with the exact bytes of its tokens.

    Texts are encoded with the `tokenizers` backend, and chat templates are rendered with jinja2; transformers
    itself is only imported when `tokenizer` is accessed.
    """

    backend: Tokenizer
    facts: TokenizerFacts
    vocabulary: Vocabulary
    # returns the transformers tokenizer, always the same object; thread-safe
    load_tokenizer: Callable[[], Any]
    fast: FastTokenizer | None = None  # the tokenizer if it was read without transformers, else None
    # Chat template -> shapes of conversations that the template is known to render completely
    # (`chat.lay_out`).
    sound_shapes: dict[str, set[str]] = field(default_factory=dict, compare=False, repr=False)
    logged_warnings: set[str] = field(default_factory=set, compare=False, repr=False)
    # Cache of `channels.template_of`, by chat template and response template.
    response_forms: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, tokenizer: Any) -> Self:
        """Create an instance from a tokenizer that transformers has loaded."""
        backend: Tokenizer = tokenizer.backend_tokenizer
        vocabulary = Vocabulary.from_tokenizer(backend)
        return cls(backend, TokenizerFacts.of(tokenizer), vocabulary, lambda: tokenizer)

    @classmethod
    def of_fast(cls, fast: FastTokenizer, load_tokenizer: Callable[[], Any]) -> Self:
        """Create an instance from a tokenizer read without transformers.

        `load_tokenizer` returns the transformers tokenizer for the same files.
        """
        vocabulary = Vocabulary.from_tokenizer(fast.backend)
        return cls(fast.backend, fast.facts, vocabulary, LoadOnce(load_tokenizer), fast)

    @property
    def template_source(self) -> Any:
        """The object with the attributes `chat_template`, `special_tokens_map` and `response_template`.

        This is the transformers tokenizer if it is loaded, because a caller may have changed its attributes,
        and otherwise the tokenizer that was read without transformers.
        """
        load = self.load_tokenizer
        if self.fast is not None and isinstance(load, LoadOnce) and not load.is_loaded:
            return self.fast
        return self.tokenizer

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer, loaded on first access.

        Raises:
            ModelError: the tokenizer files can no longer be read.
        """
        return self.load_tokenizer()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> IntArray:
        """Encode a text to token ids, (num_tokens,) int32, with a leading BOS if the model uses one.

        Raises:
            ParameterError: the text is not valid Unicode, or the tokenizer would drop part of it.
        """
        data = _utf8(text)
        ids = self._encoding(text, add_special_tokens=add_special_tokens).ids
        self._check_nothing_dropped(data, ids)
        self._warn_of_second_bos(ids)
        return np.array(ids, dtype=np.int32)

    def encode_with_starts(self, text: str) -> tuple[IntArray, IntArray]:
        """Encode a text without adding special tokens; return its ids and each token's first character index.

        Raises:
            ParameterError: for the reasons given in `encode`.
        """
        data = _utf8(text)
        coded = self._encoding(text, add_special_tokens=False)
        ids = coded.ids
        self._check_nothing_dropped(data, ids)
        starts = [start for start, _ in coded.offsets]
        return np.array(ids, dtype=np.int32), np.array(starts, dtype=np.int32)

    def encode_with_spans(self, text: str, *, add_special_tokens: bool = False) -> tuple[IntArray, Spans]:
        """Encode a text; return its ids and a (num_tokens, 2) array of the bytes [start, end) of each token.

        Tokens that the tokenizer adds (BOS, EOS) have an empty span. For the others see
        `text.spans.byte_spans`.

        Raises:
            ParameterError: for the reasons given in `encode`.
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
        spans = np.full((len(ids), 2), len(data), np.int64)  # the value for EOS
        spans[: len(pieces) and is_added.argmin()] = 0  # the value for leading added tokens (BOS)
        spans[~is_added] = byte_spans(text, pieces, lambda: list(compress(coded.offsets, ~is_added)))
        return np.array(ids, dtype=np.int32), spans

    def bytes_from(
        self, text: str, token_ids: IntArray, start: int, *, expected: str, add_special_tokens: bool = False
    ) -> bytes:
        """Return the UTF-8 of the part of `text` from which the tokens from index `start` on come.

        Args:
            text: the text that was encoded.
            token_ids: the tokens of the text, (num_tokens,).
            start: index of the first token of the requested part.
            expected: the likely result; if its bytes match the tokens, the text is not encoded again.
            add_special_tokens: the value that was passed when the text was encoded.
        """
        if self.vocabulary.bytes_of(token_ids[start:].tolist()) == expected.encode():
            return expected.encode()
        _, spans = self.encode_with_spans(text, add_special_tokens=add_special_tokens)
        num_tokens = len(token_ids) - start  # `token_ids` may start with a BOS added by the caller
        before = spans[: len(spans) - num_tokens, 1]
        return text.encode()[before[-1] if len(before) else 0 :]

    def plain_ids(self, text: str) -> list[int]:
        """Encode a text without adding special tokens; unlike `encode`, do not check for dropped text."""
        return self._encoding(text, add_special_tokens=False).ids

    @property
    def bos_token_id(self) -> int | None:
        """Id of the BOS token; None if the tokenizer has none."""
        return self.facts.bos_token_id

    @property
    def eos_token_id(self) -> int | None:
        """Id of the EOS token; None if the tokenizer has none."""
        return self.facts.eos_token_id

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that are omitted from the text of a completion."""
        return self.facts.special_token_ids

    def prefix(self) -> IntArray:
        """Return the id, (1,) int32, to put before a text without context: BOS, or EOS if there is no BOS.

        Raises:
            ParameterError: the model has neither.
        """
        first = self.eos_token_id if self.bos_token_id is None else self.bos_token_id
        if first is None:
            raise ParameterError("context", "is empty, and the model has no BOS or EOS token; give a context")
        return np.array([first], dtype=np.int32)

    def text_of(self, token_ids: Sequence[int], num_bytes: int | None = None) -> str:
        """Decode tokens, or only their first `num_bytes` bytes; incomplete UTF-8 is shown as U+FFFD."""
        return self.bytes_of(token_ids)[:num_bytes].decode("utf-8", "replace")

    def bytes_of(self, token_ids: Sequence[int]) -> bytes:
        """Return the concatenated bytes of tokens; special tokens are skipped."""
        special = self.special_token_ids
        return self.vocabulary.bytes_of(i for i in token_ids if i not in special)

    def _encoding(self, text: str, *, add_special_tokens: bool) -> Encoding:
        backend, splits = self.backend, self.facts.splits_special_tokens
        # Reset these at each call, as transformers does: another user of the backend may have changed them.
        if backend.truncation is not None:
            backend.no_truncation()
        if backend.padding is not None:
            backend.no_padding()
        if backend.encode_special_tokens != splits:
            backend.encode_special_tokens = splits
        # encode_batch releases the GIL.
        return backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]

    def _warn_of_second_bos(self, ids: Sequence[int]) -> None:
        """Log a warning, once, if the text starts with BOS and the tokenizer added a second one."""
        bos = self.bos_token_id
        if bos is None or "two BOS" in self.logged_warnings or list(ids[:2]) != [bos, bos]:
            return
        self.logged_warnings.add("two BOS")
        logger.warning(
            "prompt: begins with %s, and the tokenizer adds another; set add_special_tokens=False for a "
            "rendered chat template, or use chat",
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
    """Convert a sequence of integers to an array of token ids, (num_tokens,) int32; always a copy.

    Raises:
        ParameterError: `prompt` is not a flat sequence of integers, or an id is negative or exceeds int32.
    """
    try:
        ids = np.asarray(prompt)
    except ValueError:  # ragged nested lists
        ids = np.array(None)
    is_ids = ids.ndim == 1 and (ids.size == 0 or np.issubdtype(ids.dtype, np.integer))
    require(is_ids, name, "must be a list of token ids", got=prompt)
    outside = ids[(ids < 0) | (ids > np.iinfo(np.int32).max)][:1]
    if len(outside):  # do not include the array in the message: numpy is slow to print it
        raise ParameterError(name, f"token id {outside} is outside the range of token ids")
    return ids.astype(np.int32)


SAME_TOKENS_PROBE: Final = "The 12 cats\n\tdidn't é 🌊 你好"
"""A text that shows whether two tokenizers with the same tokens also split text by the same rules."""


def same_tokens(mine: TextEdge, theirs: TextEdge) -> bool:
    """Return True if two tokenizers have the same tokens and split a probe text alike."""
    if mine is theirs:
        return True
    same_pieces = len(mine.vocabulary) == len(theirs.vocabulary) and all(
        mine.vocabulary.token_bytes(i) == theirs.vocabulary.token_bytes(i)
        for i in range(len(mine.vocabulary))
    )
    probe = SAME_TOKENS_PROBE
    return same_pieces and mine.encode(probe).tolist() == theirs.encode(probe).tolist()
