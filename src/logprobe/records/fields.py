"""Log-probability of each value in a JSON text that a model generated."""

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

MAX_DEPTH: Final = 100  # nesting depth of the values in a text
# limit on the length of all pointers together; each one repeats the pointer of its parent
MAX_POINTER_CHARS: Final = 1 << 20
_SPACE: Final = " \t\n\r"
_read_value: Final = json.JSONDecoder().raw_decode


@dataclass(frozen=True, slots=True)
class Field:
    """One value in a JSON text and the log-probability (nats) that the model gave it.

    A token may cover bytes of the value and of the surrounding text, such as `"pos`. `logprob` includes such
    tokens and `upper` excludes them, so the value's own conditional log-probability lies between the two.
    The bounds are equal if there are no such tokens, or if the exact probability of the text up to each
    boundary of a value is known.
    """

    pointer: str  # JSON Pointer (RFC 6901); the empty string is the whole text
    value: Any
    # nats, sum over the value's tokens; for an object or array, over the tokens of its leaf values
    logprob: float
    upper: float
    tokens: range  # positions of the value's tokens; for an object or array they include keys and punctuation
    least_sure: int | None  # position of the value's least likely token; None if the value has no tokens

    @property
    def probability(self) -> float:
        """Probability of the value in the spelling that was generated: exp(`logprob`)."""
        return float(np.exp(self.logprob))


def fields_of(record: FlatLogprobs, text: str) -> list[Field]:
    """Return all values in a JSON text in document order; an object or array precedes its members.

    Args:
        record: record of the tokens whose bytes start with `text`.
        text: one JSON value, optionally surrounded by whitespace.

    Raises:
        ParameterError: the record has no token table; the text is not valid JSON or not a prefix of the
            record's bytes; or the JSON pointers to its values exceed `MAX_POINTER_CHARS` characters in total.
    """
    table = record.table
    require(
        table is not None, "record", "has no token texts; attach a token table with record.with_table(table)"
    )
    assert table is not None
    token_ids = record.chosen_entries().token_ids.tolist()
    return Spelt([table.token_bytes(token_id) for token_id in token_ids], text).fields(record)


class Split(NamedTuple):
    """A position within a token where a value begins or ends."""

    token: int  # index of the token
    num_bytes: int  # bytes of the token before the split


class Node(NamedTuple):
    """A value in a text: its leaves have the indices [first, stop), and its text is the range [begin, end).

    The range counts characters in `_Reader` and bytes in `Spelt`.
    """

    pointer: str
    value: Any
    first: int
    stop: int
    begin: int
    end: int


class Spelt:
    """Alignment of a JSON text with the consecutive tokens that spell it.

    Args:
        pieces: the bytes of each of the T tokens; concatenated, they start with the bytes of `text`.
        text: one JSON value, optionally surrounded by whitespace.

    Raises:
        ParameterError: as in `fields_of`.
    """

    def __init__(self, pieces: list[bytes], text: str) -> None:
        self.data, self.pieces = b"".join(pieces), pieces
        begins = self.data.startswith(text.encode())
        require(begins, "text", "does not match the record's tokens; pass the completion's own text")
        self.nodes, leaves = _read(text)
        self.objects = frozenset(node.pointer for node in self.nodes if isinstance(node.value, dict))
        self._ends = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
        self._begins = self._ends - np.array([len(piece) for piece in pieces], dtype=np.int64)
        places = np.array(leaves, dtype=np.int64).reshape(-1, 2)
        # `_starts` and `_stops` bound the tokens that overlap a leaf, `_own_*` those entirely within it.
        self._starts = np.searchsorted(self._ends, places[:, 0], side="right")
        self._stops = np.maximum(np.searchsorted(self._begins, places[:, 1], side="left"), self._starts)
        own_starts = np.searchsorted(self._begins, places[:, 0], side="left")
        own_stops = np.searchsorted(self._ends, places[:, 1], side="right")
        self._own_starts = np.maximum(own_starts, self._starts)
        self._own_stops = np.minimum(own_stops, self._stops)
        self._places = places

    def token_at(self, place: int) -> tuple[int, int]:
        """Return the index of the token that contains the byte `place`, and where that token starts."""
        token = int(np.searchsorted(self._ends, place, side="right"))
        return token, int(self._begins[token])

    def splits(self) -> set[Split]:
        """Return all positions strictly within tokens where a value begins or ends."""
        splits = {self._split(leaf, is_end=is_end) for leaf in range(len(self._places)) for is_end in (0, 1)}
        return {split for split in splits if split.num_bytes}

    def fields(self, record: FlatLogprobs, masses: Mapping[Split, float] | None = None) -> list[Field]:
        """Return all values in document order, with log-probabilities taken from `record`.

        Args:
            record: record whose chosen tokens are the ones given as `pieces`.
            masses: for each of `splits`, the log of the total probability (nats) of all tokens that start
                with the token's bytes before the split. With None, each value's log-probability is only
                bounded from both sides.
        """
        logprobs = record.chosen_entries().logprobs.astype(np.float64)
        if masses is None:
            sums = self._bounds(logprobs)
        else:
            exact = self._exact(logprobs, masses)
            sums = (exact, exact, exact)
        return [self._field(node, logprobs, *sums) for node in self.nodes]

    def _bounds(self, logprobs: Floats) -> tuple[Floats, Floats, Floats]:
        """Return three sums of log-probabilities per leaf.

        The sums are over all tokens that overlap the leaf, over those of them that overlap no earlier leaf,
        and over the tokens that lie entirely within the leaf.
        """
        # In the sum of an object or array, a token shared by several leaves counts once, with the first.
        news = np.maximum(self._starts, np.concatenate([[0], self._stops])[:-1])
        return (
            _sums(logprobs, self._starts, self._stops),
            _sums(logprobs, news, self._stops),
            _sums(logprobs, self._own_starts, self._own_stops),
        )

    def _exact(self, logprobs: Floats, masses: Mapping[Split, float]) -> Floats:
        """Return the log-probability of each leaf.

        It is the difference between the log-probabilities of the text up to the leaf's end and up to its
        start.
        """
        before = np.concatenate([[0.0], np.cumsum(logprobs)])
        reached = np.zeros(self._places.shape)
        for leaf, is_end in np.ndindex(reached.shape):
            split = self._split(leaf, is_end=is_end)
            reached[leaf, is_end] = before[split.token] + (masses[split] if split.num_bytes else 0.0)
        return np.minimum(reached[:, 1] - reached[:, 0], 0.0)

    def _split(self, leaf: int, *, is_end: int) -> Split:
        """Return the split at the start or end of a leaf; its `num_bytes` is 0 at a token boundary."""
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
    """Return the nodes in a JSON text and the byte range of each leaf.

    A string's range excludes its quotes; an empty string's range is its closing quote.
    """
    reader = _Reader(text)
    try:
        end = reader.read(reader.after_space(0), "")
    except ParameterError:
        raise
    except (ValueError, RecursionError) as error:  # ValueError also for integers of thousands of digits
        remedy = "request JSON with response_format, and enough max_tokens to complete it"
        raise ParameterError("text", f"is not valid JSON ({error}); {remedy}") from error
    rest = text[end:].strip(_SPACE)
    require(not rest, "text", f"has text after its JSON: {shortened(rest)!r}")
    offsets = [0, *accumulate(len(letter.encode()) for letter in text)]
    nodes = [node._replace(begin=offsets[node.begin], end=offsets[node.end]) for node in reader.nodes]
    return nodes, [(offsets[begin], offsets[stop]) for begin, stop in reader.leaves]


def is_deeper(value: Any, max_depth: int) -> bool:
    """Return True if a JSON value is nested deeper than `max_depth`; does not recurse."""
    level = [value]
    for _ in range(max_depth + 1):
        level = [
            inner
            for part in level
            if isinstance(part, dict | list)
            for inner in (part.values() if isinstance(part, dict) else part)
        ]
        if not level:
            return False
    return True


class _Reader:
    """Recursive reader that records the position of every value in a JSON text."""

    def __init__(self, text: str) -> None:
        self.nodes: list[Node] = []
        self.leaves: Leaves = []  # ranges in characters
        self._text = text
        self._num_chars = 0  # total length of the pointers so far

    def read(self, place: int, pointer: str, depth: int = 0) -> int:
        """Read the value at character `place` and its members; return the index after its last character."""
        require(depth <= MAX_DEPTH, "text", f"is nested deeper than {MAX_DEPTH} levels")
        self._num_chars += len(pointer)
        is_short = self._num_chars <= MAX_POINTER_CHARS
        require(is_short, "text", f"has JSON pointers of more than {MAX_POINTER_CHARS:,} characters in total")
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
        """Return the index of the first character, at or after `place`, that is not whitespace."""
        while place < len(self._text) and self._text[place] in _SPACE:
            place += 1
        return place
