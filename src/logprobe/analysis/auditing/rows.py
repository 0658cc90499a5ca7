"""Identify the tokens in replies, and pair their log-probabilities with exact rows that our engine computes.

Rows are paired with tokens by position, if a reply has as many rows as tokens. Otherwise, missing or repeated
rows are reported. A row or entry whose token cannot be identified is counted, and not compared.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np
from cachetools import LRUCache

from logprobe.analysis.comparison import POSITIONS_A_CALL, whole_parts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from logprobe.analysis.auditing.forms import Ask, Reply, Row
    from logprobe.analysis.auditing.report import Findings
    from logprobe.analysis.auditing.tokens import Tokens
    from logprobe.analysis.measures import Floats
    from logprobe.analysis.scorer import Scorer

MAX_KEPT_BYTES: Final = 1 << 28
MAX_ROWS: Final = 4096  # maximum number of rows read from one reply
ALIGNED: Final = 0.75  # rows are aligned if at least this share of them name the token at their position


@dataclass(slots=True)
class Alignment:
    """The rows in a reply, paired with the positions of tokens."""

    ids: tuple[int, ...]
    pairs: list[tuple[int, Row]] = field(default_factory=list)  # position and its row
    missing: list[int] = field(default_factory=list)  # positions without a row
    repeated: list[int] = field(default_factory=list)  # positions with two rows
    shift: int = 0
    num_unknown: int = 0  # rows that name no token, or another one than expected


def align_prompt(rows: Sequence[Row | None], ids: tuple[int, ...], tokens: Tokens) -> Alignment:
    """Pair rows with the tokens of a prompt; the first token needs no row."""
    rows = rows[:MAX_ROWS]
    if rows and rows[0] is not None and len(rows) < len(ids):  # the first token has no row, not even null
        rows = [None, *rows]
    found = _align(rows, ids, tokens)
    found.pairs = [(at, row) for at, row in found.pairs if at > 0]
    found.missing = [at for at in found.missing if at > 0]
    return found


def align_completion(reply: Reply, tokens: Tokens) -> Alignment:
    """Pair rows with generated tokens: the reply's ids or, without ids, the tokens that the rows name."""
    rows = (reply.completion or ())[:MAX_ROWS]
    if reply.completion_ids is None:
        return _by_names(rows, reply.text, tokens)
    ids = reply.completion_ids
    while len(ids) > len(rows) and tokens.is_special(ids[-1]):  # they may have no row
        ids = ids[:-1]
    return _align(rows, ids, tokens)


def _align(rows: Sequence[Row | None], ids: tuple[int, ...], tokens: Tokens) -> Alignment:
    found = Alignment(ids)
    kept: list[Row | None] = []
    for row in rows:
        if row is not None and kept[-1:] == [row] and len(rows) - len(found.repeated) > len(ids):
            found.repeated.append(len(kept) - 1)
        else:
            kept.append(row)
    named = [None if row is None else tokens.id_of(row.chosen) for row in kept]
    if len(kept) < len(ids):
        found.missing = _unnamed(named, ids)
    if len(kept) == len(ids):
        for by in (0, 1, -1):
            moved = [(at, row, name) for at, (row, name) in enumerate(zip(kept, named, strict=True), by)]
            moved = [one for one in moved if one[1] is not None and 0 <= one[0] < len(ids)]
            fits = [name == ids[at] for at, _, name in moved if name is not None]
            if fits and np.mean(fits) >= ALIGNED:
                # A row without a name is that of its position; one with another name is left out.
                found.pairs = [(at, row) for at, row, name in moved if row and name in {None, ids[at]}]
                found.shift = by
                break
    found.num_unknown = sum(row is not None for row in kept) - len(found.pairs)
    return found


def _unnamed(named: Sequence[int | None], ids: Sequence[int]) -> list[int]:
    """Return the positions of the ids without a row; a row whose name is None has the next id."""
    found, at = [], 0
    for name in named:
        while name is not None and at < len(ids) and ids[at] != name:
            found.append(at)
            at += 1
        at += 1
    return [*found, *range(at, len(ids))]


def _by_names(rows: Sequence[Row], text: str, tokens: Tokens) -> Alignment:
    """Pair rows with the tokens that they name, up to the first row whose token does not continue `text`."""
    ids: list[int] = []
    data, whole = b"", text.encode("utf-8", "replace").lstrip()
    for row in rows:
        token_id = tokens.id_of(row.chosen)
        if token_id is None:
            break
        data += b"" if tokens.is_special(token_id) else tokens.vocabulary.token_bytes(token_id)
        if not whole.startswith(data.lstrip()) and not data.lstrip().startswith(whole):
            break
        ids.append(token_id)
    return Alignment(tuple(ids), list(enumerate(rows[: len(ids)])), num_unknown=len(rows) - len(ids))


@final
class Reference:
    """Computes raw whole-vocabulary rows with one model, and keeps them in an LRU cache."""

    def __init__(self, llm: Scorer) -> None:
        self._llm = llm
        self._rows: LRUCache[tuple[tuple[int, ...], int], NDArray[np.float32]] = LRUCache(
            MAX_KEPT_BYTES, getsizeof=lambda rows: rows.nbytes
        )
        self.info: dict[str, Any] = {}  # facts about the model, from `LogprobsInfo`

    def rows(self, ids: Sequence[int], start: int) -> NDArray[np.float32]:
        """Return the log-probabilities that predict ids[start:], (T - start, V) nats, for `start` >= 1."""
        key = (tuple(ids), start)
        if key in self._rows:
            return self._rows[key]
        parts = [part for *_, part in whole_parts(self._llm, np.array(ids), POSITIONS_A_CALL, start)]
        info = parts[0].info
        if not self.info and info is not None:
            self.info = json.loads(json.dumps(info.to_dict()))
        rows = np.concatenate([part.rows for part in parts])
        with suppress(ValueError):  # the rows are larger than the cache
            self._rows[key] = rows
        return rows

    def chosen(self, ids: Sequence[int]) -> Floats:
        """Return the logprob of each token in ids[1:], given the tokens before it, (T - 1,) nats."""
        (score,) = self._llm.score([(list(ids[:1]), list(ids[1:]))])
        return np.array(score.token_logprobs, np.float64)


@dataclass(slots=True)
class Group:
    """N logprobs in one reply, and the exact rows of its T positions."""

    ask: Ask
    rows: NDArray[np.float32]  # (T, V) exact raw log-probabilities, nats
    ids: tuple[int, ...]  # (T,) tokens that the rows predict
    t: NDArray[np.int64]  # (N,) index of each logprob's exact row
    token_ids: NDArray[np.int64]  # (N,)
    theirs: Floats  # (N,) reported logprobs, nats; -inf if reported as null
    is_chosen: NDArray[np.bool_]  # (N,) False for an alternative
    unknown: frozenset[int] = frozenset()  # rows with an alternative that is not identified

    @property
    def first(self) -> int:
        """Position of the first row: 1 in a prompt, whose first token has no row, and 0 in a completion."""
        return int(self.ask.wants_prompt)

    @property
    def counted(self) -> tuple[int, ...]:
        """Tokens that penalties count; row t is affected by the first t of them."""
        return () if self.ask.wants_prompt else self.ids


@dataclass(slots=True)
class Reader:
    """Pairs the rows in replies with the exact rows of the reference, and counts rows."""

    tokens: Tokens
    reference: Reference
    num_rows: int = 0
    num_unknown: int = 0  # rows and entries whose token could not be identified

    def read(
        self, ask: Ask, reply: Reply, prompt_ids: tuple[int, ...], findings: Findings | None = None
    ) -> Group | None:
        """Pair the rows of a prompt or completion with the exact rows; return None if none can be paired.

        If `findings` is given, the rows are counted, and missing, repeated and shifted rows are added to
        `findings`.
        """
        if ask.wants_prompt:
            aligned = align_prompt(reply.prompt or (), prompt_ids, self.tokens)
            ids, start, has_rows = prompt_ids, 1, bool(reply.prompt)
        else:
            aligned = align_completion(reply, self.tokens)
            ids, start, has_rows = prompt_ids + aligned.ids, len(prompt_ids), bool(reply.completion)
        if findings is not None and has_rows:
            self.num_rows += len(aligned.pairs)
            self.num_unknown += aligned.num_unknown
            self._check(ask, aligned, findings)
        if not aligned.pairs or not 0 < start < len(ids):
            return None
        first = int(ask.wants_prompt)
        entries, unknown = [], []
        for at, row in aligned.pairs:
            if row.chosen is not None:
                entries.append((at - first, aligned.ids[at], row.chosen.logprob, True))
            for entry in row.alternatives or ():
                token_id = self.tokens.id_of(entry)
                if token_id is None:
                    unknown.append(at - first)
                else:
                    entries.append((at - first, token_id, entry.logprob, False))
        if findings is not None:
            self.num_unknown += len(unknown)
        return Group(
            ask,
            self.reference.rows(ids, start),
            ids[start:],
            t=np.array([t for t, *_ in entries], np.int64),
            token_ids=np.array([token_id for _, token_id, _, _ in entries], np.int64),
            theirs=np.array([-np.inf if one is None else one for _, _, one, _ in entries], np.float64),
            is_chosen=np.array([is_chosen for *_, is_chosen in entries], np.bool_),
            unknown=frozenset(unknown),
        )

    def _check(self, ask: Ask, aligned: Alignment, findings: Findings) -> None:
        shifted = [position for position, _ in aligned.pairs] if aligned.shift else []
        kinds = {"rows-missing": aligned.missing, "rows-repeated": aligned.repeated, "shifted": shifted}
        for kind, positions in kinds.items():
            if positions:
                shown = [(at, self.tokens.show(aligned.ids[at])) for at in positions[:5]]
                findings.add(
                    kind,
                    evidence=[ask.evidence(at, token=token) for at, token in shown],
                    count=len(positions),
                    of=len(aligned.ids) - int(ask.wants_prompt),
                    correction=f"for each token, take the row at offset {-aligned.shift:+d}"
                    if aligned.shift
                    else None,
                )
