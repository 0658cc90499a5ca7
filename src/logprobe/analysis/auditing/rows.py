"""Match the rows of replies with tokens: find missing, repeated or shifted rows, and rows of other tokens.

Token ids are those in the reply, those of the prompt, or those whose bytes make up the reply's text. Rows
that cannot be matched with certainty are counted as unidentified, and their numbers are not compared.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from logprobe.analysis.auditing.fit import Group, Place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.analysis.auditing.findings import Findings
    from logprobe.analysis.auditing.fit import Fitted
    from logprobe.analysis.auditing.forms import Ask, Reply, Row
    from logprobe.analysis.auditing.reference import Reference
    from logprobe.analysis.auditing.report import Where
    from logprobe.analysis.auditing.tokens import Tokens

MAX_ROWS: Final = 4096  # read from one reply
RIGHT: Final = 0.75  # share of rows that name their token, from which they count as aligned
WRONG: Final = 0.5


@dataclass(slots=True)
class Alignment:
    """Rows of a reply by the positions of their tokens."""

    ids: tuple[int, ...]
    pairs: list[tuple[int, Row]] = field(default_factory=list)  # position, its row
    missing: list[int] = field(default_factory=list)  # positions without a row
    repeated: list[int] = field(default_factory=list)  # positions with two rows
    shift: int = 0
    num_unknown: int = 0  # rows that could be of several tokens, or of none


def align_prompt(rows: Sequence[Row | None], ids: tuple[int, ...], tokens: Tokens) -> Alignment:
    """Match the rows of a prompt; its first token needs no row."""
    rows = rows[:MAX_ROWS]
    if len(rows) == len(ids) and _share(rows, ids, 0, tokens) < WRONG:
        for by in (1, -1):
            if _share(rows, ids, by, tokens) >= RIGHT:
                moved = ((index + by, row) for index, row in enumerate(rows))
                pairs = [(at, row) for at, row in moved if row is not None and 0 < at < len(ids)]
                return Alignment(
                    ids, [(at, row) for at, row in pairs if _fits(row, ids[at], tokens)], shift=by
                )
    has_first = bool(rows) and (rows[0] is None or len(rows) == len(ids))
    return _matched(rows[1:] if has_first else rows, ids, 1, tokens)


def align_completion(reply: Reply, tokens: Tokens) -> Alignment:
    """Match the rows of generated tokens, by ids if the reply has them, else by its text."""
    rows = (reply.completion or ())[:MAX_ROWS]
    if reply.completion_ids is None:
        return _by_text(rows, reply.text, tokens)
    found = _matched(rows, reply.completion_ids, 0, tokens)
    # Tokens that give no text, such as an end of sequence, may have no row.
    found.missing = [at for at in found.missing if not tokens.is_special(found.ids[at])]
    return found


def _share(rows: Sequence[Row | None], ids: Sequence[int], by: int, tokens: Tokens) -> float:
    """Return the share of rows that fit the token `by` positions later."""
    fits = [
        _fits(row, ids[index + by], tokens)
        for index, row in enumerate(rows)
        if row is not None and 0 <= index + by < len(ids)
    ]
    return sum(fits) / max(len(fits), 1)


def _fits(row: Row | None, token_id: int, tokens: Tokens) -> bool:
    return row is not None and row.chosen is not None and tokens.may_be(row.chosen, token_id)


def _matched(rows: Sequence[Row | None], ids: tuple[int, ...], first: int, tokens: Tokens) -> Alignment:
    """Match rows with ids[first:], in the order of both.

    Each row has an earliest and a latest position by the tokens that rows name; a row is identified where
    both are the same.
    """
    found = Alignment(ids)
    kept = [rows[0]] if rows else []
    for row in rows[1:]:
        if len(rows) - len(found.repeated) > len(ids) - first and row is not None and row == kept[-1]:
            found.repeated.append(first + len(kept) - 1)
        else:
            kept.append(row)
    if len(kept) == len(ids) - first and _share(kept, ids[first:], 0, tokens) >= RIGHT:
        earliest = latest = list(range(first, len(ids)))
    else:
        earliest = _earliest(kept, ids[first:], tokens)
        latest = [len(ids) - first - 1 - at for at in _earliest(kept[::-1], ids[first:][::-1], tokens)][::-1]
        if len(earliest) < len(kept):
            found.num_unknown = len(kept)
            return found
        earliest, latest = [at + first for at in earliest], [at + first for at in latest]
    for row, at, last in zip(kept, earliest, latest, strict=True):
        if row is not None and at == last:
            found.pairs.append((at, row))
        found.num_unknown += at != last
    has_row = {at for at, row in zip(earliest, kept, strict=True) if row is not None}
    found.missing = [at for at in range(first, len(ids)) if at not in has_row]
    return found


def _earliest(rows: Sequence[Row | None], ids: Sequence[int], tokens: Tokens) -> list[int]:
    """Return the first position that each row can have after the row before; fewer where one has none."""
    found: list[int] = []
    for row in rows:
        start = found[-1] + 1 if found else 0
        at = next((at for at in range(start, len(ids)) if row is None or _fits(row, ids[at], tokens)), None)
        if at is None:
            break
        found.append(at)
    return found


def _by_text(rows: Sequence[Row], text: str, tokens: Tokens) -> Alignment:
    """Match rows whose bytes together are the text; what follows one that does not fit is unidentified."""
    data, ids, cursor = text.encode("utf-8", "replace"), list[int](), 0
    is_whole = not tokens.is_partial(text)
    for row in rows:
        options = [] if row.chosen is None else tokens.options(row.chosen)
        # A text with partial characters cannot locate tokens; rely on the row's own token alone.
        fitting = (
            token_id
            for token_id in options
            if (
                _stands_at(token_id, data, cursor, tokens)
                if is_whole
                else row.chosen is not None and tokens.is_right(row.chosen, token_id)
            )
        )
        if (token_id := next(fitting, None)) is None:
            break
        ids.append(token_id)
        if not tokens.is_special(token_id):
            own = tokens.vocabulary.token_bytes(token_id)
            cursor += len(own if cursor or data.startswith(own) else own.lstrip())
    return Alignment(tuple(ids), list(enumerate(rows[: len(ids)])), num_unknown=len(rows) - len(ids))


def _stands_at(token_id: int, data: bytes, cursor: int, tokens: Tokens) -> bool:
    """Return whether the token comes next in the text; a leading space or its end may be missing."""
    own, rest = tokens.vocabulary.token_bytes(token_id), data[cursor:]
    if tokens.is_special(token_id) or rest.startswith(own) or own.startswith(rest):
        return True
    return cursor == 0 and rest.startswith(own.lstrip())


# -- comparison with the reference ---------------------------------------------------------------------------


@dataclass(slots=True)
class Reader:
    """Pairs the rows of replies with the reference, and adds faults of rows to `findings`."""

    tokens: Tokens
    reference: Reference
    findings: Findings
    num_rows: int = 0
    num_unknown: int = 0  # entries of tokens that could not be identified

    def read(
        self, where: Where, ask: Ask, reply: Reply, prompt_ids: tuple[int, ...], *, is_quiet: bool = False
    ) -> Group | None:
        """Return the rows of a prompt or completion with the exact ones; `is_quiet` adds no findings."""
        if where == "prompt":
            if not reply.prompt or len(prompt_ids) < 2:
                return None
            aligned, first = align_prompt(reply.prompt, prompt_ids, self.tokens), 1
            context, ids = prompt_ids[:1], prompt_ids
        else:
            if not reply.completion or not prompt_ids:
                return None
            aligned, first = align_completion(reply, self.tokens), 0
            context, ids = prompt_ids, prompt_ids + aligned.ids
        if not is_quiet:
            self.num_unknown += aligned.num_unknown
        if len(ids) == len(context):
            return None
        rows = self.reference.rows(ids, len(context))
        group = Group(ask, where, rows, context, aligned.ids[first:], [])
        for position, row in aligned.pairs:
            place = self._place(position, position - first, aligned.ids[position], row)
            group.places.append(place)
            if not is_quiet:
                self.num_unknown += sum(not ids for ids, _, _ in place.entries)
                self._check_words(group, position, aligned.ids[position], row)
        if not is_quiet:
            self.num_rows += len(group.places)
            self._check_alignment(group, aligned, first)
        return group

    def _place(self, position: int, t: int, token_id: int, row: Row) -> Place:
        entries: list[tuple[list[int], float | None, bool]] = []
        if row.chosen is not None:
            entries.append(([token_id], row.chosen.logprob, True))
        alternatives = row.alternatives or ()
        entries += [(self.tokens.named(entry), entry.logprob, False) for entry in alternatives]
        by_text = any(entry.token_id is None for entry in alternatives)
        return Place(position, t, entries, is_map=row.is_map and by_text)

    def _check_words(self, group: Group, position: int, token_id: int, row: Row) -> None:
        """Check the texts and bytes of tokens, and that no token is listed twice."""
        named = [] if row.chosen is None else [(row.chosen, token_id)]
        seen = []
        for entry in row.alternatives or ():
            ids = self.tokens.ids_of(entry)
            if len(ids) == 1 and not self.tokens.is_partial(entry.text):
                seen.append(ids[0])
            is_known = entry.token_id is not None or (
                entry.data is not None and not any(self.tokens.is_right_bytes(entry, one) for one in ids)
            )
            named += [(entry, ids[0])] if ids and is_known else []
        for entry, known_id in named:
            own = self.tokens.vocabulary.token_bytes(known_id)
            if not self.tokens.is_right_text(entry, known_id):
                title = "{count} tokens have the text of another token"
                self._add("text-wrong", title, group, position, known_id, f"text {entry.text!r:.40}")
            if not self.tokens.is_right_bytes(entry, known_id):
                title = "{count} tokens have the bytes of another token"
                note = f"bytes {entry.data!r:.40}, the token has {own!r:.40}"
                self._add("bytes-wrong", title, group, position, known_id, note)
        if len({*seen}) < len(seen):
            title = "{count} rows list a token twice among the alternatives"
            self._add("ids-repeated", title, group, position, token_id, "")

    def _check_alignment(self, group: Group, aligned: Alignment, first: int) -> None:
        of = len(aligned.ids) - first
        for kind, title, positions in (
            ("rows-missing", "{count} of {of} tokens have no row", aligned.missing),
            ("rows-repeated", "{count} of {of} tokens have two rows", aligned.repeated),
            (
                "shifted",
                "rows are at the position of their neighbour ({count} of {of})",
                [at for at, _ in aligned.pairs] if aligned.shift else [],
            ),
        ):
            if positions:
                self.findings.add(
                    kind,
                    title,
                    evidence=[
                        group.evidence(at, self.tokens.show(aligned.ids[at]), "") for at in positions[:5]
                    ],
                    count=len(positions),
                    of=of,
                    correction=f"take the row {-aligned.shift:+d}" if kind == "shifted" else None,
                )

    def _add(self, kind: str, title: str, group: Group, position: int, token_id: int, note: str) -> None:
        self.findings.add(kind, title, evidence=[group.evidence(position, self.tokens.show(token_id), note)])


def check_alternatives(fitted: Fitted, findings: Findings, max_nats: float) -> None:
    """Check that raw or tempered rows have as many alternatives as requested, and the most likely ones."""
    if {*fitted.name.split("+")} & {"kept", "renormalised", "masked", "penalised", "none"}:
        return
    if float(np.median(fitted.errors - fitted.allowance)) > max_nats:  # probably of another model
        return
    for indices in fitted.by_row():
        group, place = fitted.places[indices[0]]
        listed = [(ids, number) for ids, number, is_chosen in place.entries if not is_chosen]
        if not listed or group.ask.num_top < 2:
            continue
        row = group.rows[place.t]
        best = np.argsort(-row, kind="stable")[: group.ask.num_top]
        tokens = fitted.tokens
        # Two tokens of one text are one key of a map.
        texts = {tokens.vocabulary.token_bytes(int(one)).decode("utf-8", "replace") for one in best}
        expected = min(len(best), len(texts)) if place.is_map else len(best)
        if len(listed) < expected:
            findings.add(
                "alternatives-cut",
                f"{{count}} rows have fewer alternatives than asked ({len(listed)} of {expected})",
                evidence=[fitted.evidence_at(int(indices[0]), f"{len(listed)} of {expected} alternatives")],
            )
        known = [ids[0] for ids, _ in listed if len(ids) == 1]
        if len(known) < len(listed):
            continue
        chosen = group.ids[place.t]
        lowest = (
            min(float(row[one]) for one in known if one != chosen) if {*known} - {chosen} else row[chosen]
        )
        left_out = [int(one) for one in best if int(one) not in known and row[one] > lowest + 2 * max_nats]
        if place.is_map:  # a token that no text names is no key of a map of texts
            left_out = [one for one in left_out if tokens.is_whole(one)]
        if left_out:
            note = f"{tokens.show(left_out[0])!r} is left out"
            findings.add(
                "alternatives-wrong",
                "{count} rows leave out a token that is more likely than those listed",
                evidence=[fitted.evidence_at(int(indices[0]), note)],
            )
