"""Arguments of the wrong type are refused by name, and any iterable is accepted."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from logprobe.analysis import calibrate, compare, compare_with_baseline, save_baseline
from logprobe.analysis.detection import binoculars
from logprobe.errors import ParameterError
from refusals import raises

if TYPE_CHECKING:
    from collections.abc import Callable

    from logprobe import LLM

PAIRS = [("the cat", " and the dog"), ("a dog", " in the end")]
TEXTS = ["the cat and the dog", "the end"]
SHARES, TRUTH = [0.9, 0.2, 0.7, 0.4] * 10, [True, False, False, True] * 10

Call = tuple[str, "Callable[[Any], Any]"]
REFUSED: dict[str, Call] = {
    "score pairs=None": ("pairs", lambda llm: llm.score(None)),
    "score pairs=dict": ("pairs", lambda llm: llm.score(dict(PAIRS))),
    "score pairs=str": ("pairs", lambda llm: llm.score("ab")),
    "score logprobs=None": ("logprobs", lambda llm: llm.score(PAIRS, logprobs=None)),
    "score logprobs=-2": ("logprobs", lambda llm: llm.score(PAIRS, logprobs=-2)),
    "score sampling_params": (
        "sampling_params",
        lambda llm: llm.score(PAIRS, sampling_params={"temperature": 1}),
    ),
    "score logprob_token_ids": ("logprob_token_ids", lambda llm: llm.score(PAIRS, logprob_token_ids=5)),
    "logit_lens logprobs=None": ("logprobs", lambda llm: llm.logit_lens("a b", logprobs=None)),
    "logit_lens logprobs=-2": ("logprobs", lambda llm: llm.logit_lens("a b", logprobs=-2)),
    "surprisal None": ("texts", lambda llm: llm.surprisal(None)),
    "surprisal item": ("texts", lambda llm: llm.surprisal(["a", None])),
    "surprisal bytes": ("texts", lambda llm: llm.surprisal(b"ab")),
    "surprisal ids": ("texts", lambda llm: llm.surprisal([5, 6])),
    "perplexity None": ("text", lambda llm: llm.perplexity(None)),
    "perplexity bytes": ("text", lambda llm: llm.perplexity(b"abc")),
    "perplexity lines of bytes": ("text", lambda llm: llm.perplexity(iter([b"abc"]))),
    "perplexity Path": ("text", lambda llm: llm.perplexity(Path("book.txt"))),
    "perplexity window=str": ("window", lambda llm: llm.perplexity("a b", window="2")),
    "perplexity window=float": ("window", lambda llm: llm.perplexity("a b", window=3.0)),
    "perplexity stride": ("stride", lambda llm: llm.perplexity("a b", stride="2")),
    "minimal_pairs str": ("pairs", lambda llm: llm.minimal_pairs("ab")),
    "minimal_pairs None": ("pairs", lambda llm: llm.minimal_pairs(None)),
    "minimal_pairs items": ("pairs", lambda llm: llm.minimal_pairs(["ab", "cd"])),
    "minimal_pairs one text": ("pairs", lambda llm: llm.minimal_pairs([("a b",)])),
    "minimal_pairs ids": ("pairs", lambda llm: llm.minimal_pairs([(5, 6)])),
    "classify confidence": ("confidence", lambda llm: llm.classify("a", [" b", " c"], confidence="x")),
    "chat_template_kwargs": ("chat_template_kwargs", lambda llm: llm.chat("hi", chat_template_kwargs="x")),
    "calibrate outputs": ("outputs", lambda _: calibrate(None, TRUTH)),  # type: ignore[arg-type]
    "calibrate labels": ("labels", lambda _: calibrate(SHARES, 1)),  # type: ignore[arg-type]
    "calibrate coverage": ("coverage", lambda _: calibrate(SHARES, TRUTH, coverage="x")),  # type: ignore[arg-type]
    "compare a": ("a", lambda llm: compare("smollm2", llm, TEXTS)),  # type: ignore[arg-type]
    "compare b": ("b", lambda llm: compare(llm, None, TEXTS)),  # type: ignore[arg-type]
    "compare None": ("texts", lambda llm: compare(llm, llm, [None])),  # type: ignore[list-item]
    "compare ids": ("texts", lambda llm: compare(llm, llm, [[5, 6]])),  # type: ignore[list-item]
    "save_baseline": ("llm", lambda _: save_baseline("smollm2", TEXTS, "b.lpkl")),  # type: ignore[arg-type]
    "compare_with_baseline": ("llm", lambda _: compare_with_baseline("b.lpkl", "smollm2")),  # type: ignore[arg-type]
    "binoculars": ("texts", lambda llm: binoculars(llm, llm, [None])),  # type: ignore[list-item]
}


@pytest.mark.parametrize(("parameter", "call"), REFUSED.values(), ids=REFUSED)
def test_a_wrong_type_is_refused_by_name(tiny_llm: LLM, parameter: str, call: Callable[[Any], Any]) -> None:
    with raises(ParameterError, parameter=parameter):
        call(tiny_llm)


ACCEPTED: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "score": (lambda llm: llm.score(iter(PAIRS)), lambda llm: llm.score(PAIRS)),
    "score logprob_token_ids": (
        lambda llm: llm.score(PAIRS, logprob_token_ids=iter([[5], [6]])),
        lambda llm: llm.score(PAIRS, logprob_token_ids=[[5], [6]]),
    ),
    "surprisal": (lambda llm: llm.surprisal(iter(TEXTS)), lambda llm: llm.surprisal(TEXTS)),
    "binoculars": (lambda llm: binoculars(llm, llm, TEXTS[0]), lambda llm: binoculars(llm, llm, TEXTS[:1])),
}


@pytest.mark.parametrize(("call", "expected"), ACCEPTED.values(), ids=ACCEPTED)
def test_an_iterator_or_a_string_gives_the_result_of_the_list(
    tiny_llm: LLM, call: Callable[[Any], Any], expected: Callable[[Any], Any]
) -> None:
    found, wanted = ([getattr(one, "logprob", one) for one in make(tiny_llm)] for make in (call, expected))
    assert found == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize(
    "pairs", [lambda: zip(*zip(*PAIRS, strict=True), strict=True), lambda: np.array(PAIRS)]
)
def test_minimal_pairs_may_be_an_iterator_or_an_array(tiny_llm: LLM, pairs: Callable[[], Any]) -> None:
    found, wanted = tiny_llm.minimal_pairs(pairs()), tiny_llm.minimal_pairs(PAIRS)
    np.testing.assert_allclose(found.good_logprobs, wanted.good_logprobs, atol=1e-5)


def test_calibrate_takes_iterators() -> None:
    assert calibrate(iter(SHARES), iter(TRUTH)) == calibrate(SHARES, TRUTH)
