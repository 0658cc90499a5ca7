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
    import numpy.typing as npt

    from logprobe.records import FlatLogprobs

    Floats = npt.NDArray[np.float64]

MOST_DEPTH: Final = 100  # of values in a text
MOST_POINTER_CHARS: Final = 1 << 20  # of all fields: a long name may stand in each of them
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
        ParameterError: the text is no JSON, is not what the record's tokens say, or has pointers that come to
            more than `MOST_POINTER_CHARS`.
    """
    data = text.encode()
    table, chosen = record.table, record.chosen_entries()
    require(table is not None, "record", "has no token table, which tells the bytes of its tokens")
    assert table is not None
    pieces = [table.token_bytes(token_id) for token_id in chosen.token_ids.tolist()]
    begins = b"".join(pieces).startswith(data)
    require(begins, "text", "is not what the record's tokens say; give a completion's own text")
    nodes, leaves = _read(text)
    spelt = _Spelt(chosen.logprobs.astype(np.float64), list(map(len, pieces)), leaves)
    return [spelt.field(*node) for node in nodes]


class _Spelt:
    """Leaves of a text by the tokens (T,) that spell them, which are consecutive and in their order."""

    def __init__(self, logprobs: Floats, sizes: list[int], leaves: list[tuple[int, int]]) -> None:
        ends = np.cumsum(sizes, dtype=np.int64)
        begins = ends - np.array(sizes, dtype=np.int64)
        places = np.array(leaves, dtype=np.int64).reshape(-1, 2)
        self._logprobs = logprobs
        # Tokens that hold a byte of the leaf, and of these those that hold no other.
        self._starts = np.searchsorted(ends, places[:, 0], side="right")
        self._stops = np.maximum(np.searchsorted(begins, places[:, 1], side="left"), self._starts)
        own_starts = np.maximum(np.searchsorted(begins, places[:, 0], side="left"), self._starts)
        own_stops = np.minimum(np.searchsorted(ends, places[:, 1], side="right"), self._stops)
        # A token of several leaves counts with the first of them in what holds them all.
        news = np.maximum(self._starts, np.concatenate([[0], self._stops])[:-1])
        self._whole = self._sums(self._starts, self._stops)
        self._new = self._sums(news, self._stops)
        self._own = self._sums(own_starts, own_stops)

    def field(self, pointer: str, value: Any, first: int, stop: int) -> Field:
        """What was given to a value of these leaves."""
        starts, stops = self._starts[first:stop], self._stops[first:stop]
        begin, end = (int(starts[0]), int(stops[-1])) if stop > first else (0, 0)
        places = np.concatenate([np.arange(0), *map(np.arange, starts, stops)])
        return Field(
            pointer=pointer,
            value=value,
            logprob=float(self._whole[first:stop][:1].sum() + self._new[first + 1 : stop].sum()),
            upper=float(self._own[first:stop].sum()),
            tokens=range(begin, end),
            least_sure=int(places[self._logprobs[places].argmin()]) if len(places) else None,
        )

    def _sums(self, starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]) -> Floats:
        return np.array([self._logprobs[start:stop].sum() for start, stop in zip(starts, stops, strict=True)])


Leaves = list[tuple[int, int]]
Node = tuple[str, Any, int, int]


def _read(text: str) -> tuple[list[Node], Leaves]:
    """Each value (its pointer, itself, and which leaves are its own, [first, stop)), and the leaves' bytes.

    A string's are those between its quotes; of an empty one the closing quote, which says that it is empty.
    """
    reader = _Reader(text)
    try:
        end = reader.read(reader.after_space(0), "")
    except ParameterError:
        raise
    except (ValueError, RecursionError) as error:  # of an integer of thousands of digits, too
        raise ParameterError("text", f"is no JSON that can be read: {error}") from error
    rest = text[end:].strip(_SPACE)
    require(not rest, "text", f"goes on after its JSON: {shortened(rest)!r}")
    offsets = [0, *accumulate(len(letter.encode()) for letter in text)]
    return reader.nodes, [(offsets[begin], offsets[stop]) for begin, stop in reader.leaves]


class _Reader:
    """Finds where the values of a text stand."""

    def __init__(self, text: str) -> None:
        self.nodes: list[Node] = []
        self.leaves: Leaves = []  # by letters
        self._text = text
        self._num_chars = 0  # of all pointers

    def read(self, place: int, pointer: str, depth: int = 0) -> int:
        """Take in the value at a place, then its parts; where it ends."""
        require(depth <= MOST_DEPTH, "text", f"is nested deeper than {MOST_DEPTH}")
        self._num_chars += len(pointer)
        is_short = self._num_chars <= MOST_POINTER_CHARS
        require(is_short, "text", f"has pointers of more than {MOST_POINTER_CHARS:,} characters in all")
        value, end = _read_value(self._text, place)
        number, first = len(self.nodes), len(self.leaves)
        self.nodes.append((pointer, value, first, first + 1))
        if isinstance(value, dict | list):
            self._read_parts(place, pointer, depth, is_object=isinstance(value, dict))
            self.nodes[number] = (pointer, value, first, len(self.leaves))
        elif isinstance(value, str):
            self.leaves.append((place + 1 if value else end - 1, end - 1 if value else end))
        else:
            self.leaves.append((place, end))
        return end

    def _read_parts(self, place: int, pointer: str, depth: int, *, is_object: bool) -> None:
        place, index = self.after_space(place + 1), 0
        while self._text[place] not in "}]":
            key = str(index)
            if is_object:
                key, place = _read_value(self._text, place)
                place = self.after_space(self.after_space(place) + 1)  # the colon
            name = key.replace("~", "~0").replace("/", "~1")
            place = self.after_space(self.read(place, f"{pointer}/{name}", depth + 1))
            if self._text[place] == ",":
                place = self.after_space(place + 1)
            index += 1

    def after_space(self, place: int) -> int:
        """The next place that is no white space."""
        while place < len(self._text) and self._text[place] in _SPACE:
            place += 1
        return place
