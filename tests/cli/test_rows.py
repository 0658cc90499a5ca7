from __future__ import annotations

import math

import pytest

from logprobe.cli.rows import token_rows, totals, visible
from logprobe.models import Vocabulary
from logprobe.records import FlatLogprobs, Logprob
from logprobe.records.forms.finite import IMPOSSIBLE

VOCABULARY = Vocabulary([b" a", "é".encode(), b"\xf0\x9f", None])


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b" Paris", '" Paris"'),
        (b"\n\t", '"\\n\\t"'),
        (b'say "\\"', '"say \\"\\\\\\""'),
        ("é🌊".encode(), '"é🌊"'),
        (b"\xf0\x9f", '"\\xf0\\x9f"'),
        ("\u200b\x1b".encode(), '"\\u200b\\x1b"'),
        (b"", '""'),
    ],
)
def test_a_token_shows_what_it_is(data: bytes, shown: str) -> None:
    assert visible(list(data)) == shown


def test_different_bytes_never_look_the_same() -> None:
    pieces = [bytes([byte]) for byte in range(256)] + [
        b"\\n",
        b"\\x80",
        b"\\\\",
        "\x80".encode(),
        "\xad".encode(),
    ]
    assert len({visible(list(piece)) for piece in pieces}) == len(pieces)


def test_rows_keep_bytes_and_unknown_ids_apart() -> None:
    flat = FlatLogprobs([None, {2: Logprob(-1.0, 1)}, {3: Logprob(-2.0, 2)}], table=VOCABULARY)
    rows = token_rows([0, 2, 3], flat, VOCABULARY)
    assert [row["token"] for row in rows] == [" a", "\\xf0\\x9f", "<3>"]
    assert [row["bytes"] for row in rows] == [[32, 97], [0xF0, 0x9F], []]
    assert [row["logprob"] for row in rows] == [None, -1.0, -2.0]


def test_a_chosen_token_outside_the_best_is_not_among_the_alternatives() -> None:
    position = {2: Logprob(-9.0, 4), 0: Logprob(-1.0, 1), 1: Logprob(-2.0, 2)}
    (row,) = token_rows([2], FlatLogprobs([position]), VOCABULARY)
    assert (row["logprob"], row["rank"]) == (-9.0, 4)
    assert [(one["token_id"], one["rank"]) for one in row["top_logprobs"]] == [(0, 1), (1, 2)]


def test_minus_infinity_becomes_the_floor_that_info_names() -> None:
    flat = FlatLogprobs([{0: Logprob(-math.inf, 3)}])
    (row,) = token_rows([0], flat, VOCABULARY)
    assert row["logprob"] == IMPOSSIBLE
    sums = totals([row, *token_rows([1], FlatLogprobs([{1: Logprob(-1.0, 1)}]), VOCABULARY)], 2, 2)
    assert (sums["logprob"], sums["mean_logprob"]) == (IMPOSSIBLE, IMPOSSIBLE)
    assert (sums["perplexity"], sums["bits_per_byte"]) == (None, None)
