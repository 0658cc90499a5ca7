"""A text encoded in pieces has the tokens of the whole."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from logprobe.analysis.windows import encode_pieces
from logprobe.errors import ParameterError

if TYPE_CHECKING:
    from logprobe import LLM

ROOT = Path(__file__).parents[2]
TEXTS = {
    "prose": (ROOT / "examples/lighthouse.txt").read_text("utf-8"),
    "code": (ROOT / "benchmarks/harness.py").read_text("utf-8"),
    "chinese": "你好，世界。天地玄黄" * 500,
    "emoji": "🌊👩‍👩‍👧" * 500,
    "one letter": "x" * 8000,
    "spaces": " " * 8000,
    "line ends": "\n" * 5000,
    "the cat": "the cat and the dog, " * 400,
}


def joined(llm: LLM, text: str, step: int = 700, **options: int) -> np.ndarray:
    parts = (text[start : start + step] for start in range(0, len(text), step))
    return np.concatenate([piece.token_ids for piece in encode_pieces(parts, llm.text, **options)])


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("piece_chars", [1500, 4000])
def test_pieces_have_the_tokens_of_the_whole(tiny_llm: LLM, name: str, piece_chars: int) -> None:
    whole = tiny_llm.text.encode(TEXTS[name], add_special_tokens=False)
    got = joined(tiny_llm, TEXTS[name], piece_chars=piece_chars, overlap_chars=1000)
    np.testing.assert_array_equal(got, whole)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(alphabet="the cat\n\té🌊你", min_size=1500, max_size=3000), step=st.integers(1, 999))
def test_any_text_in_any_pieces(tiny_llm: LLM, text: str, step: int) -> None:
    whole = tiny_llm.text.encode(text, add_special_tokens=False)
    got = joined(tiny_llm, text, step, piece_chars=900, overlap_chars=700)
    np.testing.assert_array_equal(got, whole)


def test_no_text_gives_no_tokens(tiny_llm: LLM) -> None:
    assert [len(piece.sizes) for piece in encode_pieces([], tiny_llm.text)] == [0]
    assert [len(piece.sizes) for piece in encode_pieces(["", ""], tiny_llm.text)] == [0]


def test_a_bad_character_is_refused_by_name(tiny_llm: LLM) -> None:
    with pytest.raises(ParameterError, match="not valid Unicode"):
        list(encode_pieces(["the \ud800"], tiny_llm.text))


@pytest.mark.real_model
def test_pieces_have_the_tokens_of_the_whole_for_a_real_tokenizer(real_llm: LLM) -> None:
    text = "".join(TEXTS.values())
    whole = real_llm.text.encode(text, add_special_tokens=False)
    np.testing.assert_array_equal(joined(real_llm, text, piece_chars=4000), whole)
