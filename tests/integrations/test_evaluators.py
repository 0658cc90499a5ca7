"""Requests of evaluation tools give the same numbers and texts in process and through a server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from logprobe import LLM, SamplingParams
from logprobe.errors import ParameterError, PromptTooLongError, ServerError
from logprobe.integrations.evaluators import InProcess, Served, open_model, prefix_token_id
from logprobe.server import ServerSettings

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TOLERANCE = 1e-5  # nats: the composition of a batch changes a row's last bits
CONTEXTS = ("the cat", "a dog and", "the cat")
CHOICES = (" and the dog", " of", " the the é")


@pytest.fixture(scope="module")
def address(tiny_llm: LLM, new_serving: Any) -> Iterator[str]:
    with new_serving(tiny_llm, ServerSettings()) as (url, _):
        yield url


@pytest.fixture(scope="module")
def in_process(tiny_model_folder: Path) -> Iterator[InProcess]:
    model = open_model(str(tiny_model_folder), kv_cache_memory_bytes=1 << 21)
    assert isinstance(model, InProcess)
    with model.llm:
        yield model


@pytest.fixture(scope="module")
def served(address: str) -> Iterator[Served]:
    model = open_model(None, base_url=f"{address}/v1", num_concurrent=3)
    assert isinstance(model, Served)
    yield model
    model.close()


def test_both_have_the_models_own_tokenizer_and_context(in_process: InProcess, served: Served) -> None:
    assert served.max_model_len == in_process.max_model_len
    assert prefix_token_id(served) == prefix_token_id(in_process)
    for text in ("the cat é\n", "", "  a"):
        for adds in (True, False):
            ids = served.encode(text, add_special_tokens=adds)
            assert ids == in_process.encode(text, add_special_tokens=adds)
    chat = [{"role": "user", "content": "the cat"}]
    mine, theirs = (one.tokenizer.apply_chat_template(chat, tokenize=False) for one in (served, in_process))
    assert mine == theirs


def test_scores_are_the_same_in_their_order(in_process: InProcess, served: Served) -> None:
    pairs = [
        (
            in_process.encode(context, add_special_tokens=True),
            in_process.encode(choice, add_special_tokens=False),
        )
        for context in CONTEXTS
        for choice in CHOICES * 7  # more than fit one request body
    ]
    mine, theirs = served.score(pairs), in_process.score(pairs)
    assert [score.logprob for score in mine] == pytest.approx(
        [score.logprob for score in theirs], abs=TOLERANCE
    )
    assert [score.is_greedy for score in mine] == [score.is_greedy for score in theirs]
    assert served.score([]) == []


def test_texts_are_the_same_in_their_order(in_process: InProcess, served: Served) -> None:
    prompts = [in_process.encode(text, add_special_tokens=True) for text in CONTEXTS]
    params = [
        SamplingParams(temperature=0, max_tokens=9),
        SamplingParams(n=2, seed=3, max_tokens=7, top_p=0.9, stop=["the"]),
        SamplingParams(temperature=0, max_tokens=1),
    ]
    texts = served.generate(prompts, params)
    assert texts == in_process.generate(prompts, params)
    assert [len(own) for own in texts] == [1, 2, 1]


def test_what_a_server_refuses_is_raised_by_name(served: Served) -> None:
    pairs = [([5], [6]), ([5] * 4000, [6]), ([5, 6], [7])]
    with pytest.raises(PromptTooLongError, match="tokens"):
        served.score(pairs)
    assert served.score([([5], [6])])[0].logprob < 0, "it goes on"


def test_what_has_not_been_asked_is_given_up_without_a_warning(address: str) -> None:
    one_at_a_time = open_model(None, base_url=address, num_concurrent=1)
    assert isinstance(one_at_a_time, Served)
    with pytest.raises(PromptTooLongError):
        one_at_a_time.score([([5] * 4000, [6]), ([5, 6], [7]), ([6], [7])])
    one_at_a_time.close()


def test_what_no_exchange_carries_is_refused_by_name(served: Served) -> None:
    with pytest.raises(ParameterError) as refused:
        served.generate([[5]], [SamplingParams(max_tokens=2, ignore_eos=True)])
    assert refused.value.parameter == "ignore_eos"


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({"base_url": "here"}, "url"),
        ({"api_key": "none"}, "api_key"),
        ({"base_url": "http://127.0.0.1:9", "dtype": "float32"}, "dtype"),
        ({"base_url": "http://127.0.0.1:9", "num_concurrent": 0}, "num_concurrent"),
        ({"num_concurrent": 2}, "num_concurrent"),
        ({"dtypes": "float32"}, "dtypes"),
    ],
)
def test_a_setting_that_cannot_be_used_is_refused_by_name(asked: dict[str, Any], name: str) -> None:
    with pytest.raises(ParameterError) as refused:
        open_model(None, **asked)
    assert refused.value.parameter == name


def test_a_server_or_a_model_that_is_not_there_is_told(address: str) -> None:
    with pytest.raises(ServerError):
        open_model(None, base_url="http://127.0.0.1:9")
    with pytest.raises(ParameterError, match="not served"):
        open_model("another", base_url=address)
