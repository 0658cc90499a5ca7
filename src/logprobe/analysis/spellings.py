"""How likely texts are, summed over every way that tokens spell them, from whole next-token rows.

Before it: who asks for rows, a front door. After it: `Members`, what fields are asked for.
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
TOLERANCE: Final = 1e-7  # of all texts' mass: what is not followed any further
MAX_ROWS: Final = 1024  # that the texts of one place may take, where nobody says otherwise
NEGLIGIBLE: Final = 1e-13  # of the same mass: a path that is given up
MAX_OPEN: Final = 50_000  # paths that are kept to go on with
STAGES: Final = 2  # the model's own distribution, and the same under a grammar
NO_IDS: Final[Ids] = np.empty(0, np.int64)


class TokenIndex:
    """Tokens by their bytes; those without any, and special ones, spell nothing and are left out."""

    def __init__(self, pieces: Iterable[bytes], special_ids: Iterable[int]) -> None:
        specials = frozenset(special_ids)
        known = ((piece, i) for i, piece in enumerate(pieces) if piece and i not in specials)
        ordered = sorted(known)
        self._pieces = [piece for piece, _ in ordered]
        self._ids = np.array([token_id for _, token_id in ordered], np.int64)
        self._longest = max(map(len, self._pieces), default=0)
        self.special_ids = np.array(sorted(specials), np.int64)

    def beginning_with(self, data: bytes) -> Ids:
        """The tokens whose bytes begin with these."""
        size = len(data)
        start = bisect_left(self._pieces, data)
        stop = bisect_right(self._pieces, data, lo=start, key=lambda piece: piece[:size])
        return self._ids[start:stop]

    def exactly(self, data: bytes) -> Ids:
        """The tokens whose bytes are these."""
        start = bisect_left(self._pieces, data)
        return self._ids[start : bisect_right(self._pieces, data, lo=start)]

    def within(self, data: bytes) -> Iterator[tuple[bytes, Ids]]:
        """The beginnings of these bytes, without the whole, that are tokens."""
        for size in range(1, min(len(data), self._longest + 1)):
            piece = data[:size]
            ids = self.exactly(piece)
            if len(ids):
                yield piece, ids


_INDEXES: WeakKeyDictionary[Vocabulary, dict[int, TokenIndex]] = WeakKeyDictionary()


def token_index(edge: TextEdge, vocab_size: int) -> TokenIndex:
    """The tokens of a tokenizer that a model of `vocab_size` has, by their bytes; made once."""
    known = _INDEXES.setdefault(edge.vocabulary, {})
    if vocab_size not in known:
        count = min(vocab_size, len(edge.vocabulary))
        specials = (token_id for token_id in edge.special_token_ids if token_id < vocab_size)
        known[vocab_size] = TokenIndex(map(edge.vocabulary.token_bytes, range(count)), specials)
    return known[vocab_size]


class Ends(NamedTuple):
    """The tokens by which a text is spelt to its end."""

    text: int  # its place among the texts
    token_ids: Ids


class Steps(NamedTuple):
    """What the tokens after some bytes lead to; all others lead to none of the texts."""

    further: list[tuple[bytes, Ids]]  # bytes by then, and the tokens that lead there
    ends: list[Ends]
    begins: Ids  # by which all is spelt that stands before the texts


class Texts:
    """Texts that may stand at one place, as bytes.

    A text ends by itself (with its quote or bracket) or where one of `followers` comes after it.

    Args:
        before: what stands before each of them, where a token may hold bytes of both.
        texts: none of which begins another, together with what follows it.
        followers: bytes of which one must follow a text that does not end by itself.
        may_end: whether the end of all, which special tokens are, may follow such a text too.
        index: of the tokens.
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
        """What comes after these bytes, of `before` and of a text."""
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
    """Tokens that spell the beginning of a text."""

    token_ids: tuple[int, ...]
    spelt: bytes
    logprobs: Floats  # (STAGES,) of these tokens one after the other, nats


class PathSum:
    """Sums the paths of tokens that spell some texts, the likeliest first.

    Ask `next_paths` for those whose next-token rows are wanted, give each to `take`, until there are none.

    Args:
        texts: what is to be spelt.
        max_rows: rows to ask for, at most.
        has_grammar: whether `take` is given what a grammar allows; if not, the second stage stays empty.
    """

    def __init__(self, texts: Texts, max_rows: int, *, has_grammar: bool) -> None:
        self._texts = texts
        self._rows_left = max_rows
        self._open = [Path((), b"", np.array([0.0, 0.0 if has_grammar else -np.inf]))]
        self._given_up = np.full(STAGES, -np.inf)
        self._found = np.full((STAGES, texts.num_texts), -np.inf)
        # Of all that spells what stands before the texts; nothing may.
        self._begun = np.full(STAGES, -np.inf if texts.before else 0.0)

    def next_paths(self, most: int) -> list[Path]:
        """The paths to go on with, at once; none where what is left is too little, or no row is left."""
        shares = self._shares()
        order = sorted(range(len(shares)), key=lambda i: (-shares[i], self._open[i].token_ids))
        kept = order[: min(int(np.sum(shares >= NEGLIGIBLE)), MAX_OPEN)]
        if len(kept) < len(order):
            lost = logsumexp(np.array([self._open[i].logprobs for i in order[len(kept) :]]).T)
            self._given_up = np.logaddexp(self._given_up, lost)
        # The tail that together is within the tolerance waits, in case it is never needed.
        left = np.cumsum(shares[kept][::-1])[::-1]
        count = min(int(np.sum(left > TOLERANCE)), self._rows_left, most)
        chosen = [self._open[i] for i in kept[:count]]
        self._open = [self._open[i] for i in kept[count:]]
        self._rows_left -= count
        return chosen

    def take(self, path: Path, row: npt.NDArray[np.float32], allowed: npt.NDArray[np.bool_] | None) -> None:
        """Go on from a path by its row (V,), nats, and by what the grammar allows after it, (V,) bool.

        None: there is no grammar, or it does not allow the path.
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
        """Count a path that was to be gone on with, and whose row cannot be had, as not followed."""
        self._given_up = np.logaddexp(self._given_up, path.logprobs)

    def logprobs(self, stage: int) -> Floats:
        """Of each text after what stands before it, (T,) nats; off by `unresolved` at most."""
        begun = self._begun[stage]
        found: Floats = self._found[stage] - (begun if np.isfinite(begun) else 0.0)
        return np.minimum(found, 0.0)

    def unresolved(self, stage: int) -> float:
        """The probability of what was not followed, after what stands before the texts."""
        return float(min(np.exp(self._left(stage) - self._begun[stage]), 1.0))

    def _left(self, stage: int) -> Floats:
        return logsumexp([self._given_up[stage], *(path.logprobs[stage] for path in self._open)])

    def _shares(self) -> Floats:
        """Of each open path in all that is found or open, at that of the stages where it is the larger."""
        if not self._open:
            return np.empty(0)
        logs = np.array([path.logprobs for path in self._open]).T
        whole = np.logaddexp(logsumexp(self._found), logsumexp(logs))
        with np.errstate(invalid="ignore"):  # of a stage where nothing is possible
            shares: Floats = np.nan_to_num(np.exp(logs - whole[:, None])).max(axis=0)
        return shares


def _stages(row: Floats, allowed: npt.NDArray[np.bool_] | None) -> Floats:
    """A row, and what a grammar leaves of it, renormalised: (STAGES, V)."""
    stages = np.stack([row, np.full_like(row, -np.inf)])
    if allowed is not None:
        stages[1, allowed] = row[allowed] - logsumexp(row[allowed])
    return stages
