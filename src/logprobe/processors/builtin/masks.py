"""Masks and biases: allowed tokens, banned words, minimum length, and OpenAI's `logit_bias`.

All processors except `AllowedTokensLogitsProcessor` change single logits through flat index arrays, in one
operation per step.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, final

import numpy as np

from logprobe.errors import require, shortened
from logprobe.kernels.placement import like
from logprobe.processors.arguments import AllowedTokensArgs, BannedWordsArgs, LogitBiasArgs, MinTokensArgs
from logprobe.processors.batch import BatchRow, BatchState, as_batch
from logprobe.processors.interface import LogitsProcessor, MaskLogitsProcessor, ModelFacts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from logprobe.config import EngineConfig
    from logprobe.kernels.placement import Rows


@dataclass(frozen=True, slots=True)
class Cells:
    """Indices of n logits: row indices, (n,) int64, and token ids, (n,) int64."""

    rows: NDArray[np.int64]
    token_ids: NDArray[np.int64]

    @classmethod
    def of(cls, ids_by_row: Sequence[Sequence[int] | NDArray[Any]]) -> Cells | None:
        """Create an instance from a list of token ids per row; None if all lists are empty."""
        counts = [len(ids) for ids in ids_by_row]
        if not sum(counts):
            return None
        rows = np.repeat(np.arange(len(counts)), counts)
        ids = np.concatenate([np.asarray(ids, dtype=np.int64) for ids in ids_by_row if len(ids)])
        return cls(rows, ids)

    def on(self, logits: Rows) -> tuple[Any, Any]:
        """Return the indices; if the logits are a tensor, as tensors on its device."""
        return like(self.rows, logits), like(self.token_ids, logits)


@final
class AllowedTokensLogitsProcessor(MaskLogitsProcessor):
    """Masks every token except `allowed_token_ids`."""

    Args = AllowedTokensArgs
    keeps_state = False

    def __init__(self, config: EngineConfig) -> None:
        del config
        self._allowed: list[tuple[int, NDArray[np.int64]]] = []

    def update_state(self, batch: BatchState) -> None:
        """Remember the allowed tokens of each row."""
        batch = as_batch(batch, AllowedTokensArgs)
        if not batch.is_same:
            asked = [(index, row.args.allowed_token_ids) for index, row in enumerate(batch.rows)]
            self._allowed = [(index, np.array(ids)) for index, ids in asked if ids is not None]

    def apply(self, logits: Any) -> Any:
        """Set all logits except those of the allowed tokens to -inf, in place."""
        for index, ids in self._allowed:
            ids_here = like(ids, logits)
            kept = logits[index, ids_here]
            logits[index] = -np.inf
            logits[index, ids_here] = kept
        return logits

    def forbid(self, row: BatchRow, possible: NDArray[np.bool_]) -> None:
        """Set all tokens except the allowed ones to False in `possible`."""
        ids = row.args.allowed_token_ids
        if ids is not None:
            kept = possible[ids]
            possible[:] = False
            possible[ids] = kept


@final
class MinTokensLogitsProcessor(MaskLogitsProcessor):
    """Masks the tokens that end a completion until `min_tokens` tokens have been generated.

    These tokens are the model's end-of-sequence tokens and the request's `stop_token_ids`.
    """

    Args = MinTokensArgs
    keeps_state = False

    def __init__(self, config: EngineConfig) -> None:
        del config
        self._eos_token_ids: frozenset[int] = frozenset()
        self._cells: Cells | None = None

    def bind(self, model: ModelFacts) -> None:
        """Receive the end-of-sequence tokens."""
        self._eos_token_ids = model.eos_token_ids

    def update_state(self, batch: BatchState) -> None:
        """Find the rows that have not reached their minimum length."""
        batch = as_batch(batch, MinTokensArgs)
        self._cells = Cells.of([self._ends(row) for row in batch.rows])

    def apply(self, logits: Any) -> Any:
        """Set the logits of end tokens to -inf in rows that have not reached their minimum length."""
        return banned_(logits, self._cells)

    def forbid(self, row: BatchRow, possible: NDArray[np.bool_]) -> None:
        """Set the end tokens to False in `possible` if the row has not reached its minimum length."""
        possible[self._ends(row)] = False

    def _ends(self, row: BatchRow) -> list[int]:
        if len(row.output_token_ids) >= row.args.min_tokens:
            return []
        return sorted(self._eos_token_ids.union(row.params.stop_token_ids if row.params else ()))


@final
class BannedWordsLogitsProcessor(MaskLogitsProcessor):
    """Prevents `bad_words` (texts) and `bad_words_token_ids` (id sequences) from being generated.

    The last token of a sequence is masked if the output ends with the tokens before it. A text is banned with
    and without a leading space, each as tokenized by the model's tokenizer; other tokenizations of the same
    text are not banned.
    """

    Args = BannedWordsArgs
    keeps_state = False

    def __init__(self, config: EngineConfig) -> None:
        del config
        self._sequences = lru_cache(maxsize=4096)(_no_tokenizer)
        self._cells: Cells | None = None

    def bind(self, model: ModelFacts) -> None:
        """Receive the tokenizer."""
        self._sequences = lru_cache(maxsize=4096)(lambda word: word_sequences(model, word))

    def check_args(self, args: Any) -> None:
        """Raise `ParameterError` for a text without tokens."""
        for word in args.bad_words:
            message = f"{shortened(word)!r} has no tokens in this model's vocabulary"
            require(self._sequences(word), "bad_words", message)

    def update_state(self, batch: BatchState) -> None:
        """Find the tokens that would complete a banned sequence."""
        batch = as_batch(batch, BannedWordsArgs)
        self._cells = Cells.of([self._completing(row.args, row.output_token_ids) for row in batch.rows])

    def apply(self, logits: Any) -> Any:
        """Set the logits of tokens that would complete a banned sequence to -inf, in place."""
        return banned_(logits, self._cells)

    def forbid(self, row: BatchRow, possible: NDArray[np.bool_]) -> None:
        """Set every token that would complete a banned sequence to False in `possible`."""
        possible[self._completing(row.args, row.output_token_ids)] = False

    def _completing(self, args: BannedWordsArgs, output: Sequence[int]) -> list[int]:
        sequences = [ids for word in args.bad_words for ids in self._sequences(word)]
        sequences += [tuple(ids) for ids in args.bad_words_token_ids]
        return [ids[-1] for ids in sequences if _ends_with(output, ids[:-1])]


def word_sequences(model: ModelFacts, word: str) -> tuple[tuple[int, ...], ...]:
    """Return the tokens that a text has inside a longer text, without and with a leading space.

    If the text is whitespace only, it is used unchanged.
    """
    bare = word.lstrip(" ")
    texts = (bare, " " + bare) if bare.strip() else (word,)
    forms = dict.fromkeys(_continuing(model, text) for text in texts)
    return tuple(ids for ids in forms if ids)


def _continuing(model: ModelFacts, text: str) -> tuple[int, ...]:
    """Return the tokens that a text has inside a longer text, where the tokenizer prepends no space."""

    def bytes_of(ids: list[int]) -> bytes:
        return b"".join(map(model.vocabulary.token_bytes, ids))

    ids, data = model.encode(text), text.encode("utf-8", "replace")
    if bytes_of(ids) == b" " + data:
        # These tokenizers prepend no space after a line break, which is a separate token.
        behind = model.encode("\n" + text)
        starts = range(len(behind))
        ids = next((behind[start:] for start in starts if bytes_of(behind[start:]) == data), ids)
    return tuple(ids)


def banned_(logits: Any, cells: Cells | None) -> Any:
    """Set the logits at the given indices to -inf, in place."""
    if cells is not None:
        logits[cells.on(logits)] = -np.inf
    return logits


def _ends_with(output: Sequence[int], ids: tuple[int, ...]) -> bool:
    return not ids or tuple(output[-len(ids) :]) == ids


def _no_tokenizer(word: str) -> tuple[tuple[int, ...], ...]:
    raise AssertionError(f"bind comes before {word!r} is looked up")


@final
class LogitBiasLogitsProcessor(LogitsProcessor):
    """Adds `logit_bias` (token id → bias, nats) to the logits; a masked token stays masked."""

    Args = LogitBiasArgs
    keeps_state = False

    def __init__(self, config: EngineConfig) -> None:
        del config
        self._cells: Cells | None = None
        self._biases = np.empty(0, np.float32)

    def update_state(self, batch: BatchState) -> None:
        """Collect the indices and biases, unless rows and arguments are unchanged."""
        batch = as_batch(batch, LogitBiasArgs)
        if batch.is_same:
            return
        biases = [row.args.logit_bias for row in batch.rows]
        self._cells = Cells.of([list(bias) for bias in biases])
        self._biases = np.array([value for bias in biases for value in bias.values()], np.float32)

    def apply(self, logits: Any) -> Any:
        """Add the biases in place."""
        if self._cells is not None:
            logits[self._cells.on(logits)] += like(self._biases, logits)
        return logits
