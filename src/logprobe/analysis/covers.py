"""Probability of bytes after some tokens, summed over the token sequences that cover the bytes.

A sequence covers bytes if its tokens spell them and only its last token may reach beyond their end. The
number of covers grows exponentially with the bytes, but nearly all mass is on a few of them. `Covers`
therefore extends the likeliest prefixes first, until the rest cannot change the sum (`TOLERANCE`) or the row
limit is reached. `SpanSum` requests the rows of several sums with the same given tokens, each row once.

Numerators are lower bounds and the denominator is an upper bound, so no conditional probability is too large,
and those of texts that are not prefixes of each other sum to at most 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

import numpy as np

from logprobe.analysis.measures import logsumexp

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from logprobe.analysis.spellings import Floats, Ids, TokenIndex
    from logprobe.records.values import IntArray
    from logprobe.text.boundary import Split

TOLERANCE: Final = 1e-7  # share of a sum that need not be followed
MAX_STEPS: Final = 1024  # rows for all sums after the same tokens, divided evenly,
MIN_STEPS: Final = 128  # but at least this many for each sum
STEPS_AT_ONCE: Final = 16
MAX_ENDS: Final = 4  # covers that are continued with the tokens after the bytes
ENDS_TOLERANCE: Final = 1e-5  # share of the mass of all covers below which a cover is not continued

TokenIds: TypeAlias = "tuple[int, ...]"


class Cover(NamedTuple):
    """Tokens that spell a prefix of the bytes, or all of them."""

    token_ids: TokenIds
    num_bytes: int
    logprob: float  # nats, sum over these tokens


class Row(NamedTuple):
    """Log-probabilities of some tokens at one position."""

    token_ids: Ids  # (n,) ascending
    logprobs: Floats  # (n,) nats

    def of(self, token_ids: Ids) -> Floats:
        """Return the log-probabilities of these tokens, (m,) nats."""
        found: Floats = self.logprobs[np.searchsorted(self.token_ids, token_ids)]
        return found


class Covers:
    """The sum over all token sequences that cover some bytes, the likeliest first.

    Args:
        text: the bytes.
        index: the model's tokens.
        is_open: if True, the last token may reach beyond the bytes; otherwise it must end with them.
        max_steps: maximum number of rows.
    """

    def __init__(self, text: bytes, index: TokenIndex, *, is_open: bool, max_steps: int) -> None:
        self.text, self._index, self._is_open = text, index, is_open
        self._open = [Cover((), 0, 0.0)] if text else []
        self._found = [] if text else [0.0]
        self._given_up: list[float] = []
        self._steps_left = max_steps
        self.ends: list[Cover] = []  # complete covers; only filled if `is_open` is False

    @property
    def logprob(self) -> float:
        """Log of the sum over the covers found so far, nats: a lower bound."""
        return _log_sum(self._found)

    @property
    def upper_bound(self) -> float:
        """Log of the sum including everything that was not followed to its end, nats."""
        return _log_sum([*self._found, *self._given_up, *(cover.logprob for cover in self._open)])

    def wanted(self, num_bytes: int) -> Ids:
        """Return the tokens whose log-probabilities are needed after the first `num_bytes` bytes."""
        rest = self.text[num_bytes:]
        last = self._index.beginning_with(rest) if self._is_open else self._index.exactly(rest)
        return np.concatenate([last, *(ids for _, ids in self._index.within(rest))])

    def next_covers(self) -> list[Cover]:
        """Return the prefixes to extend; none if the rest is negligible or no rows are left."""
        self._open.sort(key=lambda cover: (-cover.logprob, cover.token_ids))
        logprobs = np.array([cover.logprob for cover in self._open])
        # Log mass of each prefix and all after it: the most that these could add to the sum.
        left = np.array([logsumexp(logprobs[place:]) for place in range(min(len(logprobs), STEPS_AT_ONCE))])
        with np.errstate(invalid="ignore"):  # -inf - -inf
            counts = int(np.sum(left - self.logprob > np.log(TOLERANCE)))
        count = min(counts, self._steps_left)
        taken, self._open = self._open[:count], self._open[count:]
        self._steps_left -= count
        return taken

    def take(self, cover: Cover, row: Row) -> None:
        """Extend a prefix by the row after it."""
        rest = self.text[cover.num_bytes :]
        last = self._index.beginning_with(rest) if self._is_open else self._index.exactly(rest)
        if len(last):
            self._found.append(cover.logprob + float(logsumexp(row.of(last))))
        if not self._is_open:
            self.ends += self._longer(cover, len(rest), last, row)
        for piece, ids in self._index.within(rest):
            self._open += self._longer(cover, len(piece), ids, row)

    @staticmethod
    def _longer(cover: Cover, num_bytes: int, ids: Ids, row: Row) -> list[Cover]:
        logprobs = (cover.logprob + row.of(ids)).tolist()
        return [
            Cover((*cover.token_ids, token_id), cover.num_bytes + num_bytes, logprob)
            for token_id, logprob in zip(ids.tolist(), logprobs, strict=True)
            if logprob > -np.inf
        ]

    def give_up(self, cover: Cover) -> None:
        """Drop a prefix, for example if it is too long for the model."""
        self._given_up.append(cover.logprob)

    def likely_ends(self) -> list[Cover]:
        """Return the covers to continue with the tokens after the bytes, the likeliest first."""
        least = self.logprob + float(np.log(ENDS_TOLERANCE))
        ends = sorted(self.ends, key=lambda cover: (-cover.logprob, cover.token_ids))
        return [cover for cover in ends[:MAX_ENDS] if cover.logprob >= least]


class Ask(NamedTuple):
    """A request for a row: the log-probabilities of `wanted` after the given tokens and `token_ids`."""

    token_ids: TokenIds
    wanted: Ids  # ascending


class SpanSum:
    """Conditional log-probabilities of continuations after the same tokens and the same tail of a context.

    Pass the rows of `next_asks` to `take` until there are no more, then score `rests` and call `logprobs`.

    Args:
        splits: with healing; all have the same given tokens and tail.
        index: the model's tokens.
    """

    def __init__(self, splits: Sequence[Split], index: TokenIndex) -> None:
        self._splits = splits
        healings = [split.healing for split in splits if split.healing is not None]
        assert len(healings) == len(splits), "all splits have healing"
        self.given: IntArray = splits[0].token_ids[: healings[0].first]
        max_steps = max(MAX_STEPS // len(splits), MIN_STEPS)
        self._tail = Covers(healings[0].tail, index, is_open=True, max_steps=max_steps)
        self._texts = [Covers(one.text, index, is_open=one.is_open, max_steps=max_steps) for one in healings]
        self._by_beginning: dict[int, dict[bytes, list[Covers]]] = {}  # prefix length → prefix → sums
        self._rows: dict[TokenIds, Row] = {}
        self._waiting: list[tuple[Covers, Cover]] = []

    def next_asks(self) -> list[Ask]:
        """Return the rows to read next; none if all sums are done."""
        sums = [self._tail, *self._texts]
        while not self._waiting:
            taken = [(one, cover) for one in sums for cover in one.next_covers()]
            if not taken:
                return []
            for one, cover in taken:
                if cover.token_ids in self._rows:
                    one.take(cover, self._rows[cover.token_ids])
                else:
                    self._waiting.append((one, cover))
        beginnings = {cover.token_ids: (one, cover.num_bytes) for one, cover in self._waiting}
        # Read the tokens of all sums that share this prefix at once.
        return [
            Ask(
                token_ids,
                np.unique(np.concatenate([other.wanted(size) for other in self._alike(one, size)])),
            )
            for token_ids, (one, size) in beginnings.items()
        ]

    def _alike(self, one: Covers, size: int) -> list[Covers]:
        """Return the sums over more than `size` bytes that share the first `size` bytes of `one`."""
        if size not in self._by_beginning:
            sums = self._by_beginning[size] = {}
            for other in [self._tail, *self._texts]:
                if len(other.text) > size:
                    sums.setdefault(other.text[:size], []).append(other)
        return self._by_beginning[size][one.text[:size]]

    def take(self, rows: Iterable[tuple[Ask, Floats | None]]) -> None:
        """Process the requested rows; None for one that is too long for the model."""
        known = {ask.token_ids: None if row is None else Row(ask.wanted, row) for ask, row in rows}
        self._rows |= {token_ids: row for token_ids, row in known.items() if row is not None}
        for one, cover in self._waiting:
            row = known[cover.token_ids]
            if row is None:
                one.give_up(cover)
            else:
                one.take(cover, row)
        self._waiting = []

    def rests(self) -> list[list[tuple[Cover, IntArray]]]:
        """Return for each split the covers to continue and the tokens after them; none if nothing follows."""
        return [
            []
            if split.healing is None or split.healing.stop == len(split.token_ids)
            else [(cover, split.token_ids[split.healing.stop :]) for cover in covers.likely_ends()]
            for split, covers in zip(self._splits, self._texts, strict=True)
        ]

    def logprobs(self, rests: Sequence[Sequence[float]]) -> list[float]:
        """Return log P(continuation given context) of each split, nats, from the logprobs of its `rests`."""
        bound = self._tail.upper_bound
        found = []
        for split, covers, totals in zip(self._splits, self._texts, rests, strict=True):
            assert split.healing is not None
            if split.healing.stop == len(split.token_ids):
                logprob = covers.logprob
            else:
                ends = zip(covers.likely_ends(), totals, strict=True)
                logprob = _log_sum([cover.logprob + total for cover, total in ends])
            found.append(min(logprob - bound, 0.0) if logprob > -np.inf else -np.inf)
        return found


def group_splits(splits: Sequence[Split]) -> list[list[int]]:
    """Group the indices of splits with the same given tokens and tail."""
    groups: dict[tuple[bytes, bytes], list[int]] = {}
    for place, split in enumerate(splits):
        if split.healing is not None:
            key = (split.token_ids[: split.healing.first].tobytes(), split.healing.tail)
            groups.setdefault(key, []).append(place)
    return [*groups.values()]


def _log_sum(values: Iterable[float]) -> float:
    logs = np.array([*values])
    return float(logsumexp(logs)) if len(logs) else -np.inf
