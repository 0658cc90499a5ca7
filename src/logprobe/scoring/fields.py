"""What a model gave to each value of the JSON text that it wrote.

Before it: a completion, its text and its record. After it: user code that asks how sure a value is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from logprobe.errors import ParameterError, require, shortened

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logprobe.records import FlatLogprobs

MOST_DEPTH: Final = 100  # of values in a text
_SPACE: Final = " \t\n\r"
_read_value: Final = json.JSONDecoder().raw_decode


@dataclass(frozen=True, slots=True)
class Field:
    """One value of a JSON text, and how sure of it the model was; nats.

    A token may hold bytes of a value and of the text around it, such as `"pos`. `logprob` counts it whole and
    `upper` leaves it out: the value's own log-probability, after what stands before it, lies between the two;
    they are equal where there is no such token.
    """

    pointer: str  # RFC 6901: where it stands; the empty text is the whole
    value: Any
    logprob: float  # sum over its tokens; of an object or array the sum of its values'
    upper: float
    tokens: range  # the positions of its tokens; between an object's first and last value stand others, too
    least_sure: int | None  # the position of the least likely of them; None: it has none

    @property
    def probability(self) -> float:
        """Of the value as it was written, token by token."""
        return float(np.exp(self.logprob))


def fields_of(record: FlatLogprobs, text: str) -> list[Field]:
    """The values of a JSON text in their order, an object or array before its parts.

    Args:
        record: of the tokens whose bytes begin with the text's.
        text: one JSON value, with white space around it or not.

    Raises:
        ParameterError: the text is no JSON, or not what the record's tokens say.
    """
    data = text.encode()
    table, chosen = record.table, record.chosen_entries()
    require(table is not None, "record", "has no token table, which tells the bytes of its tokens")
    assert table is not None
    pieces = [table.token_bytes(token_id) for token_id in chosen.token_ids.tolist()]
    begins = b"".join(pieces).startswith(data)
    require(begins, "text", "is not what the record's tokens say; give a completion's own text")
    ends = list(accumulate(map(len, pieces)))
    spelt = _Spelt(chosen.logprobs.astype(np.float64), np.array([0, *ends[:-1]]), np.array(ends))
    return [spelt.field(*found) for found in _values(text)]


class _Spelt:
    """Tokens by their bytes: (T,) log-probabilities, and where in the text each begins and ends."""

    def __init__(self, logprobs: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> None:
        self._logprobs, self._begins, self._ends = logprobs, begins, ends

    def field(self, pointer: str, value: Any, leaves: list[tuple[int, int]]) -> Field:
        """What was given to a value whose parts' bytes are these."""
        whole: list[int] = []
        own: list[int] = []
        for begin, end in leaves:
            touching = np.flatnonzero((self._begins < end) & (self._ends > begin)).tolist()
            whole += [place for place in touching if not whole or place > whole[-1]]
            own += [place for place in touching if begin <= self._begins[place] and self._ends[place] <= end]
        logprobs = self._logprobs[whole]
        return Field(
            pointer=pointer,
            value=value,
            logprob=float(logprobs.sum()),
            upper=float(self._logprobs[own].sum()),
            tokens=range(whole[0], whole[-1] + 1) if whole else range(0),
            least_sure=whole[int(logprobs.argmin())] if whole else None,
        )


def _values(text: str) -> list[tuple[str, Any, list[tuple[int, int]]]]:
    """Each value: its pointer, itself, and the bytes of its leaves.

    A string's are those between its quotes; of an empty one the closing quote, which says that it is empty.
    """
    try:
        found = list(_walk(text, _after_space(text, 0), "", 0))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ParameterError("text", f"is no JSON that can be read: {error}") from error
    rest = text[found[0][3] :].strip(_SPACE)
    require(not rest, "text", f"goes on after its JSON: {shortened(rest)!r}")
    offsets = [0, *accumulate(len(letter.encode()) for letter in text)]
    return [
        (pointer, value, [(offsets[begin], offsets[end]) for begin, end in leaves])
        for pointer, value, leaves, _ in found
    ]


_Found = tuple[str, Any, list[tuple[int, int]], int]


def _walk(text: str, place: int, pointer: str, depth: int) -> Iterator[_Found]:
    """The value at a place, then its parts: pointer, value, its leaves' places, and where it ends."""
    require(depth <= MOST_DEPTH, "text", f"is nested deeper than {MOST_DEPTH}")
    value, end = _read_value(text, place)
    if not isinstance(value, dict | list):
        is_text = isinstance(value, str)
        own = (place + is_text, end - is_text)
        yield pointer, value, [own if own[0] < own[1] else (end - 1, end)], end
        return
    parts: list[_Found] = []
    leaves: list[tuple[int, int]] = []
    place = _after_space(text, place + 1)
    index = 0
    while text[place] not in "}]":
        if isinstance(value, dict):
            key, place = _read_value(text, place)
            place = _after_space(text, _after_space(text, place) + 1)  # the colon
        else:
            key, index = str(index), index + 1
        inner = list(_walk(text, place, f"{pointer}/{key.replace('~', '~0').replace('/', '~1')}", depth + 1))
        leaves += inner[0][2]
        parts += inner
        place = _after_space(text, inner[0][3])
        if text[place] == ",":
            place = _after_space(text, place + 1)
    yield pointer, value, leaves, end
    yield from parts


def _after_space(text: str, place: int) -> int:
    while place < len(text) and text[place] in _SPACE:
        place += 1
    return place
