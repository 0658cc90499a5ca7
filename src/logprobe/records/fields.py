"""Log-probabilities of each value of a JSON text that a model wrote."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from logprobe.errors import ParameterError, require, shortened

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from logprobe.records import FlatLogprobs

    Floats = npt.NDArray[np.float64]

MAX_DEPTH: Final = 100  # of values in a text
MAX_POINTER_CHARS: Final = 1 << 20  # of all fields: a long name may stand in each of them
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
            more than `MAX_POINTER_CHARS`.
    """
    table = record.table
    require(table is not None, "record", "has no token table, which tells the bytes of its tokens")
    assert table is not None
    token_ids = record.chosen_entries().token_ids.tolist()
    return Spelt([table.token_bytes(token_id) for token_id in token_ids], text).fields(record)


class Split(NamedTuple):
    """A place within a token where a value begins or ends."""

    token: int  # its position
    num_bytes: int  # of it, before the place


class Node(NamedTuple):
    """A value of a text: which leaves are its own, [first, stop), and where it stands, [begin, end)."""

    pointer: str
    value: Any
    first: int
    stop: int
    begin: int
    end: int


class Spelt:
    """A JSON text by the tokens that spell it, which are consecutive and in their order.

    Args:
        pieces: the bytes of each token (T,), which begin with the text's.
        text: one JSON value, with white space around it or not.

    Raises:
        ParameterError: as `fields_of`.
    """

    def __init__(self, pieces: list[bytes], text: str) -> None:
        self.data, self.pieces = b"".join(pieces), pieces
        begins = self.data.startswith(text.encode())
        require(begins, "text", "is not what the record's tokens say; give a completion's own text")
        self.nodes, leaves = _read(text)
        self.objects = frozenset(node.pointer for node in self.nodes if isinstance(node.value, dict))
        self._ends = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
        self._begins = self._ends - np.array([len(piece) for piece in pieces], dtype=np.int64)
        places = np.array(leaves, dtype=np.int64).reshape(-1, 2)
        # Tokens that hold a byte of the leaf, and of these those that hold no other.
        self._starts = np.searchsorted(self._ends, places[:, 0], side="right")
        self._stops = np.maximum(np.searchsorted(self._begins, places[:, 1], side="left"), self._starts)
        own_starts = np.searchsorted(self._begins, places[:, 0], side="left")
        own_stops = np.searchsorted(self._ends, places[:, 1], side="right")
        self._own_starts = np.maximum(own_starts, self._starts)
        self._own_stops = np.minimum(own_stops, self._stops)
        self._places = places

    def token_at(self, place: int) -> tuple[int, int]:
        """The token that holds a byte of the text, and where that token begins."""
        token = int(np.searchsorted(self._ends, place, side="right"))
        return token, int(self._begins[token])

    def splits(self) -> set[Split]:
        """All places within tokens where a value begins or ends."""
        splits = {self._split(leaf, is_end=is_end) for leaf in range(len(self._places)) for is_end in (0, 1)}
        return {split for split in splits if split.num_bytes}

    def fields(self, record: FlatLogprobs, masses: Mapping[Split, float] | None = None) -> list[Field]:
        """The values in their order, by the record of the tokens.

        Args:
            record: of these tokens.
            masses: of each of `splits`, the log of the mass of all tokens that begin as its token does up to
                there; None: a value's log-probability then has two bounds.
        """
        logprobs = record.chosen_entries().logprobs.astype(np.float64)
        if masses is None:
            sums = self._bounds(logprobs)
        else:
            exact = self._exact(logprobs, masses)
            sums = (exact, exact, exact)
        return [self._field(node, logprobs, *sums) for node in self.nodes]

    def _bounds(self, logprobs: Floats) -> tuple[Floats, Floats, Floats]:
        """Of each leaf: its tokens, those that no leaf before it has, and those that hold no other bytes."""
        # A token of several leaves counts with the first of them in what holds them all.
        news = np.maximum(self._starts, np.concatenate([[0], self._stops])[:-1])
        return (
            _sums(logprobs, self._starts, self._stops),
            _sums(logprobs, news, self._stops),
            _sums(logprobs, self._own_starts, self._own_stops),
        )

    def _exact(self, logprobs: Floats, masses: Mapping[Split, float]) -> Floats:
        """Of each leaf: all up to its end, without all up to its beginning."""
        before = np.concatenate([[0.0], np.cumsum(logprobs)])
        reached = np.zeros(self._places.shape)
        for leaf, is_end in np.ndindex(reached.shape):
            split = self._split(leaf, is_end=is_end)
            reached[leaf, is_end] = before[split.token] + (masses[split] if split.num_bytes else 0.0)
        return np.minimum(reached[:, 1] - reached[:, 0], 0.0)

    def _split(self, leaf: int, *, is_end: int) -> Split:
        """Where a leaf begins or ends; within no token where it has no bytes of its token before it."""
        place = self._places[leaf, is_end]
        token = int(self._stops[leaf]) - 1 if is_end else int(self._starts[leaf])
        if is_end and self._ends[token] <= place:
            return Split(token + 1, 0)
        return Split(token, int(place - self._begins[token]))

    def _field(self, node: Node, logprobs: Floats, whole: Floats, new: Floats, own: Floats) -> Field:
        first, stop = node.first, node.stop
        starts, stops = self._starts[first:stop], self._stops[first:stop]
        begin, end = (int(starts[0]), int(stops[-1])) if stop > first else (0, 0)
        places = np.concatenate([np.arange(0), *map(np.arange, starts, stops)])
        return Field(
            pointer=node.pointer,
            value=node.value,
            logprob=float(whole[first:stop][:1].sum() + new[first + 1 : stop].sum()),
            upper=float(own[first:stop].sum()),
            tokens=range(begin, end),
            least_sure=int(places[logprobs[places].argmin()]) if len(places) else None,
        )


def _sums(logprobs: Floats, starts: npt.NDArray[np.int64], stops: npt.NDArray[np.int64]) -> Floats:
    return np.array([logprobs[start:stop].sum() for start, stop in zip(starts, stops, strict=True)])


Leaves = list[tuple[int, int]]


def _read(text: str) -> tuple[list[Node], Leaves]:
    """Each value, and the leaves' bytes.

    A string's are those between its quotes; of an empty one the closing quote, which says that it is empty.
    """
    reader = _Reader(text)
    try:
        end = reader.read(reader.after_space(0), "")
    except ParameterError:
        raise
    except (ValueError, RecursionError) as error:  # of an integer of thousands of digits, too
        remedy = "ask for JSON by response_format, and for tokens enough to end it"
        raise ParameterError("text", f"is no JSON that can be read ({error}); {remedy}") from error
    rest = text[end:].strip(_SPACE)
    require(not rest, "text", f"goes on after its JSON: {shortened(rest)!r}")
    offsets = [0, *accumulate(len(letter.encode()) for letter in text)]
    nodes = [node._replace(begin=offsets[node.begin], end=offsets[node.end]) for node in reader.nodes]
    return nodes, [(offsets[begin], offsets[stop]) for begin, stop in reader.leaves]


class _Reader:
    """Finds where the values of a text stand."""

    def __init__(self, text: str) -> None:
        self.nodes: list[Node] = []
        self.leaves: Leaves = []  # by letters
        self._text = text
        self._num_chars = 0  # of all pointers

    def read(self, place: int, pointer: str, depth: int = 0) -> int:
        """Take in the value at a place, then its parts; where it ends."""
        require(depth <= MAX_DEPTH, "text", f"is nested deeper than {MAX_DEPTH}")
        self._num_chars += len(pointer)
        is_short = self._num_chars <= MAX_POINTER_CHARS
        require(is_short, "text", f"has pointers of more than {MAX_POINTER_CHARS:,} characters in all")
        value, end = _read_value(self._text, place)
        number, first = len(self.nodes), len(self.leaves)
        self.nodes.append(Node(pointer, value, first, first + 1, place, end))
        if isinstance(value, dict | list):
            self._read_parts(place, pointer, depth, is_object=isinstance(value, dict))
            self.nodes[number] = self.nodes[number]._replace(stop=len(self.leaves))
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
