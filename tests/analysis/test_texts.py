"""Words, sentences and spans of scored texts."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logprobe.analysis import ScoredText
from logprobe.errors import ParameterError
from logprobe.text.spans import byte_spans

if TYPE_CHECKING:
    from logprobe import LLM


def scored(*pieces: str | bytes) -> ScoredText:
    """Make a text of these tokens; token t has the log-probability -(t + 1)."""
    data = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
    count = len(data)
    return ScoredText(
        text=b"".join(data).decode(),
        token_ids=np.arange(count, dtype=np.int32),
        byte_spans=byte_spans(b"".join(data).decode(), data, list),
        logprobs=-np.arange(1.0, count + 1),
        ranks=np.ones(count, np.int64),
        entropy=np.zeros(count),
    )


def table(units: Any) -> list[tuple[str, float]]:
    return [(unit.text, unit.surprisal) for unit in units]


def test_english_words_hold_their_punctuation_and_all_their_tokens() -> None:
    text = scored("The", " quick", ",", " don", "'t", "  ", " stop", ".\n\n", "New", " end\n", " ")
    assert table(text.words) == [
        ("The", 1), (" quick,", 2 + 3), (" don't", 4 + 5), ("   stop.\n\n", 6 + 7 + 8), ("New", 9),
        (" end\n ", 10 + 11),
    ]  # fmt: skip
    assert table(text.sentences) == [("The quick, don't   stop.\n\n", 36), ("New end\n ", 30)]


def test_chinese_is_cut_by_character_and_joined_where_a_token_is() -> None:
    text = "你好，世界。".encode()
    cut = scored(text[:3], text[3:8], text[8:9], text[9:15], text[15:])
    assert table(cut.words) == [("你", 1), ("好，", 2 + 3), ("世界。", 4 + 5)]
    assert table(cut.sentences) == [("你好，世界。", 15)]
    assert [unit.text for unit in cut.tokens] == ["你", "好，", "，", "世界", "。"]


def test_code_words_take_their_indent() -> None:
    cut = scored("def", " f", "(x", "):", "\n   ", " return", " x")
    assert table(cut.words) == [("def", 1), (" f(x):", 2 + 3 + 4), ("\n    return", 5 + 6), (" x", 7)]


def test_emoji_stay_whole_though_tokens_cut_their_bytes() -> None:
    family = "👩‍👩‍👧".encode()
    cut = scored("a ", family[:2], family[2:9], family[9:], " 🌊")
    assert table(cut.words) == [("a ", 1), ("👩‍👩‍👧", 2 + 3 + 4), (" 🌊", 5)]


def test_a_token_that_reaches_into_two_words_makes_them_one() -> None:
    assert table(scored("New", " York", " City is", " big").words) == [
        ("New", 1), (" York", 2), (" City is", 3), (" big", 4),
    ]  # fmt: skip
    assert table(scored("a b", "c d", " e").words) == [("a bc d", 3), (" e", 3)]


def test_spans_by_characters_words_tokens_and_patterns() -> None:
    cut = scored("The", " cat", " sat", " 12", "0", " times")
    assert cut[1:3, "word"].surprisal == 2 + 3
    assert cut[-1, "word"].text == " times"
    assert cut[2, "token"].text == " sat"
    assert cut[0, "sentence"].surprisal == 21
    assert cut[4:5].text == " cat"  # every token that overlaps the span
    assert cut[2:4].surprisal == 1 + 2
    assert table(cut.matching(r"\d+")) == [(" 120", 4 + 5)]
    assert table(cut.matching(re.compile("cat|times"))) == [(" cat", 2), (" times", 6)]
    assert table(cut.spans([(0, 3), (12, 13)])) == [("The", 1), (" 12", 4)]
    assert [unit.text for unit in cut.units("char")][:4] == ["The", "The", "The", " cat"]


def test_an_empty_span_holds_nothing() -> None:
    unit = scored("The", " cat")[3:3]
    assert (unit.text, unit.num_scored, unit.logprob, unit.surprisal) == ("", 0, None, None)


@pytest.mark.parametrize(
    ("ask", "parameter"),
    [
        (lambda text: text.spans([(0, 99)]), "span"),
        (lambda text: text.spans([(2, 1)]), "span"),
        (lambda text: text[7:9, "word"], "index"),
        (lambda text: text[::2], "index"),
        (lambda text: text.units("line"), "by"),
    ],
)
def test_a_bad_span_is_refused_by_name(ask: Any, parameter: str) -> None:
    with pytest.raises(ParameterError) as caught:
        ask(scored("The", " cat"))
    assert caught.value.parameter == parameter


@given(st.lists(st.text(alphabet=" \nab.,!你。é🌊👩‍\"'", min_size=1, max_size=4), max_size=12), st.data())
def test_units_tile_the_tokens_and_keep_the_sum(words: list[str], data: Any) -> None:
    raw = "".join(words).encode()
    cuts = sorted({0, len(raw), *data.draw(st.lists(st.integers(0, len(raw)), max_size=20))})
    text = scored(*(raw[start:end] for start, end in pairwise(cuts)))
    for units in (text.tokens, text.words, text.sentences):
        bounds = [0, *(unit.end_token for unit in units)]
        assert [unit.first_token for unit in units] == bounds[:-1]
        assert bounds[-1] == len(text.token_ids)
        assert math.fsum(unit.logprob or 0.0 for unit in units) == text.logprob
    for unit in text.words:
        assert len(unit.text.split()) <= 1 or unit.end_token > unit.first_token


def test_numbers_are_those_of_the_score(tiny_llm: LLM) -> None:
    texts = ["the cat and the dog, é 🌊", "the end of the cat"]
    found = tiny_llm.surprisal(texts)
    scores = tiny_llm.score([("", text) for text in texts], entropy=True)
    for text, one, score in zip(texts, found, scores, strict=True):
        assert (one.text, one.bos_token_id) == (text, 0)
        assert one.logprobs.tolist() == pytest.approx(score.token_logprobs, abs=1e-4)
        assert one.entropy.tolist() == pytest.approx(score.entropy, abs=1e-4)
        assert one.ranks.tolist() == score.ranks
        assert sum(unit.logprob or 0 for unit in one.words) == pytest.approx(score.logprob, abs=1e-3)


def test_without_bos_the_first_token_has_no_number(tiny_llm: LLM) -> None:
    found = tiny_llm.surprisal("the cat", bos=False)[0]
    assert math.isnan(found.logprobs[0])
    assert found.tokens[0].logprob is None
    assert found.words[0].num_scored < found.words[0].end_token
    assert found.bos_token_id is None


def test_a_text_past_the_context_is_scored_in_windows(tiny_llm: LLM) -> None:
    text = "the cat and the dog, 12 é 🌊\n" * 20
    found = tiny_llm.surprisal(text, window=100, stride=50)[0]
    assert found.logprob == pytest.approx(tiny_llm.perplexity(text, window=100, stride=50).logprob, abs=1e-3)
    assert len(found.words) == len(text.split())


def test_the_text_at_fault_is_named(tiny_llm: LLM) -> None:
    with pytest.raises(ParameterError, match="texts: text 1 is not valid Unicode"):
        tiny_llm.surprisal(["the", "a\ud800"])
