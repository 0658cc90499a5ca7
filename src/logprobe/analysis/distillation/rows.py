"""Convert data set rows to token ids and training masks; each assistant turn becomes a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from logprobe.analysis.datasets.rows import list_in
from logprobe.analysis.io.sources import BadRow, in_batches
from logprobe.analysis.scorer import prefix_of
from logprobe.errors import LogprobeError, require
from logprobe.text.chat import Layout, lay_out

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from logprobe.analysis.distillation.settings import DistilSettings
    from logprobe.analysis.io.sources import Row
    from logprobe.analysis.score import Score
    from logprobe.analysis.scorer import Scorer
    from logprobe.records import FlatLogprobs
    from logprobe.records.values import IntArray

ENTRIES_A_CALL = 1 << 22  # approximate number of (position, token) entries in the rows of one call


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A part of a sequence to train the student on: the tokens [start, end)."""

    number: int | None  # index of the message in its conversation; None for a text
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSequence:
    """Token ids of one data set row, which are scored once, and the parts to train on."""

    row: Row
    token_ids: IntArray
    turns: list[Turn]


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherRow:
    """A sequence up to the end of one trained part, and the teacher's k likeliest tokens at each position."""

    row: int  # index in the data set
    turn: int | None
    token_ids: IntArray  # (T,)
    is_learnt: NDArray[np.bool_]  # (T,) True for each token that the student learns to predict
    is_target: NDArray[np.bool_]  # (T,) True for each position to train on; position t predicts token t + 1
    top_ids: IntArray  # (T, k)
    top_logprobs: NDArray[np.float32]  # (T, k) nats, descending

    @property
    def lost_masses(self) -> NDArray[np.float64]:
        """Total probability of all tokens outside the top k, at each target position."""
        kept = np.exp(self.top_logprobs[self.is_target], dtype=np.float64).sum(axis=1)
        return np.asarray(np.clip(1 - kept, 0, 1))


class SequenceReader:
    """Converts data set rows to token sequences; an error in one row does not affect the others."""

    def __init__(self, llm: Scorer, settings: DistilSettings) -> None:
        self._text = llm.text
        self._settings = settings
        self._prefix = prefix_of(llm.text, settings.bos)
        self._limit: int = llm.engine.capabilities().max_model_len

    def read(self, row: Row) -> TokenSequence | BadRow:
        """Return the row's token sequence, or a `BadRow` with the error."""
        if row.problem is not None:
            return BadRow.of(row, row.problem)
        try:
            is_text = self._settings.messages_column is None
            sequence = self._text_of(row) if is_text else self._conversation_of(row)
            self._check_fits(sequence)
        except LogprobeError as error:
            return BadRow.of(row, error)
        return sequence

    def _text_of(self, row: Row) -> TokenSequence:
        column = self._settings.column
        value = row.values[column]
        require(isinstance(value, str), column, f"must be a string, got {type(value).__name__}")
        ids = np.concatenate([self._prefix, self._text.encode(value, add_special_tokens=False)])
        ids = ids[: self._settings.max_tokens]
        require(len(ids), column, "is empty, so there is nothing to train on")
        return TokenSequence(row=row, token_ids=ids, turns=[Turn(number=None, start=1, end=len(ids) + 1)])

    def _conversation_of(self, row: Row) -> TokenSequence:
        messages = _messages_of(row.values[self._settings.column], self._settings.column)
        whole = lay_out(messages, self._text, Layout(add_generation_prompt=False))
        ids, starts = self._text.encode_with_starts(whole)
        turns = []
        for number, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            first = "must not be an assistant message; start with another role"
            require(number, "messages[0]", first)
            before = lay_out(messages[:number], self._text)
            after = lay_out(messages[: number + 1], self._text, Layout(add_generation_prompt=False))
            is_there = whole.startswith(after) and after.startswith(before)
            problem = (
                "is rendered differently if messages follow (chat template); end the conversation with it"
            )
            require(is_there, f"messages[{number}]", problem)
            start, end = np.searchsorted(starts, [len(before), len(after)]).tolist()
            turns.append(Turn(number=number, start=max(start, 1), end=end))
        require(turns, self._settings.column, "has no assistant message")
        return TokenSequence(row=row, token_ids=ids, turns=turns)

    def _check_fits(self, sequence: TokenSequence) -> None:
        num_tokens = len(sequence.token_ids)
        remedy = "shorten it" if self._settings.messages_column else "shorten it, or set max_tokens"
        fits = num_tokens <= self._limit
        require(fits, self._settings.column, f"has {num_tokens} tokens, but {self._limit} fit; {remedy}")


def _messages_of(value: Any, column: str) -> list[dict[str, Any]]:
    """Return a conversation as a list of messages, without null fields."""
    value = list_in(value, column, "messages")
    are_messages = isinstance(value, list) and value and all(isinstance(message, dict) for message in value)
    require(are_messages, column, "must be a list of messages", got=value)
    # In a Parquet file, every message has every field; the fields that it does not use are null.
    return [{name: part for name, part in message.items() if part is not None} for message in value]


def in_calls(sequences: Iterable[TokenSequence | BadRow], top: int) -> Iterator[list[TokenSequence | BadRow]]:
    """Yield batches of rows that one call scores; long rows and a large `top` make batches smaller."""

    def num_tokens(sequence: TokenSequence | BadRow) -> int:
        return sum(turn.end for turn in sequence.turns) if isinstance(sequence, TokenSequence) else 0

    return in_batches(sequences, num_tokens, ENTRIES_A_CALL / top)


def scored(llm: Scorer, sequences: Sequence[TokenSequence], top: int) -> list[Score]:
    """Score each sequence, with the `top` likeliest tokens after each of its tokens, including the last.

    Raises:
        LogprobeError: the engine failed.
    """
    # Append an arbitrary token, because the distribution at that position is the one after the last token.
    pairs = [(one.token_ids[:1], np.append(one.token_ids[1:], one.token_ids[-1])) for one in sequences]
    return llm.score(pairs, logprobs=top)


def teacher_rows(sequence: TokenSequence, record: FlatLogprobs) -> Iterator[TeacherRow]:
    """Yield one row for each part of the sequence to train on."""
    entries = record.top_entries()
    width = int(entries.offsets[1] - entries.offsets[0])
    ids, logprobs = (column.reshape(-1, width) for column in (entries.token_ids, entries.logprobs))
    for turn in sequence.turns:
        length = min(turn.end, len(sequence.token_ids))
        places = np.arange(length)
        yield TeacherRow(
            row=sequence.row.index,
            turn=turn.number,
            token_ids=sequence.token_ids[:length],
            is_learnt=(places >= (turn.start if turn.number is not None else 0)) & (places < turn.end),
            is_target=(places >= turn.start - 1) & (places < turn.end - 1),
            top_ids=ids[:length],
            top_logprobs=logprobs[:length],
        )
