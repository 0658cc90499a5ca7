"""The cookbook's tasks on a real server: results through OpenAI's client equal the library's."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import openai
import pytest

from logprobe import SamplingParams
from logprobe.server import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logprobe import LLM

EXAMPLES = Path(__file__).parents[2] / "examples"
TOLERANCE = 1e-4  # nats: other batch sizes use other kernels

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def url(real_llm: LLM, new_serving: Any) -> Iterator[str]:
    with new_serving(real_llm, ServerSettings(), ()) as (url, _):
        yield f"{url}/v1"


@pytest.fixture(scope="module")
def cookbook() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        yield importlib.import_module("cookbook")


@pytest.fixture(scope="module")
def ask(url: str, cookbook: Any) -> Iterator[Any]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield cookbook.Asker(client)


def answer(llm: LLM, question: str, max_tokens: int, num_top: int = 0) -> Any:
    """Return the library's own greedy reply."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0, logprobs=num_top)
    return llm.chat([{"role": "user", "content": question}], params)[0].outputs[0]


def logprobs_of(completion: Any) -> list[float]:
    """Return the log-probabilities of all tokens but the end token, which has no row over HTTP."""
    rows = [completion.logprobs.chosen(place)[1].logprob for place in range(len(completion.logprobs))]
    return rows[:-1] if completion.finish_reason == "stop" else rows


def test_a_category_comes_with_its_two_likeliest_tokens(ask: Any, cookbook: Any, real_llm: LLM) -> None:
    for headline in cookbook.HEADLINES:
        question = cookbook._category_of(headline)
        want = answer(real_llm, question, 20, num_top=2)
        assert cookbook.classified(ask, headline) == want.text
        found = cookbook.classified_surely(ask, headline)
        best = sorted(want.logprobs[0].values(), key=lambda entry: entry.rank)[:2]
        assert [token for token, _ in found] == [entry.decoded_token for entry in best]
        numbers = [math.log(probability) for _, probability in found]
        assert numbers == pytest.approx([entry.logprob for entry in best], abs=TOLERANCE)


def test_sufficient_context_is_a_share(ask: Any, cookbook: Any, real_llm: LLM) -> None:
    labels = real_llm.classify(
        [[{"role": "user", "content": cookbook._is_in_article(question)}] for question in cookbook.QUESTIONS],
        ["True", "False"],
    )
    assert isinstance(labels, list)
    for question, found in zip(cookbook.QUESTIONS, labels, strict=True):
        assert all(0 < probability <= 1 for _, probability in cookbook.has_sufficient_context(ask, question))
        score = cookbook.sufficient_context_score(ask, question)
        # Both words are single tokens and among the top twenty.
        assert score == pytest.approx(found.probabilities["True"], abs=TOLERANCE)


def test_words_are_suggested_as_a_sentence_grows(ask: Any, cookbook: Any) -> None:
    found = cookbook.completions(ask, cookbook.SENTENCE)
    assert [*found][::5] == ["My", cookbook.SENTENCE]
    for entries in found.values():
        probabilities = [probability for _, probability in entries]
        assert len(entries) == 3
        assert probabilities == sorted(probabilities, reverse=True)
        assert sum(probabilities) <= 1


def test_tokens_are_coloured_and_bytes_make_the_text(ask: Any, cookbook: Any, real_llm: LLM) -> None:
    question = "Write the blue heart emoji and its name."
    text, num_tokens = cookbook.highlighted(ask, question)
    assert 0 < num_tokens <= 40
    assert text.count("\x1b") == num_tokens + 1
    text, logprob = cookbook.from_bytes(ask, question)
    want = answer(real_llm, question, 20)
    assert text == want.text
    assert logprob == pytest.approx(sum(logprobs_of(want)), abs=20 * TOLERANCE)


def test_perplexity_is_that_of_the_answer(ask: Any, cookbook: Any, real_llm: LLM) -> None:
    question = "What is the capital of France?"
    text, value = cookbook.perplexity(ask, question)
    assert "Paris" in text
    want = answer(real_llm, question, 60)
    assert text == want.text
    rows = logprobs_of(want)
    assert value == pytest.approx(math.exp(-sum(rows) / len(rows)), rel=TOLERANCE)


def test_the_program_runs_by_hand(
    url: str, cookbook: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["cookbook.py", "--url", url])
    cookbook.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= len(cookbook.HEADLINES) + len(cookbook.QUESTIONS) + 6 + 2 + 1 + 2
    assert lines[-1].rsplit(maxsplit=1)[0].endswith("perplexity")
