"""Which row is of which token: rows left out, twice, moved by one, or with other words."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from logprobe.analysis.auditing.fit import check_alternatives, fit
from logprobe.analysis.auditing.forms import Ask, Entry, Reply, Row
from logprobe.analysis.auditing.reference import Reference
from logprobe.analysis.auditing.report import Findings
from logprobe.analysis.auditing.rows import Reader, align_completion, align_prompt
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
    entries = [Entry(value, None, tokens.show(one)) for one, value in zip(ids, values, strict=True)]
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
    assert all(row.chosen is not None and row.chosen.logprob == -at for at, row in found.pairs)


def test_rows_that_could_be_of_several_tokens_are_not_compared(tokens: Tokens) -> None:
    ids = (*tokens.encode("a"), *tokens.edge.plain_ids("xxxx cat"))
    rows = rows_of(ids, tokens)
    found = align_prompt([*rows[:2], *rows[3:]], ids, tokens)
    assert len(found.missing) == 1
    assert all(row.chosen is not None and row.chosen.logprob == -at for at, row in found.pairs)
    assert found.pairs[-1][0] == len(ids) - 1
    assert len(found.pairs) + found.num_unknown == len(ids) - 2


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
    rows = tuple(Row(Entry(-1.0, None, tokens.show(one))) for one in ids)
    reply = Reply(text=TEXT, completion=rows)
    found = align_completion(reply, tokens)
    assert (found.ids, found.missing, found.repeated) == (ids, [], [])
    known = replace(reply, completion_ids=ids)
    without = align_completion(replace(known, completion=rows[:3] + rows[4:]), tokens)
    assert (without.ids, without.missing) == (ids, [3])
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


def test_a_text_may_leave_out_what_is_no_whole_character(tokens: Tokens) -> None:
    within = tokens.edge.plain_ids("a🌊")[1]
    assert not tokens.is_whole(within)
    assert within in tokens.ids_of(Entry(-1, None, ""))
    assert within in tokens.ids_of(Entry(-1, None, "\ufffd"))
    for text in ("", "\ufffd"):
        assert tokens.named(Entry(-1, None, text)) == []
    for text in ("a", "é", " cat"):  # the second is also a piece of the vocabulary, and told by its number
        assert tokens.named(Entry(-1, None, text)) == tokens.ids_of(Entry(-1, None, text))


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


def test_words_and_alternatives_that_are_wrong(tiny_llm: LLM, tokens: Tokens) -> None:
    rows = true_rows(tiny_llm, tokens)
    row = rows[4]
    assert row is not None
    assert row.chosen is not None
    assert row.alternatives is not None
    first, second, third = row.alternatives
    cases = {
        "bytes-wrong": {"chosen": replace(row.chosen, data=b"zz")},
        "text-wrong": {"chosen": replace(row.chosen, text="zz", data=None)},
        "ids-repeated": {"alternatives": (first, second, second)},
        "alternatives-cut": {"alternatives": (first, second)},
    }
    for kind, fields in cases.items():
        assert found_in(tiny_llm, tokens, changed(rows, 4, **fields)) == {kind}
    wide = true_rows(tiny_llm, tokens, 4)[4]
    assert wide is not None
    assert wide.alternatives is not None
    assert found_in(tiny_llm, tokens, changed(rows, 4, alternatives=wide.alternatives[1:])) == {
        "alternatives-wrong"
    }
    assert third in wide.alternatives


def test_a_read_without_findings_counts_nothing(tiny_llm: LLM, tokens: Tokens) -> None:
    rows = changed(true_rows(tiny_llm, tokens), 4, alternatives=(Entry(-1.0, None, "no token's text"),))
    reader = Reader(tokens, Reference(tiny_llm))
    ask, ids = Ask(form="echo", prompt=TEXT, num_top=1), tokens.encode(TEXT)
    assert reader.read(ask, Reply(prompt=tuple(rows)), ids) is not None
    assert (reader.num_rows, reader.num_unknown) == (0, 0)
    assert reader.read(ask, Reply(prompt=tuple(rows)), ids, Findings()) is not None
    assert (reader.num_rows, reader.num_unknown) == (len(rows) - 1, 1)


def test_tokens_are_known_by_every_way_to_write_them(tokens: Tokens) -> None:
    (token_id,) = tokens.edge.plain_ids(" cat")
    spellings = [
        Entry(-1, token_id),
        Entry(-1, None, " cat"),
        Entry(-1, None, "Ġcat"),
        Entry(-1, None, None, b" cat"),
        Entry(-1, None, "bytes:\\x20\\x63\\x61\\x74"),
    ]
    assert [tokens.ids_of(entry) for entry in spellings] == [[token_id]] * len(spellings)
    assert all(tokens.is_right_text(entry, token_id) for entry in spellings)
    assert not tokens.is_right_text(Entry(-1, None, " dog"), token_id)
    assert tokens.ids_of(Entry(-1, 10**6)) == []
    assert tokens.ids_of(Entry(-1, -1)) == []


def test_layouts_that_the_template_refuses_are_told(tiny_llm: LLM) -> None:
    tokenizer = copy(tiny_llm.text.tokenizer)
    text = replace(tiny_llm.text, load_tokenizer=lambda: tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system text') }}{% endif %}"
        "{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    )
    ask = Ask(form="chat", prompt=({"role": "user", "content": "hi"},))
    found, refused = Tokens(text).layouts(ask, ("Be brief.",))
    assert list(found) == ["without the beginning of the answer"]
    assert "no system text" in refused["with a system text 'Be brief.'"]
