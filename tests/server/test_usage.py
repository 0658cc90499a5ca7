"""`usage` on every route: prompt tokens, and how many of them came from the prefix cache."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

TEXT = "The committee agreed to publish the report about the river and its two old bridges."
TALK = [{"role": "user", "content": TEXT}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": TALK, "max_tokens": 2},
    "/v1/completions": {"prompt": TEXT, "max_tokens": 2, "n": 3},
    "/v1/responses": {"input": TALK, "max_output_tokens": 2},
    "/v1/loglikelihood": {"context": TEXT, "continuations": [" It rained."]},
    "/v1/label": {"input": TEXT, "labels": [" yes"]},
    "/generative_scoring": {"query": TEXT, "items": [" yes", " no"], "label_token_ids": [5, 6]},
    "/v1/score": {"query": TEXT, "items": [" yes", " no"], "label_token_ids": [5, 6]},
    "/v1/judge": {"input": TEXT, "scale": [1, 2]},
    "/v1/uncertainty": {"input": TEXT, "n": 3, "max_tokens": 2},
    "/v1/rerank": {"query": TEXT, "documents": ["a"], "template": ["", "{query}{document}", ""]},
}
LABEL_TOKENS = {"/generative_scoring", "/v1/score"}  # score the token after the prompt
SCORED = LABEL_TOKENS | {"/v1/loglikelihood", "/v1/label", "/v1/judge", "/v1/rerank"}


def details(usage: dict[str, Any]) -> tuple[int, int]:
    """Return prompt tokens and cached tokens, with either interface's names."""
    if "input_tokens" in usage:
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def streamed(server: Any, path: str, body: dict[str, Any]) -> dict[str, Any]:
    options = {} if path == "/v1/responses" else {"stream_options": {"include_usage": True}}
    text = server.post(path, **body, stream=True, **options).text
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return (events[-1].get("response") or events[-1])["usage"]


@pytest.fixture
def cold(server: Any) -> Iterator[Any]:
    server.service.engine.forget_prefixes()
    return server


@pytest.mark.parametrize("path", ROUTES)
def test_cached_tokens_are_those_that_an_earlier_request_computed(cold: Any, path: str) -> None:
    found, counted = [], []
    for _ in range(2):
        before = cold.service.engine.stats().cached_tokens
        reply = cold.post(path, **ROUTES[path])
        assert reply.status_code == 200, reply.text
        found.append(details(reply.json()["usage"]))
        counted.append(cold.service.engine.stats().cached_tokens - before)
    (num_first, cached_first), (num_again, cached_again) = found
    assert num_first == num_again
    if path in SCORED:  # includes hits between its own requests, except their last tokens
        assert [cached_first, cached_again] == counted
        assert cached_first < cached_again
        assert cached_again == num_again if path in LABEL_TOKENS else cached_again < num_again
    else:
        assert (cached_first, cached_again) == (0, num_again)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_a_stream_ends_with_the_usage_of_the_whole_reply(cold: Any, path: str) -> None:
    body = ROUTES[path] | {"seed": 1}
    first = streamed(cold, path, body)
    assert details(first)[1] == 0
    assert streamed(cold, path, body) == cold.post(path, **body).json()["usage"]
    assert details(streamed(cold, path, body)) == (details(first)[0],) * 2


def test_continuations_of_one_context_find_it_in_the_cache(cold: Any) -> None:
    body = ROUTES["/v1/loglikelihood"] | {"continuations": [[9], [9, 8]], "context": [5, 6, 7]}
    assert details(cold.post("/v1/loglikelihood", **body).json()["usage"]) == (9, 3)


def test_the_openai_client_reads_cached_tokens(cold: Any) -> None:
    client = cold.client()
    asked: dict[str, Any] = {"model": "default", "messages": TALK, "max_tokens": 1}
    for num_times in range(2):
        usage = client.chat.completions.create(**asked).usage
        assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens * num_times
