"""Probability of given bytes after a token sequence, summed over all tokenizations of the bytes.

A cover of some bytes is a token sequence whose text begins with the bytes; only its last token may extend
past the end of the bytes. The number of covers grows exponentially with the number of bytes, but a few covers
have nearly all the probability. `Covers` therefore extends the likeliest prefixes first, until the remaining
ones cannot change the sum (`TOLERANCE`) or the limit on next-token distributions ("rows") is reached.
`SpanSum` computes several sums after the same tokens and requests each row once.

A conditional probability is the sum for the tail of the context with the continuation, divided by the sum for
the tail alone. The numerator is a lower bound and the denominator an upper bound, so no conditional
probability is too large: over texts none of which is a prefix of another, they sum to at most 1.
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

TOLERANCE: Final = 1e-7  # a sum may be too small by this fraction
MAX_STEPS: Final = 1024  # next-token rows for all sums after the same tokens, divided evenly,
MIN_STEPS: Final = 128  # but at least this many rows for each sum
STEPS_AT_ONCE: Final = 16  # rows that one sum requests at once
MAX_ENDS: Final = 4  # maximum number of covers from which the tokens that follow the bytes are scored
ENDS_TOLERANCE: Final = 1e-5  # a cover with a smaller fraction of all covers' probability is not continued

TokenIds: TypeAlias = "tuple[int, ...]"


class Cover(NamedTuple):
    """A complete or partial cover: tokens whose text begins with the first `num_bytes` of the given bytes."""

    token_ids: TokenIds
    num_bytes: int
    logprob: float  # nats, sum over these tokens


class Row(NamedTuple):
    """Log-probabilities of selected tokens at one position."""

    token_ids: Ids  # (n,) ascending
    logprobs: Floats  # (n,) nats

    def of(self, token_ids: Ids) -> Floats:
        """Return the log-probabilities, (m,) nats, of m tokens that the row contains."""
        found: Floats = self.logprobs[np.searchsorted(self.token_ids, token_ids)]
        return found


class Covers:
    """Sums the probabilities of all token sequences that spell given bytes, extending the likeliest first.

    Args:
        text: the bytes.
        index: the model's tokens.
        is_open: if True, the last token may extend past the end of the bytes; otherwise it must stop exactly
            there.
        max_steps: maximum number of next-token distributions to request.
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
        """Log of the sum over the covers found so far, in nats: a lower bound of the whole sum."""
        return _log_sum(self._found)

    @property
    def upper_bound(self) -> float:
        """Log of the sum if every prefix that was not followed to the end counts in full, in nats."""
        return _log_sum([*self._found, *self._given_up, *(cover.logprob for cover in self._open)])

    def wanted(self, num_bytes: int) -> Ids:
        """Return the ids of the tokens whose logprobs are needed after the first `num_bytes` bytes."""
        rest = self.text[num_bytes:]
        last = self._index.beginning_with(rest) if self._is_open else self._index.exactly(rest)
        return np.concatenate([last, *(ids for _, ids in self._index.within(rest))])

    def next_covers(self) -> list[Cover]:
        """Return the prefixes to extend, or none if they are negligible or the limit on rows is reached."""
        self._open.sort(key=lambda cover: (-cover.logprob, cover.token_ids))
        logprobs = np.array([cover.logprob for cover in self._open])
        # Log of the total probability of each prefix and all later ones: the most they could add to the sum.
        left = np.array([logsumexp(logprobs[place:]) for place in range(min(len(logprobs), STEPS_AT_ONCE))])
        with np.errstate(invalid="ignore"):  # -inf - -inf
            counts = int(np.sum(left - self.logprob > np.log(TOLERANCE)))
        count = min(counts, self._steps_left)
        taken, self._open = self._open[:count], self._open[count:]
        self._steps_left -= count
        return taken

    def take(self, cover: Cover, row: Row) -> None:
        """Extend a prefix, given the log-probabilities of the next token in `row`."""
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
        """Return the covers to continue with the tokens that follow the bytes, likeliest first."""
        least = self.logprob + float(np.log(ENDS_TOLERANCE))
        ends = sorted(self.ends, key=lambda cover: (-cover.logprob, cover.token_ids))
        return [cover for cover in ends[:MAX_ENDS] if cover.logprob >= least]


class Ask(NamedTuple):
    """A request for the logprobs of the tokens `wanted`, given the context's tokens and then `token_ids`."""

    token_ids: TokenIds
    wanted: Ids  # ascending


class SpanSum:
    """Log-probabilities of continuations of one context, summed over all tokenizations of the healed bytes.

    Call `take` with the rows that `next_asks` asks for, until `next_asks` returns none. Then score `rests`
    and call `logprobs`.

    Args:
        splits: contexts with continuations that need healing. All have the same tokens before the healed
            bytes, and the same healed bytes of the context ("tail").
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
        """Return the requests for the next rows, or none if all sums are complete."""
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
        """Return the sums over more than `size` bytes that begin with the first `size` bytes of `one`."""
        if size not in self._by_beginning:
            sums = self._by_beginning[size] = {}
            for other in [self._tail, *self._texts]:
                if len(other.text) > size:
                    sums.setdefault(other.text[:size], []).append(other)
        return self._by_beginning[size][one.text[:size]]

    def take(self, rows: Iterable[tuple[Ask, Floats | None]]) -> None:
        """Process the requested rows; a row is None if its sequence is too long for the model."""
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
        """Return each split's likeliest covers, each with the tokens to score after it.

        The list of a split is empty if no tokens follow the healed bytes.
        """
        return [
            []
            if split.healing is None or split.healing.stop == len(split.token_ids)
            else [(cover, split.token_ids[split.healing.stop :]) for cover in covers.likely_ends()]
            for split, covers in zip(self._splits, self._texts, strict=True)
        ]

    def logprobs(self, rests: Sequence[Sequence[float]]) -> list[float]:
        """Return log P(continuation given context) for each split, in nats.

        `rests` has, for each split, the logprob (nats) of the tokens that the method `rests` paired with each
        cover.
        """
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
    """Group the indices of splits that share the tokens before the healed bytes, and the context's tail."""
    groups: dict[tuple[bytes, bytes], list[int]] = {}
    for place, split in enumerate(splits):
        if split.healing is not None:
            key = (split.token_ids[: split.healing.first].tobytes(), split.healing.tail)
            groups.setdefault(key, []).append(place)
    return [*groups.values()]


def _log_sum(values: Iterable[float]) -> float:
    logs = np.array([*values])
    return float(logsumexp(logs)) if len(logs) else -np.inf
