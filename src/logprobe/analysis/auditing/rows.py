"""Rows of replies beside the tokens that they should be of: missing, twice, moved, or of other words.

Before it: a reply, and the ids of its prompt. After it: a `Group` of numbers beside our own rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from logprobe.analysis.auditing.fit import Group, Place
from logprobe.analysis.auditing.report import Evidence

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from logprobe.analysis.auditing.dialects import Ask, Entry, Reply, Row
    from logprobe.analysis.auditing.findings import Findings
    from logprobe.analysis.auditing.fit import Fitted
    from logprobe.analysis.auditing.reference import Reference
    from logprobe.analysis.auditing.report import Where
    from logprobe.analysis.auditing.tokens import Tokens
    from logprobe.analysis.measures import Floats

MAX_LEFT_OUT: Final = 8  # tokens in a row without a row that are looked for
MAX_ROWS: Final = 4096  # of one reply that are read
RIGHT: Final = 0.75  # the share of rows that say their token, from which on they stand where they should
WRONG: Final = 0.5
LEFT_OUT: Final = 1.0  # what a token without a row costs, and a row without a token
OTHER_WORDS: Final = 1.5  # what a row costs that says another token: less than both of these


@dataclass(slots=True)
class Alignment:
    """Which row is of which token."""

    ids: tuple[int, ...]
    pairs: list[tuple[int, Row]] = field(default_factory=list)  # position, its row
    missing: list[int] = field(default_factory=list)  # positions without a row
    repeated: list[int] = field(default_factory=list)  # positions with one more
    shift: int = 0
    is_cut: bool = False  # what follows cannot be told


def align_prompt(
    rows: Sequence[Row | None], ids: tuple[int, ...], tokens: Tokens, numbers: Floats | None = None
) -> Alignment:
    """Rows of a prompt whose ids are known; the first token needs none.

    `numbers` are ours of the tokens, NaN where there is none: of two that are alike they tell which one
    has lost its row.
    """
    rows = rows[:MAX_ROWS]
    by_offset = {by: _share(rows, ids, by, tokens) for by in (0, 1, -1)}
    offset = max((1, -1), key=lambda by: by_offset[by])
    found = Alignment(ids)
    if len(rows) == len(ids) and by_offset[0] >= RIGHT:
        found.pairs = [(position, row) for position, row in enumerate(rows) if row is not None]
        found.missing = [position for position, row in enumerate(rows) if row is None]
    elif len(rows) == len(ids) and by_offset[0] < WRONG and by_offset[offset] >= RIGHT:
        found.shift = offset
        for index, row in enumerate(rows):
            at = index + offset
            if row is not None and 0 < at < len(ids) and _fits(row, ids[at], tokens):
                found.pairs.append((at, row))
    else:
        found = _aligned(rows, ids, tokens, numbers)
    found.missing = [position for position in found.missing if position > 0]
    return found


def _share(rows: Sequence[Row | None], ids: Sequence[int], by: int, tokens: Tokens) -> float:
    pairs = [
        (row, ids[index + by])
        for index, row in enumerate(rows)
        if row is not None and 0 <= index + by < len(ids)
    ]
    return sum(_fits(row, token_id, tokens) for row, token_id in pairs) / max(len(pairs), 1)


def _fits(row: Row | None, token_id: int, tokens: Tokens) -> bool:
    return row is not None and row.chosen is not None and tokens.may_be(row.chosen, token_id)


def _aligned(
    rows: Sequence[Row | None], ids: tuple[int, ...], tokens: Tokens, numbers: Floats | None
) -> Alignment:
    """Rows and tokens in the order of both that leaves least out and says least wrong (edit distance)."""
    band = abs(len(rows) - len(ids)) + MAX_LEFT_OUT
    costs = np.full((len(rows) + 1, len(ids) + 1), np.inf)
    steps = np.zeros(costs.shape, np.int8)  # 0: row and token together, 1: a token without, 2: a row more
    costs[0, : band + 1], steps[0, :] = np.arange(len(ids) + 1)[: band + 1] * LEFT_OUT, 1
    for i in range(1, len(rows) + 1):
        row = rows[i - 1]
        is_again = i > 1 and row == rows[i - 2]
        more = LEFT_OUT / 2 if is_again else LEFT_OUT
        for j in range(max(0, i - band), min(len(ids), i + band) + 1):
            options = (
                costs[i - 1, j - 1] + _cost(row, j - 1, ids, tokens, numbers) if j else np.inf,
                costs[i, j - 1] + LEFT_OUT if j else np.inf,
                costs[i - 1, j] + more,
            )
            steps[i, j] = int(np.argmin(options))
            costs[i, j] = options[steps[i, j]]
    return _traced(steps, rows, ids)


def _cost(
    row: Row | None, position: int, ids: tuple[int, ...], tokens: Tokens, numbers: Floats | None
) -> float:
    if row is None or row.chosen is None:
        return 0.0 if position == 0 else LEFT_OUT
    wrong = 0.0 if _fits(row, ids[position], tokens) else OTHER_WORDS
    if numbers is None or row.chosen.logprob is None or not np.isfinite(numbers[position]):
        return wrong
    return wrong + min(abs(row.chosen.logprob - float(numbers[position])), 1.0) / 2


def _traced(steps: NDArray[np.int8], rows: Sequence[Row | None], ids: tuple[int, ...]) -> Alignment:
    found, i, j = Alignment(ids), len(rows), len(ids)
    while i or j:
        step = int(steps[i, j]) if i else 1
        if step == 0:
            i, j = i - 1, j - 1
            row = rows[i]
            if row is None:
                found.missing.append(j)
            else:
                found.pairs.append((j, row))
        elif step == 1:
            j -= 1
            found.missing.append(j)
        else:
            i -= 1
            found.repeated.append(max(j - 1, 0))
    for places in (found.pairs, found.missing, found.repeated):
        places.reverse()
    return found


def align_completion(reply: Reply, tokens: Tokens, numbers: Floats | None = None) -> Alignment:
    """Rows of generated tokens, whose ids the reply tells, or else the rows and its text."""
    rows = (reply.completion or ())[:MAX_ROWS]
    ids = reply.completion_ids
    if ids is None:
        return _by_text(rows, reply.text, tokens)
    found = Alignment(ids)
    if len(rows) == len(ids) and _share(rows, ids, 0, tokens) >= RIGHT:
        found.pairs = list(enumerate(rows))
    else:
        found = _aligned(rows, ids, tokens, numbers)
    # Tokens that give no text, such as what ends it, may have no row.
    found.missing = [at for at in found.missing if not tokens.is_special(ids[at])]
    return found


def _by_text(rows: Sequence[Row], text: str, tokens: Tokens) -> Alignment:
    """Rows whose bytes together are the text; or else beside the text as the tokenizer cuts it."""
    data, ids = text.encode(), list[int]()
    cursor, is_whole = 0, not tokens.is_partial(text)
    for row in rows:
        entry = row.chosen
        options = [] if entry is None else _options(entry, tokens)
        # A text that ends within a character places no token; what a row says of its own must do.
        here = [
            one
            for one in options
            if (_stands_at(one, data, cursor, tokens) if is_whole else _says(entry, one, tokens))
        ]
        if not here:
            break
        ids.append(here[0])
        if not tokens.is_special(here[0]):
            own_bytes = tokens.vocabulary.token_bytes(here[0])
            is_spaceless = cursor == 0 and not data.startswith(own_bytes)
            cursor += len(own_bytes.lstrip() if is_spaceless else own_bytes)
    if len(ids) == len(rows) and (cursor >= len(data) or not is_whole):
        return Alignment(tuple(ids), pairs=list(enumerate(rows)))
    own = tuple(tokens.encode_plain(data))
    found = _aligned(rows, own, tokens, None)
    right = sum(_fits(row, own[at], tokens) for at, row in found.pairs)
    if not is_whole or right < RIGHT * len(found.pairs):
        return Alignment(tuple(ids), pairs=list(enumerate(rows[: len(ids)])), is_cut=True)
    return found


def _options(entry: Entry, tokens: Tokens) -> list[int]:
    """The ids that an entry's text or its bytes may mean."""
    ids = tokens.ids_of(entry)
    if entry.token_id is None and entry.data is not None:
        ids = [*ids, *(one for one in tokens.ids_by_bytes(entry.data) if one not in ids)]
    return ids


def _says(entry: Entry | None, token_id: int, tokens: Tokens) -> bool:
    return (
        entry is not None and tokens.is_right_text(entry, token_id) and tokens.is_right_bytes(entry, token_id)
    )


def _stands_at(token_id: int, data: bytes, cursor: int, tokens: Tokens) -> bool:
    own = tokens.vocabulary.token_bytes(token_id)
    if tokens.is_special(token_id):
        return True
    rest = data[cursor:]
    # The first token's space may be left out, and a stop may have cut the last one.
    return rest.startswith(own) or (cursor == 0 and rest.startswith(own.lstrip())) or own.startswith(rest)


# -- what rows say -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Reader:
    """Reads rows beside the reference, and notes faults."""

    tokens: Tokens
    reference: Reference
    findings: Findings
    num_rows: int = 0
    num_unknown: int = 0  # entries of no known token

    def prompt(self, ask: Ask, reply: Reply, ids: tuple[int, ...], *, is_quiet: bool = False) -> Group | None:
        """The rows of a prompt beside ours; `is_quiet` notes nothing."""
        if not reply.prompt or len(ids) < 2:
            return None
        rows = self.reference.rows(ids, 1)
        numbers = np.concatenate([[np.nan], rows[np.arange(len(ids) - 1), list(ids[1:])]])
        aligned = align_prompt(reply.prompt, ids, self.tokens, numbers)
        return self._group(ask, "prompt", aligned, rows, ids[:1], is_quiet=is_quiet)

    def completion(
        self, ask: Ask, reply: Reply, prompt_ids: tuple[int, ...], *, is_quiet: bool = False
    ) -> Group | None:
        """Generated rows beside ours, after a prompt."""
        if not reply.completion or not prompt_ids:
            return None
        numbers = None
        if reply.completion_ids:
            rows = self.reference.rows(prompt_ids + reply.completion_ids, len(prompt_ids))
            numbers = rows[np.arange(len(rows)), list(reply.completion_ids)].astype(np.float64)
        aligned = align_completion(reply, self.tokens, numbers)
        if aligned.is_cut and not is_quiet:
            self.num_unknown += 1
        if not aligned.ids:
            return None
        rows = self.reference.rows(prompt_ids + aligned.ids, len(prompt_ids))
        return self._group(ask, "completion", aligned, rows, prompt_ids, is_quiet=is_quiet)

    def _group(
        self,
        ask: Ask,
        where: Where,
        aligned: Alignment,
        rows: NDArray[np.float32],
        context: tuple[int, ...],
        *,
        is_quiet: bool,
    ) -> Group:
        first = 1 if where == "prompt" else 0
        group = Group(ask, where, rows, context, aligned.ids[first:], [])
        for position, row in aligned.pairs:
            if not first <= position < len(aligned.ids):
                continue
            place = self._place(position, position - first, aligned.ids[position], row)
            group.places.append(place)
            if not is_quiet:
                self.num_unknown += sum(not ids for ids, _, _ in place.entries)
                self._check_words(ask, where, position, aligned.ids[position], row)
        if not is_quiet:
            self.num_rows += len(group.places)
            self._check_alignment(ask, where, aligned, first)
        return group

    def _place(self, position: int, t: int, token_id: int, row: Row) -> Place:
        entries: list[tuple[list[int], float | None, bool]] = []
        if row.chosen is not None:
            entries.append(([token_id], row.chosen.logprob, True))
        for entry in row.alternatives or ():
            ids = self.tokens.ids_of(entry)
            if entry.token_id is None and entry.data is None and self.tokens.is_lossy(entry.text, ids):
                ids = []
            if row.is_map and token_id in ids and self.tokens.may_be(entry, token_id):
                ids = [token_id] if len(ids) == 1 else ids
            entries.append((ids, entry.logprob, False))
        by_text = any(entry.token_id is None for entry in row.alternatives or ())
        return Place(position, t, entries, is_map=row.is_map and by_text)

    def _check_words(self, ask: Ask, where: Where, position: int, token_id: int, row: Row) -> None:
        entry = row.chosen
        if entry is not None:
            self._check_entry(ask, where, position, entry, token_id)
        for other in row.alternatives or ():
            ids = self.tokens.ids_of(other)
            if other.token_id is None and other.text is not None and other.data is not None and ids:
                if not any(self.tokens.is_right_bytes(other, one) for one in ids):
                    self._wrong_bytes(ask, where, position, other, ids[0])
            elif other.token_id is not None and ids:
                self._check_entry(ask, where, position, other, ids[0])
        seen = [self._key(one) for one in row.alternatives or ()]
        repeated = {one for one in seen if one is not None and seen.count(one) > 1}
        if repeated:
            self.findings.add(
                "ids-repeated",
                "{count} rows list a token twice among the alternatives",
                evidence=[self._evidence(ask, where, position, token_id, "twice among the alternatives")],
            )

    def _key(self, entry: Entry) -> int | None:
        """The id of an entry that can be no other's."""
        ids = self.tokens.ids_of(entry)
        return ids[0] if len(ids) == 1 and not self.tokens.is_partial(entry.text) else None

    def _check_entry(self, ask: Ask, where: Where, position: int, entry: Entry, token_id: int) -> None:
        if not self.tokens.is_right_text(entry, token_id):
            self.findings.add(
                "text-wrong",
                "{count} tokens have the text of another token",
                evidence=[self._evidence(ask, where, position, token_id, f"they say {entry.text!r:.40}")],
            )
        if not self.tokens.is_right_bytes(entry, token_id):
            self._wrong_bytes(ask, where, position, entry, token_id)

    def _wrong_bytes(self, ask: Ask, where: Where, position: int, entry: Entry, token_id: int) -> None:
        own = list(self.tokens.vocabulary.token_bytes(token_id))
        note = f"they say {list(entry.data or b'')!s:.40}, the token has {own!s:.40}"
        self.findings.add(
            "bytes-wrong",
            "{count} tokens have bytes that are not theirs",
            evidence=[self._evidence(ask, where, position, token_id, note)],
        )

    def _check_alignment(self, ask: Ask, where: Where, aligned: Alignment, first: int) -> None:
        of = max(len(aligned.ids) - first, 1)
        for kind, title, positions in (
            ("rows-missing", "{count} of {of} tokens have no row", aligned.missing),
            ("rows-repeated", "{count} of {of} tokens have two rows", aligned.repeated),
        ):
            if positions:
                evidence = [
                    self._evidence(ask, where, at, aligned.ids[at] if at < len(aligned.ids) else None, "")
                    for at in positions[:5]
                ]
                self.findings.add(kind, title, evidence=evidence, count=len(positions), of=of)
        if aligned.shift:
            self.findings.add(
                "shifted",
                "rows stand at the position of their neighbour ({count} of {of})",
                evidence=[
                    self._evidence(ask, where, at, aligned.ids[at], f"its row stands at {at - aligned.shift}")
                    for at, _ in aligned.pairs[:5]
                ],
                count=len(aligned.pairs),
                of=of,
                correction=f"take the row {-aligned.shift:+d}",
            )

    def _evidence(self, ask: Ask, where: Where, position: int, token_id: int | None, note: str) -> Evidence:
        return Evidence(
            ask=ask.label,
            prompt=ask.shown,
            position=position,
            where=where,
            token=self.tokens.show(token_id),
            note=note,
        )


# -- alternatives --------------------------------------------------------------------------------------------


def check_alternatives(fitted: Fitted, findings: Findings, max_nats: float) -> None:
    """Whether the alternatives are as many as asked, and the likeliest; of rows that nothing cut."""
    words = set(fitted.name.split("+"))
    if words & {"kept", "renormalised", "masked", "penalised", "none"}:
        return
    if float(np.median(fitted.errors - fitted.allowance)) > max_nats:  # of another model, as it seems
        return
    done: set[int] = set()
    for index, (group, place) in enumerate(fitted.places):
        if id(place) in done:
            continue
        done.add(id(place))
        listed = [entry for entry in place.entries if not entry[2]]
        if not listed or group.ask.num_top < 2:
            continue
        chosen = group.ids[place.t]
        own = {ids[0]: number for ids, number, _ in listed if len(ids) == 1}
        row = group.rows[place.t]
        best = np.argsort(-row, kind="stable")[: group.ask.num_top]
        _check_count(fitted, findings, index, len(listed), best)
        if len(own) < len(listed):
            continue
        others = [one for one in own if one != chosen] or [chosen]
        least = min(float(row[one]) for one in others)
        left_out = [int(one) for one in best if int(one) not in own and row[one] > least + 2 * max_nats]
        if place.is_map:  # tokens that no text names are keys of no map of texts
            left_out = [one for one in left_out if fitted.tokens.is_whole(one)]
        if left_out:
            evidence = fitted.evidence_at(index, f"{fitted.tokens.show(left_out[0])!r} is left out")
            findings.add(
                "alternatives-wrong",
                "{count} rows leave out a token that is likelier than what they list",
                evidence=[evidence],
            )


def _check_count(
    fitted: Fitted, findings: Findings, index: int, num_listed: int, best: NDArray[np.int64]
) -> None:
    """Fewer than asked; two tokens of one text are one key of a map."""
    group, place = fitted.places[index]
    asked = min(group.ask.num_top, group.rows.shape[1])
    texts = {fitted.tokens.vocabulary.token_bytes(int(one)).decode("utf-8", "replace") for one in best}
    if num_listed >= (min(asked, len(texts)) if place.is_map else asked):
        return
    findings.add(
        "alternatives-cut",
        f"{{count}} rows have fewer alternatives than asked ({num_listed} of {asked})",
        evidence=[fitted.evidence_at(index, f"{num_listed} alternatives where {asked} were asked")],
    )
