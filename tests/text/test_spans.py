"""Which bytes of a text its tokens come from."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from logprobe.text.edge import TextEdge
from rewriting import REWRITES, save_rewriting_llama, save_sentencepiece_llama

if TYPE_CHECKING:
    from pathlib import Path

SENTENCEPIECE = "sentencepiece"
HALVES = ("\\xc3", "\\xbc")  # of ü


@pytest.fixture(scope="module")
def edges(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TextEdge]:
    """A text edge for each tokenizer, by name."""

    def edge(folder: Path) -> TextEdge:
        return TextEdge.of(AutoTokenizer.from_pretrained(folder))

    folder = tmp_path_factory.mktemp
    edges = {name: edge(save_rewriting_llama(folder("tokenizer"), name)) for name in REWRITES}
    return edges | {SENTENCEPIECE: edge(save_sentencepiece_llama(folder("tokenizer")))}


def parts(edge: TextEdge, text: str) -> list[tuple[str, str]]:
    """Each token's own text, and the part of the given text that it comes from."""
    ids, spans = edge.encode_with_spans(text)
    np.testing.assert_array_equal(ids, edge.encode(text, add_special_tokens=False))
    data = text.encode()
    return [
        (edge.vocabulary.token_text(token_id), data[start:end].decode("utf-8", "backslashreplace"))
        for token_id, (start, end) in zip(ids.tolist(), spans.tolist(), strict=True)
    ]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        # The accent that é takes in belongs to it, the space after it does not.
        ("nfc", "e\u0301 a", [("é", "e\u0301"), (" a", " a")]),
        ("nfc", "é a", [("é", "é"), (" a", " a")]),
        # Tokens of a composed character share it; those of one that stays have their own bytes.
        ("nfc", "u\u0308ü", [*((piece, "u\u0308") for piece in HALVES), *zip(HALVES, HALVES, strict=True)]),
        ("nfkc", "ﬃ.", [("f", "ﬃ"), ("f", "ﬃ"), ("i", "ﬃ"), (".", ".")]),
        ("lower case", "THE cAT", [("the", "THE"), (" cat", " cAT")]),
        ("no accents", "théa\u0301", [("the", "thé"), ("a", "a\u0301")]),
        ("one space", "the    cat", [("the", "the"), (" cat", "    cat")]),
        ("stripped", "  the cat ", [("the", "  the"), (" cat", " cat ")]),
        ("swallowed spaces", "the  dog  cat", [("the", "the"), ("dog", "  dog  "), ("cat", "cat")]),
        (SENTENCEPIECE, "the t", [(" the", "the"), (" t", " t")]),
        (SENTENCEPIECE, " the", [(" ", ""), (" the", " the")]),
        (SENTENCEPIECE, "é", [(" ", ""), ("\\xc3", "\\xc3"), ("\\xa9", "\\xa9")]),
    ],
)  # fmt: skip
def test_tokens_come_from_the_text_that_was_given(
    edges: dict[str, TextEdge], name: str, text: str, expected: list[tuple[str, str]]
) -> None:
    assert parts(edges[name], text) == expected


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from([*REWRITES, SENTENCEPIECE]),
    text=st.text(alphabet="the dogT\nÉe\u0301\u0323ﬁﷺ한\u1112\u1161\u11ab🌊▁İ", max_size=30),
)
def test_spans_ascend_and_cover_any_text(edges: dict[str, TextEdge], name: str, text: str) -> None:
    ids, spans = edges[name].encode_with_spans(text)
    starts, ends = spans.T
    assert spans.shape == (len(ids), 2)
    if len(ids):
        assert starts[0] == 0
        assert ends[-1] == len(text.encode())
        assert (starts <= ends).all()
        for column in (starts, ends):
            assert (np.diff(column) >= 0).all()
        assert (starts[1:] <= ends[:-1]).all(), "a part of the text belongs to no token"
    if edges[name].vocabulary.bytes_of(ids) == text.encode():
        sizes = [len(edges[name].vocabulary.token_bytes(token_id)) for token_id in ids.tolist()]
        assert (ends - starts).tolist() == sizes


def test_added_tokens_come_from_nothing(edges: dict[str, TextEdge]) -> None:
    for text in ("", "the cat", "THE"):
        ids, spans = edges["lower case"].encode_with_spans(text, add_special_tokens=True)
        own = edges["lower case"].encode_with_spans(text)
        assert ids.tolist() == [0, *own[0].tolist()]
        assert spans.tolist() == [[0, 0], *own[1].tolist()]
