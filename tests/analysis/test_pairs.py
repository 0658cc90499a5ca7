"""Minimal pairs: accuracy over all and by category."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from logprobe.analysis import measures
from logprobe.analysis.texts import surprisal
from logprobe.errors import ParameterError

if TYPE_CHECKING:
    from logprobe import LLM

PAIRS = [
    ("the cat", "cat the"),
    ("a dog in", "a in dog"),
    ("and the", "the and"),
    ("on a", "a on"),
    ("x", "y"),
]
KINDS = ["order", "order", "little", "order", "little"]


def test_a_pair_is_right_where_its_good_text_is_likelier(tiny_llm: LLM) -> None:
    found = tiny_llm.minimal_pairs(PAIRS, KINDS)
    good, bad = ([tiny_llm.surprisal(pair[side], bos=True)[0].logprob for pair in PAIRS] for side in (0, 1))
    np.testing.assert_allclose(found.good_logprobs, good, atol=1e-5)
    np.testing.assert_allclose(found.bad_logprobs, bad, atol=1e-5)
    right = [a > b for a, b in zip(good, bad, strict=True)]
    assert found.is_right.tolist() == right
    assert (found.accuracy.mean, found.accuracy.error) == measures.mean_and_error(right)
    assert list(found.by_category) == ["order", "little"]
    for name, share in found.by_category.items():
        own = [hit for hit, kind in zip(right, KINDS, strict=True) if kind == name]
        assert (share.mean, share.error) == measures.mean_and_error(own)
    assert str(found).splitlines()[-1].startswith("all     ")
    numbered = tiny_llm.minimal_pairs(PAIRS, [1, 1, None, 1, None])  # categories from a data frame
    assert [line.split()[0] for line in str(numbered).splitlines()] == ["1", "None", "all"]
    frame = found.to_pandas()
    assert frame["category"].tolist() == KINDS
    assert frame["is_right"].mean() == found.accuracy.mean


def test_a_pair_without_scored_tokens_is_named_with_its_text(tiny_llm: LLM) -> None:
    with pytest.raises(ParameterError, match=r"pair 1 has .* 'a'; use bos=True \(--bos\)") as error:
        tiny_llm.minimal_pairs([("the cat", "cat the"), ("the cat", "a")], bos=False)
    assert error.value.parameter == "pairs"


def test_pairs_are_scored_some_at_a_time(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = tiny_llm.minimal_pairs(PAIRS, KINDS)
    calls = []

    def counted(llm: Any, texts: list[str], **asked: Any) -> Any:
        calls.append(len(texts))
        return surprisal(llm, texts, **asked)

    monkeypatch.setattr("logprobe.analysis.pairs.PAIRS_A_CALL", 2)
    monkeypatch.setattr("logprobe.analysis.pairs.surprisal", counted)
    parts = tiny_llm.minimal_pairs(PAIRS, KINDS)
    assert calls == [4, 4, 2]
    np.testing.assert_allclose(parts.good_logprobs, whole.good_logprobs, atol=1e-5)
    np.testing.assert_allclose(parts.bad_logprobs, whole.bad_logprobs, atol=1e-5)
    with pytest.raises(ParameterError, match="pair 4 has a text") as error:
        tiny_llm.minimal_pairs([*PAIRS[:4], ("x", "")])
    assert error.value.parameter == "pairs"
    with pytest.raises(ParameterError, match="from pair 2 on, text 1") as error:
        tiny_llm.minimal_pairs([*PAIRS[:2], ("x", "\ud800")])
    assert error.value.parameter == "pairs"


def test_a_pair_of_equal_texts_is_wrong_and_one_pair_has_no_error(tiny_llm: LLM) -> None:
    found = tiny_llm.minimal_pairs([("the cat", "the cat")])
    assert (found.accuracy.mean, found.accuracy.error, found.by_category) == (0.0, None, {})


@pytest.mark.parametrize(
    ("pairs", "asked", "parameter"),
    [
        ([], {}, "pairs"),
        (PAIRS, {"categories": ["order"]}, "categories"),
        ([("x", "y")], {"bos": False}, "pairs"),
        ([("x", "")], {}, "pairs"),
    ],
)
def test_what_cannot_be_compared_is_refused(tiny_llm: LLM, pairs: Any, asked: Any, parameter: str) -> None:
    with pytest.raises(ParameterError) as error:
        tiny_llm.minimal_pairs(pairs, **asked)
    assert error.value.parameter == parameter
