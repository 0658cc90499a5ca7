"""Texts, bytes and alternatives of single rows against the vocabulary."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from logprobe.analysis.auditing.conformance import Conformance
from logprobe.analysis.auditing.forms import Ask, Entry, Row
from logprobe.analysis.auditing.tokens import Tokens

if TYPE_CHECKING:
    from logprobe import LLM

ASK = Ask(form="chat", prompt=({"role": "user", "content": "?"},), num_top=3)


@pytest.fixture(scope="module")
def checks(tiny_llm: LLM) -> Conformance:
    return Conformance(session=None, tokens=Tokens(tiny_llm.text))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def row(checks: Conformance) -> Row:
    """A row of " cat" with three alternatives."""
    tokens = checks.tokens

    def entry(word: str) -> Entry:
        token_id = tokens.edge.plain_ids(word)[0]
        return Entry(-1.0, None, tokens.show(token_id), tokens.vocabulary.token_bytes(token_id))

    return Row(entry(" cat"), (entry("garden"), entry(" cat"), entry("the")))


def kinds_of(checks: Conformance, row: Row) -> set[str]:
    (token_id,) = checks.tokens.edge.plain_ids(" cat")
    return {kind for kind, _ in checks._faults_of(ASK, row, token_id)}


def test_right_rows_have_no_fault(checks: Conformance, row: Row) -> None:
    assert row.chosen is not None
    texts = (" cat", "cat", "Ġcat", "", "\ufffd", None)
    for text in texts:
        assert kinds_of(checks, replace(row, chosen=replace(row.chosen, text=text))) == set()
    assert kinds_of(checks, Row(Entry(-1.0, None, "cat", b"cat"), None)) == set()


def test_wrong_rows_are_named(checks: Conformance, row: Row) -> None:
    assert row.chosen is not None
    assert row.alternatives is not None
    first, second, _ = row.alternatives
    cases: dict[str, dict[str, Any]] = {
        "bytes-wrong": {"chosen": replace(row.chosen, data=b"zz")},
        "text-wrong": {"chosen": replace(row.chosen, text="zz", data=None)},
        "ids-repeated": {"alternatives": (first, second, second)},
        "alternatives-cut": {"alternatives": (first, second)},
    }
    for kind, fields in cases.items():
        assert kinds_of(checks, replace(row, **fields)) == {kind}
