"""`/v1/uncertainty`: the library's results, and answers that are stopped early."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from logprobe import LLM, SamplingParams
from logprobe.analysis import LowConfidence
from logprobe.testing import open_requests

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TALK = [{"role": "user", "content": "the cat"}]
PATH = "/v1/uncertainty"


@pytest.fixture(scope="module")
def exact(tiny_model_folder: Path, serve_llm: Any) -> Iterator[Any]:
    """A server and a model whose results do not depend on the batch."""
    with (
        LLM(str(tiny_model_folder), kv_cache_memory_bytes=1 << 21) as llm,
        serve_llm(llm) as running,
    ):
        yield running


@pytest.fixture(scope="module")
def capped(tiny_llm: LLM, serve_llm: Any) -> Iterator[Any]:
    """A server with a low limit on alternatives."""
    with serve_llm(tiny_llm, max_logprobs=5) as running:
        yield running


def reply_to(server: Any, **body: Any) -> dict[str, Any]:
    reply = server.post(PATH, **body)
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def without_certainty(found: dict[str, Any]) -> dict[str, Any]:
    for answer in found["answers"]:
        assert answer.pop("self_certainty") is None
    return found


@pytest.mark.parametrize("how", [{"input": "the cat and"}, {"messages": TALK}], ids=str)
@pytest.mark.parametrize(
    "shape", [{}, {"temperature": 0.7, "top_k": 9, "top_p": 0.9, "min_p": 0.01}], ids=str
)
def test_figures_have_the_bits_of_the_library(exact: Any, how: dict[str, Any], shape: dict[str, Any]) -> None:
    reply = reply_to(exact, n=6, max_tokens=5, seed=4, window=2, k=7, **how, **shape)
    params = SamplingParams(max_tokens=5, seed=4, **shape)
    want = exact.llm.uncertainty(*how.values(), 6, params, window=2, k=7)
    assert (reply["object"], reply["unit"], reply["model"]) == (
        "uncertainty",
        "nats",
        exact.service.model_name,
    )
    assert {name: reply[name] for name in want.to_dict()} == without_certainty(want.to_dict())
    num_drawn = sum(answer.num_tokens for answer in want.answers)
    assert reply["usage"]["completion_tokens"] == num_drawn
    assert reply["usage"]["total_tokens"] == num_drawn + reply["usage"]["prompt_tokens"]


def test_what_is_not_given_is_as_in_the_library(exact: Any) -> None:
    reply = reply_to(exact, input="the cat", seed=1)
    want = exact.llm.uncertainty("the cat", sampling_params=SamplingParams(seed=1))
    assert {name: reply[name] for name in want.to_dict()} == without_certainty(want.to_dict())
    assert (len(reply["answers"]), reply["k"]) == (10, 20)


def test_answers_are_ended_where_the_library_ends_them(exact: Any) -> None:
    params = SamplingParams(max_tokens=40, seed=5)
    whole = exact.llm.uncertainty("the cat", 6, params, window=3, k=5)
    lowest = sorted(answer.lowest_group_confidence for answer in whole.answers)
    bar = (lowest[2] + lowest[3]) / 2
    rule = LowConfidence(threshold=bar, window=3, k=5)
    reply = reply_to(exact, input="the cat", n=6, max_tokens=40, seed=5, window=3, k=5, stop_below=bar)
    want = exact.llm.uncertainty("the cat", 6, params, stop_when=rule)
    assert {name: reply[name] for name in want.to_dict()} == without_certainty(want.to_dict())
    early = [answer["stopped_early"] for answer in reply["answers"]]
    assert early == [answer.stopped_early for answer in want.answers]
    assert any(early)
    none = reply_to(exact, input="the cat", n=2, max_tokens=40, seed=5, window=3, k=5, stop_below=100)
    assert (none["best"], none["semantic_entropy"], none["mass"]) == (None, None, 0.0)
    assert open_requests(exact.llm) == []


def test_a_server_of_few_alternatives_gives_those(capped: Any) -> None:
    assert reply_to(capped, input="the cat", n=2, max_tokens=2)["k"] == 5
    reply = capped.post(PATH, input="the cat", n=2, k=6)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "k")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"messages": TALK}, "input"),
        ({"input": ["a", "b"]}, "input"),
        ({"input": "x" * 300}, "input"),
        ({"input": "the " * 200, "max_tokens": 2}, "input"),
        ({"input": None, "messages": [{"content": "a"}]}, "messages[0].role"),
        ({"input": None, "messages": [{"role": "user", "content": "the " * 200}]}, "messages"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": 0}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"stop": ""}, "stop"),
        ({"window": 0}, "window"),
        ({"k": 0}, "k"),
        ({"stop_below": 0}, "stop_below"),
        ({"stop_below": 1.0}, "window"),
        ({"lora": "none"}, "lora"),
        ({"self_certainty": True}, "self_certainty"),
    ],
    ids=str,
)
def test_what_cannot_be_asked_is_named(exact: Any, fields: dict[str, Any], param: str) -> None:
    reply = exact.post(PATH, **{"input": "the cat", **fields})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param
