"""Match the rows in replies with tokens: find missing, repeated or shifted rows, and rows for other tokens.

The token ids come from the reply or from the prompt; otherwise they are the ids whose bytes make up the
reply's text. A row that cannot be matched with certainty is counted as unidentified, and its logprobs are not
compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from logprobe.analysis.auditing.forms import Ask, Reply, Row
    from logprobe.analysis.auditing.reference import Reference
    from logprobe.analysis.auditing.report import Findings
    from logprobe.analysis.auditing.tokens import Tokens

MAX_ROWS: Final = 4096  # maximum number of rows read from one reply
RIGHT: Final = 0.75  # rows count as aligned if at least this share of them name the token at their position
WRONG: Final = 0.5  # rows may be shifted if less than this share of them name the token at their position


@dataclass(slots=True)
class Alignment:
    """The rows in a reply, matched with the positions of tokens."""

    ids: tuple[int, ...]
    pairs: list[tuple[int, Row]] = field(default_factory=list)  # position and its row
    missing: list[int] = field(default_factory=list)  # positions without a row
    repeated: list[int] = field(default_factory=list)  # positions with two rows
    shift: int = 0
    num_unknown: int = 0  # rows that match several positions, or none


def align_prompt(rows: Sequence[Row | None], ids: tuple[int, ...], tokens: Tokens) -> Alignment:
    """Match rows with the tokens of a prompt; the first token needs no row."""
    rows = rows[:MAX_ROWS]
    if len(rows) == len(ids) and _share(rows, ids, 0, tokens) < WRONG:
        for by in (1, -1):
            if _share(rows, ids, by, tokens) >= RIGHT:
                moved = [
                    (at, row) for at, row in enumerate(rows, by) if row is not None and 0 < at < len(ids)
                ]
                return Alignment(
                    ids, [(at, row) for at, row in moved if _fits(row, ids[at], tokens)], shift=by
                )
    has_first = bool(rows) and (rows[0] is None or len(rows) == len(ids))
    return _matched(rows[1:] if has_first else rows, ids, 1, tokens)


def align_completion(reply: Reply, tokens: Tokens) -> Alignment:
    """Match rows with generated tokens: by token ids if the reply has them, otherwise by the reply's text."""
    rows = (reply.completion or ())[:MAX_ROWS]
    if reply.completion_ids is None:
        return _by_text(rows, reply.text, tokens)
    found = _matched(rows, reply.completion_ids, 0, tokens)
    # Tokens that give no text, such as an end of sequence, may have no row.
    found.missing = [at for at in found.missing if not tokens.is_special(found.ids[at])]
    return found


def _share(rows: Sequence[Row | None], ids: Sequence[int], by: int, tokens: Tokens) -> float:
    """Return the share of the rows that fit the token `by` positions after their own position."""
    within = [(at, row) for at, row in enumerate(rows, by) if row is not None and 0 <= at < len(ids)]
    return sum(_fits(row, ids[at], tokens) for at, row in within) / max(len(within), 1)


def _fits(row: Row, token_id: int, tokens: Tokens) -> bool:
    return row.chosen is not None and tokens.may_be(row.chosen, token_id)


def _matched(rows: Sequence[Row | None], ids: tuple[int, ...], first: int, tokens: Tokens) -> Alignment:
    """Match rows with ids[first:], preserving the order of both.

    The tokens that the rows name bound each row's position from below and above; a row is matched if the two
    bounds coincide.
    """
    found, expected = Alignment(ids), ids[first:]
    kept: list[Row | None] = []
    for row in rows:
        is_repeated = bool(kept) and row is not None and row == kept[-1]
        if is_repeated and len(rows) - len(found.repeated) > len(expected):
            found.repeated.append(first + len(kept) - 1)
        else:
            kept.append(row)
    if len(kept) == len(expected) and _share(kept, expected, 0, tokens) >= RIGHT:
        earliest = latest = list(range(len(expected)))
    else:
        earliest = _earliest(kept, expected, tokens)
        latest = [len(expected) - 1 - at for at in _earliest(kept[::-1], expected[::-1], tokens)][::-1]
        if len(earliest) < len(kept):
            found.num_unknown = len(kept)
            return found
    for row, at, last in zip(kept, earliest, latest, strict=True):
        if row is not None and at == last:
            found.pairs.append((first + at, row))
        found.num_unknown += at != last
    has_row = {first + at for at, row in zip(earliest, kept, strict=True) if row is not None}
    found.missing = [at for at in range(first, len(ids)) if at not in has_row]
    return found


def _earliest(rows: Sequence[Row | None], ids: Sequence[int], tokens: Tokens) -> list[int]:
    """Return the earliest position of each row that is later than the previous row's position.

    The list ends before the first row that has no such position.
    """
    found: list[int] = []
    for row in rows:
        later = range(found[-1] + 1 if found else 0, len(ids))
        at = next((at for at in later if row is None or _fits(row, ids[at], tokens)), None)
        if at is None:
            break
        found.append(at)
    return found


def _by_text(rows: Sequence[Row], text: str, tokens: Tokens) -> Alignment:
    """Match rows with the tokens whose bytes make up `text`, one after the other.

    The rows after the first one that does not fit are unidentified.
    """
    data, ids, cursor = text.encode("utf-8", "replace"), list[int](), 0

    def comes_next(token_id: int, row: Row) -> bool:
        own, rest = tokens.vocabulary.token_bytes(token_id), data[cursor:]
        if tokens.is_partial(text):  # the text cannot locate tokens; rely on the row's own token alone
            assert row.chosen is not None
            return tokens.is_right_text(row.chosen, token_id) and tokens.is_right_bytes(row.chosen, token_id)
        if tokens.is_special(token_id) or rest.startswith(own) or own.startswith(rest):
            return True  # the end of the text may be missing, or a space at its start
        return cursor == 0 and rest.startswith(own.lstrip())

    for row in rows:
        options = [] if row.chosen is None else tokens.options(row.chosen)
        token_id = next((token_id for token_id in options if comes_next(token_id, row)), None)
        if token_id is None:
            break
        ids.append(token_id)
        if not tokens.is_special(token_id):
            own = tokens.vocabulary.token_bytes(token_id)
            cursor += len(own if cursor or data.startswith(own) else own.lstrip())
    return Alignment(tuple(ids), list(enumerate(rows[: len(ids)])), num_unknown=len(rows) - len(ids))


# -- rows with the exact rows --------------------------------------------------------------------------------


@dataclass(slots=True)
class Place:
    """One row in a reply, with the ids of the tokens that its entries may mean."""

    t: int  # index of the exact row in `Group.rows`
    entries: list[tuple[list[int], float | None, bool]]  # possible ids, logprob, True for the chosen token
    is_map: bool = False  # the alternatives are a map by text: two tokens with the same text are one entry


@dataclass(slots=True)
class Group:
    """The rows in one reply, and the exact rows for the same tokens."""

    ask: Ask
    rows: NDArray[np.float32]  # (T, V) exact raw log-probabilities, nats
    ids: tuple[int, ...]  # (T,) tokens that the rows predict
    places: list[Place]

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
        """Pair the rows of a prompt or completion with the exact rows; return None if there are no rows.

        If `findings` is given, the rows are counted, and faults in their order, texts and bytes are added.
        """
        if ask.wants_prompt:
            aligned = align_prompt(reply.prompt or (), prompt_ids, self.tokens)
            ids, start, has_rows = prompt_ids, 1, bool(reply.prompt)
        else:
            aligned = align_completion(reply, self.tokens)
            ids, start, has_rows = prompt_ids + aligned.ids, len(prompt_ids), bool(reply.completion)
        if findings is not None and has_rows:
            self.num_unknown += aligned.num_unknown
        if not has_rows or not 0 < start < len(ids):
            return None
        group = Group(ask, self.reference.rows(ids, start), ids[start:], [])
        group.places = [self._place(at - group.first, aligned.ids[at], row) for at, row in aligned.pairs]
        if findings is not None:
            self._check(group, aligned, findings)
        return group

    def _place(self, t: int, token_id: int, row: Row) -> Place:
        alternatives = row.alternatives or ()
        entries = [] if row.chosen is None else [([token_id], row.chosen.logprob, True)]
        entries += [(self.tokens.named(entry), entry.logprob, False) for entry in alternatives]
        return Place(t, entries, is_map=row.is_map and any(entry.token_id is None for entry in alternatives))

    def _check(self, group: Group, aligned: Alignment, findings: Findings) -> None:
        self.num_rows += len(group.places)
        self.num_unknown += sum(not ids for place in group.places for ids, _, _ in place.entries)
        for position, row in aligned.pairs:
            for kind, token_id, note in self._wrong_words(aligned.ids[position], row):
                evidence = group.ask.evidence(position, token=self.tokens.show(token_id), note=note)
                findings.add(kind, evidence=[evidence])
        shifted = [position for position, _ in aligned.pairs] if aligned.shift else []
        for kind, positions in (
            ("rows-missing", aligned.missing),
            ("rows-repeated", aligned.repeated),
            ("shifted", shifted),
        ):
            if positions:
                findings.add(
                    kind,
                    evidence=[
                        group.ask.evidence(at, token=self.tokens.show(aligned.ids[at]))
                        for at in positions[:5]
                    ],
                    count=len(positions),
                    of=len(group.ids),
                    correction=f"take the row {-aligned.shift:+d}" if aligned.shift else None,
                )

    def _wrong_words(self, token_id: int, row: Row) -> Iterator[tuple[str, int, str]]:
        """Yield (kind of fault, token id, note) for wrong texts and bytes, and for tokens listed twice."""
        named = [] if row.chosen is None else [(row.chosen, token_id)]
        seen = []
        for entry in row.alternatives or ():
            ids = self.tokens.ids_of(entry)
            if len(ids) == 1 and not self.tokens.is_partial(entry.text):
                seen.append(ids[0])
            has_other_bytes = entry.data is not None and not any(
                self.tokens.is_right_bytes(entry, one) for one in ids
            )
            named += [(entry, ids[0])] if ids and (entry.token_id is not None or has_other_bytes) else []
        for entry, known_id in named:
            if not self.tokens.is_right_text(entry, known_id):
                yield "text-wrong", known_id, f"text {entry.text!r:.40}"
            if not self.tokens.is_right_bytes(entry, known_id):
                own = self.tokens.vocabulary.token_bytes(known_id)
                yield "bytes-wrong", known_id, f"bytes {entry.data!r:.40}, the token has {own!r:.40}"
        if len({*seen}) < len(seen):
            yield "ids-repeated", token_id, ""
