"""Which row is of which token: rows left out, twice, moved by one, or without a known token."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from logprobe.analysis.auditing.fit import check_alternatives, fit
from logprobe.analysis.auditing.forms import Ask, Entry, Reply, Row
from logprobe.analysis.auditing.report import Findings
from logprobe.analysis.auditing.rows import Reader, Reference, align_completion, align_prompt
from logprobe.analysis.auditing.tokens import Tokens

if TYPE_CHECKING:
    from logprobe import LLM

TEXT = "the cat and the dog sat in the garden"


@pytest.fixture(scope="module")
def tokens(tiny_llm: LLM) -> Tokens:
    return Tokens(tiny_llm.text)


def rows_of(ids: tuple[int, ...], tokens: Tokens, numbers: list[float] | None = None) -> list[Row | None]:
    """What a server gives a prompt."""
    values = [-float(at) for at in range(len(ids))] if numbers is None else numbers
    entries = [
        Entry(value, None, None, tokens.vocabulary.token_bytes(one))
        for one, value in zip(ids, values, strict=True)
    ]
    return [None, *(Row(entry) for entry in entries[1:])]


def test_rows_in_their_places(tokens: Tokens) -> None:
    ids = tokens.encode(TEXT)
    found = align_prompt(rows_of(ids, tokens), ids, tokens)
    assert [position for position, _ in found.pairs] == list(range(1, len(ids)))
    assert (found.missing, found.repeated, found.shift) == ([], [], 0)


@pytest.mark.parametrize("left_out", [[3], [1], [5, 6], [4, 9, 12]])
def test_rows_that_are_left_out(tokens: Tokens, left_out: list[int]) -> None:
    ids = tokens.encode(TEXT)
    rows = [row for at, row in enumerate(rows_of(ids, tokens)) if at not in left_out]
    found = align_prompt(rows, ids, tokens)
    assert found.missing == left_out
    assert found.pairs == []  # another row may be that of any token
    assert found.num_unknown == len(ids) - 1 - len(left_out)


def test_a_row_of_another_token_is_not_compared(tokens: Tokens) -> None:
    ids = tokens.encode(TEXT)
    rows = rows_of(ids, tokens)
    rows[4] = Row(Entry(-4.0, ids[5]))
    found = align_prompt(rows, ids, tokens)
    assert (found.missing, found.shift, found.num_unknown) == ([], 0, 1)
    assert [at for at, _ in found.pairs] == [at for at in range(1, len(ids)) if at != 4]
    unnamed = align_prompt([None] + [Row(Entry(-1.0)) for _ in ids[1:]], ids, tokens)
    assert (unnamed.pairs, unnamed.num_unknown) == ([], len(ids) - 1)


def test_rows_that_come_twice(tokens: Tokens) -> None:
    ids = tokens.encode(TEXT)
    rows = rows_of(ids, tokens)
    found = align_prompt([*rows[:5], rows[4], *rows[5:]], ids, tokens)
    assert (found.missing, found.repeated) == ([], [4])


@pytest.mark.parametrize("by", [1, -1])
def test_rows_of_the_neighbour(tokens: Tokens, by: int) -> None:
    ids = tokens.encode(TEXT)
    rows = rows_of(ids, tokens)
    moved = [*rows[1:], None] if by == 1 else [None, *rows[:-1]]
    found = align_prompt(moved, ids, tokens)
    assert found.shift == by
    assert all(row.chosen is not None and row.chosen.logprob == -at for at, row in found.pairs)


def test_a_first_token_without_a_row_is_no_fault(tokens: Tokens) -> None:
    ids = tokens.encode(TEXT)
    found = align_prompt(rows_of(ids, tokens)[1:], ids, tokens)
    assert (found.missing, found.shift) == ([], 0)
    assert len(found.pairs) == len(ids) - 1


def test_generated_tokens_are_identified_by_ids_or_by_the_text(tokens: Tokens) -> None:
    ids = tuple(tokens.edge.plain_ids(TEXT))
    rows = tuple(Row(Entry(-1.0, None, None, tokens.vocabulary.token_bytes(one))) for one in ids)
    reply = Reply(text=TEXT, completion=rows)
    found = align_completion(reply, tokens)
    assert (found.ids, found.missing, found.repeated) == (ids, [], [])
    known = replace(reply, completion_ids=ids)
    without = align_completion(replace(known, completion=rows[:3] + rows[4:]), tokens)
    assert (without.ids, without.missing, without.pairs) == (ids, [3], [])
    twice = align_completion(replace(known, completion=(*rows[:3], rows[2], *rows[3:])), tokens)
    assert (twice.ids, twice.repeated) == (ids, [2])
    # By the text alone, what follows a row that is missing is not identified.
    cut = align_completion(replace(reply, completion=rows[:3] + rows[4:]), tokens)
    assert cut.ids[:3] == ids[:3]
    assert cut.num_unknown >= len(ids) - 5


def test_rows_of_whole_characters_place_no_token_within_one(tokens: Tokens) -> None:
    """llama.cpp gives the last token of a character all of its bytes, and those before it no row."""
    letter, *within = tokens.edge.plain_ids("a🌊")
    own = Row(Entry(-1.0, letter, "a", b"a"))
    merged = Row(Entry(-1.0, within[-1], "🌊", "🌊".encode()))
    found = align_completion(Reply(text="a🌊\ufffd", completion=(own, merged, own)), tokens)
    assert found.num_unknown == 2
    assert found.pairs == [(0, own)]
    assert found.ids == (letter,)


def found_in(llm: LLM, tokens: Tokens, rows: list[Row | None], num_top: int = 3) -> set[str]:
    """The kinds of what is found in the rows of a prompt."""
    findings = Findings()
    reader = Reader(tokens, Reference(llm))
    ask = Ask(form="echo", prompt=TEXT, num_top=num_top)
    group = reader.read(ask, Reply(prompt=tuple(rows)), tokens.encode(TEXT), findings)
    assert group is not None
    fitted = fit([group], tokens)
    assert fitted is not None
    check_alternatives(fitted, findings, 1e-3)
    return {one.kind for one in findings.listed()}


def true_rows(llm: LLM, tokens: Tokens, num_top: int = 3) -> list[Row | None]:
    ids = tokens.encode(TEXT)
    rows = Reference(llm).rows(ids, 1)

    def entry(t: int, token_id: int) -> Entry:
        data = tokens.vocabulary.token_bytes(token_id)
        return Entry(float(rows[t, token_id]), None, tokens.vocabulary.token_text(token_id), data)

    listed = [[entry(t, int(one)) for one in np.argsort(-row)[:num_top]] for t, row in enumerate(rows)]
    return [None, *(Row(entry(t, ids[t + 1]), tuple(top)) for t, top in enumerate(listed))]


def changed(rows: list[Row | None], at: int, **fields: object) -> list[Row | None]:
    row = rows[at]
    assert row is not None
    return [*rows[:at], replace(row, **fields), *rows[at + 1 :]]  # type: ignore[arg-type]


def test_true_rows_show_nothing(tiny_llm: LLM, tokens: Tokens) -> None:
    assert found_in(tiny_llm, tokens, true_rows(tiny_llm, tokens)) == set()


def test_alternatives_that_are_not_the_likeliest(tiny_llm: LLM, tokens: Tokens) -> None:
    rows = true_rows(tiny_llm, tokens)
    wide = true_rows(tiny_llm, tokens, 4)[4]
    assert wide is not None
    assert wide.alternatives is not None
    assert found_in(tiny_llm, tokens, changed(rows, 4, alternatives=wide.alternatives[1:])) == {
        "alternatives-wrong"
    }
    unknown = (*wide.alternatives[1:3], Entry(-1.0, None, "no token's text"))
    assert found_in(tiny_llm, tokens, changed(rows, 4, alternatives=unknown)) == set()


def test_a_read_without_findings_counts_nothing(tiny_llm: LLM, tokens: Tokens) -> None:
    rows = changed(true_rows(tiny_llm, tokens), 4, alternatives=(Entry(-1.0, None, "no token's text"),))
    reader = Reader(tokens, Reference(tiny_llm))
    ask, ids = Ask(form="echo", prompt=TEXT, num_top=1), tokens.encode(TEXT)
    assert reader.read(ask, Reply(prompt=tuple(rows)), ids) is not None
    assert (reader.num_rows, reader.num_unknown) == (0, 0)
    assert reader.read(ask, Reply(prompt=tuple(rows)), ids, Findings()) is not None
    assert (reader.num_rows, reader.num_unknown) == (len(rows) - 1, 1)


def test_a_token_is_identified_by_its_id_or_bytes(tokens: Tokens) -> None:
    (token_id,) = tokens.edge.plain_ids(" cat")
    assert tokens.id_of(Entry(-1, token_id, "unknown", b"unknown")) == token_id
    assert tokens.id_of(Entry(-1, None, "unknown", b" cat")) == token_id
    others = [
        Entry(-1, 10**6),
        Entry(-1, -1),
        Entry(-1),
        Entry(-1, None, " cat"),
        Entry(-1, None, None, b"zqz"),
    ]
    assert [tokens.id_of(entry) for entry in (*others, None)] == [None] * 6


def test_layouts_that_the_template_refuses_are_left_out(tiny_llm: LLM) -> None:
    tokenizer = copy(tiny_llm.text.tokenizer)
    text = replace(tiny_llm.text, load_tokenizer=lambda: tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system text') }}{% endif %}"
        "{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    ask = Ask(form="chat", prompt=({"role": "user", "content": "hi"},))
    assert list(Tokens(text).layouts(ask, ("Be brief.",))) == ["without the beginning of the answer"]
