"""Sum the probabilities of texts over all of their tokenizations, using next-token distributions.

The caller provides the next-token distributions ("rows") that a `PathSum` requests; `Members` presents the
results.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from logprobe.analysis.measures import logsumexp

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from logprobe.models import Vocabulary
    from logprobe.text.edge import TextEdge

Floats: TypeAlias = npt.NDArray[np.float64]
Ids: TypeAlias = npt.NDArray[np.int64]
TOLERANCE: Final = 1e-7  # share of the total probability that need not be followed
MAX_ROWS: Final = 1024  # default limit on the rows requested per position
NEGLIGIBLE: Final = 1e-13  # a path with a smaller share of the total probability is dropped
MAX_OPEN: Final = 50_000  # maximum number of open paths
STAGES: Final = 2  # the model's own distribution, and the distribution masked by a grammar
NO_IDS: Final[Ids] = np.empty(0, np.int64)


class TokenIndex:
    """Tokens sorted by their bytes; special tokens, and tokens that have no bytes, are left out."""

    def __init__(self, pieces: Iterable[bytes], special_ids: Iterable[int]) -> None:
        specials = frozenset(special_ids)
        known = ((piece, i) for i, piece in enumerate(pieces) if piece and i not in specials)
        ordered = sorted(known)
        self._pieces = [piece for piece, _ in ordered]
        self._ids = np.array([token_id for _, token_id in ordered], np.int64)
        self._longest = max(map(len, self._pieces), default=0)
        self.special_ids = np.array(sorted(specials), np.int64)

    def beginning_with(self, data: bytes) -> Ids:
        """Return the ids of the tokens whose bytes start with `data`."""
        size = len(data)
        start = bisect_left(self._pieces, data)
        stop = bisect_right(self._pieces, data, lo=start, key=lambda piece: piece[:size])
        return self._ids[start:stop]

    def exactly(self, data: bytes) -> Ids:
        """Return the ids of the tokens whose bytes equal `data`."""
        start = bisect_left(self._pieces, data)
        return self._ids[start : bisect_right(self._pieces, data, lo=start)]

    def within(self, data: bytes) -> Iterator[tuple[bytes, Ids]]:
        """Yield the proper prefixes of `data` that are tokens, with their ids."""
        for size in range(1, min(len(data), self._longest + 1)):
            piece = data[:size]
            ids = self.exactly(piece)
            if len(ids):
                yield piece, ids


_INDEXES: WeakKeyDictionary[Vocabulary, dict[int, TokenIndex]] = WeakKeyDictionary()


def token_index(edge: TextEdge, vocab_size: int) -> TokenIndex:
    """Return the cached `TokenIndex` of a tokenizer's tokens with ids below `vocab_size`."""
    known = _INDEXES.setdefault(edge.vocabulary, {})
    if vocab_size not in known:
        count = min(vocab_size, len(edge.vocabulary))
        specials = (token_id for token_id in edge.special_token_ids if token_id < vocab_size)
        known[vocab_size] = TokenIndex(map(edge.vocabulary.token_bytes, range(count)), specials)
    return known[vocab_size]


class Ends(NamedTuple):
    """Tokens that complete a text."""

    text: int  # index of the text
    token_ids: Ids


class Steps(NamedTuple):
    """Tokens that may come next on the way to one of the texts."""

    further: list[tuple[bytes, Ids]]  # the bytes spelled including the token, and the tokens with these bytes
    ends: list[Ends]
    begins: Ids  # tokens that complete the bytes before the texts


class Texts:
    """Alternative texts at one position, as bytes.

    A text that ends with a quote or bracket is complete by itself; any other text is complete once one of the
    bytes in `followers` comes next.

    Args:
        before: bytes before the texts that may share a token with a text.
        texts: the texts; no text with the byte that follows it may be a prefix of another such text.
        followers: bytes, one of which must follow a text that is not complete by itself.
        may_end: if True, a special token may take the place of the following byte.
        index: the model's tokens.
    """

    def __init__(
        self, before: bytes, texts: Sequence[bytes], followers: bytes, index: TokenIndex, *, may_end: bool
    ) -> None:
        self.before, self._index = before, index
        self.num_texts = len(texts)
        whole = [(before + text, place) for place, text in enumerate(texts)]
        self._open = {text: place for text, place in whole if may_end and not _ends_itself(text)}
        ways = [
            (text + end, place)
            for text, place in whole
            for end in ([b""] if _ends_itself(text) else [bytes([byte]) for byte in followers])
        ]
        self._ways = sorted(ways)
        self._known: dict[bytes, Steps] = {}

    def steps(self, spelt: bytes) -> Steps:
        """Return the tokens that may come after `spelt`, a prefix of `before` plus a text; cached."""
        if spelt not in self._known:
            self._known[spelt] = self._steps(spelt)
        return self._known[spelt]

    def _steps(self, spelt: bytes) -> Steps:
        size = len(spelt)
        start = bisect_left(self._ways, spelt, key=lambda way: way[0])
        stop = bisect_right(self._ways, spelt, lo=start, key=lambda way: way[0][:size])
        further: dict[bytes, Ids] = {}
        ends: list[Ends] = []
        for way, text in self._ways[start:stop]:
            rest = way[size:]
            ends.append(Ends(text, self._index.beginning_with(rest)))
            further.update(self._index.within(rest))
        if spelt in self._open:
            ends.append(Ends(self._open[spelt], self._index.special_ids))
        is_before = size < len(self.before)
        begins = self._index.beginning_with(self.before[size:]) if is_before else NO_IDS
        return Steps([(spelt + piece, ids) for piece, ids in further.items()], ends, begins)


def _ends_itself(text: bytes) -> bool:
    return text[-1:] in (b'"', b"]", b"}")


@dataclass(frozen=True, slots=True, eq=False)
class Path:
    """Tokens that spell a prefix of a text."""

    token_ids: tuple[int, ...]
    spelt: bytes
    logprobs: Floats  # (STAGES,) nats, sum over the tokens


class PathSum:
    """Sums the probabilities of texts over token paths, extending the likeliest paths first.

    Call `next_paths` for the paths whose next-token rows are needed and pass each row to `take`, until there
    are no more paths.

    Args:
        texts: the texts.
        max_rows: maximum number of next-token rows to request.
        has_grammar: True if `take` is also given the tokens that a grammar allows; otherwise all results for
            stage 1 (the distribution masked by the grammar) are -inf.
    """

    def __init__(self, texts: Texts, max_rows: int, *, has_grammar: bool) -> None:
        self._texts = texts
        self._rows_left = max_rows
        self._open = [Path((), b"", np.array([0.0, 0.0 if has_grammar else -np.inf]))]
        self._given_up = np.full(STAGES, -np.inf)
        self._found = np.full((STAGES, texts.num_texts), -np.inf)
        # Log-probability of `before`, summed over all paths; an empty `before` has probability 1.
        self._begun = np.full(STAGES, -np.inf if texts.before else 0.0)

    def next_paths(self, most: int) -> list[Path]:
        """Return up to `most` paths to extend; none if all are negligible or the row limit is reached."""
        shares = self._shares()
        order = sorted(range(len(shares)), key=lambda i: (-shares[i], self._open[i].token_ids))
        kept = order[: min(int(np.sum(shares >= NEGLIGIBLE)), MAX_OPEN)]
        if len(kept) < len(order):
            lost = logsumexp(np.array([self._open[i].logprobs for i in order[len(kept) :]]).T)
            self._given_up = np.logaddexp(self._given_up, lost)
        # The least likely paths, whose total is within the tolerance, stay open and count as unresolved.
        left = np.cumsum(shares[kept][::-1])[::-1]
        count = min(int(np.sum(left > TOLERANCE)), self._rows_left, most)
        chosen = [self._open[i] for i in kept[:count]]
        self._open = [self._open[i] for i in kept[count:]]
        self._rows_left -= count
        return chosen

    def take(self, path: Path, row: npt.NDArray[np.float32], allowed: npt.NDArray[np.bool_] | None) -> None:
        """Extend a path by every token that may come next.

        Args:
            path: the path.
            row: (V,) log-probabilities of the next token, in nats.
            allowed: (V,) mask of the tokens that the grammar allows; None without a grammar, or if the
                grammar does not allow the path.
        """
        steps, before = self._texts.steps(path.spelt), path.logprobs
        stages = _stages(row.astype(np.float64), allowed)
        for text, ids in steps.ends:
            found = before + logsumexp(stages[:, ids])
            self._found[:, text] = np.logaddexp(self._found[:, text], found)
        if len(steps.begins):
            self._begun = np.logaddexp(self._begun, before + logsumexp(stages[:, steps.begins]))
        for spelt, ids in steps.further:
            for token_id in ids.tolist():
                self._open.append(Path((*path.token_ids, token_id), spelt, before + stages[:, token_id]))

    def give_up(self, path: Path) -> None:
        """Drop a path whose row is not available; the path's probability counts as unresolved."""
        self._given_up = np.logaddexp(self._given_up, path.logprobs)

    def logprobs(self, stage: int) -> Floats:
        """Return log P(text given `before`) for each text, (T,) nats.

        Each probability is too small by at most `unresolved(stage)`.
        """
        begun = self._begun[stage]
        found: Floats = self._found[stage] - (begun if np.isfinite(begun) else 0.0)
        return np.minimum(found, 0.0)

    def unresolved(self, stage: int) -> float:
        """Return the total probability, given `before`, of the paths that were not followed to the end."""
        return float(min(np.exp(self._left(stage) - self._begun[stage]), 1.0))

    def _left(self, stage: int) -> Floats:
        return logsumexp([self._given_up[stage], *(path.logprobs[stage] for path in self._open)])

    def _shares(self) -> Floats:
        """Return each open path's share of the total probability, in the stage where that share is larger."""
        if not self._open:
            return np.empty(0)
        logs = np.array([path.logprobs for path in self._open]).T
        whole = np.logaddexp(logsumexp(self._found), logsumexp(logs))
        with np.errstate(invalid="ignore"):  # a stage without any mass
            shares: Floats = np.nan_to_num(np.exp(logs - whole[:, None])).max(axis=0)
        return shares


def _stages(row: Floats, allowed: npt.NDArray[np.bool_] | None) -> Floats:
    """Stack a row and the row masked by the grammar and renormalized, (STAGES, V) nats."""
    stages = np.stack([row, np.full_like(row, -np.inf)])
    if allowed is not None:
        stages[1, allowed] = row[allowed] - logsumexp(row[allowed])
    return stages
