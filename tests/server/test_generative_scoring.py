"""`/generative_scoring` and `/v1/score`: probabilities of label tokens in vLLM's and SGLang's formats."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from logprobe import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

VLLM, SGLANG = "/generative_scoring", "/v1/score"
QUERY, ITEMS, LABELS = "the cat sat on", [" the mat", " a dog"], [30, 5, 71]


def expected(server: Any, prompts: Sequence[Sequence[int]], *, softmax: bool) -> np.ndarray:
    """Return the label probabilities computed from whole next-token rows."""
    rows = []
    for prompt in prompts:
        (output,) = server.llm.generate([[*map(int, prompt)]], SamplingParams(max_tokens=1, logprobs=-1))
        shares = np.exp([output.outputs[0].logprobs[0][label].logprob for label in LABELS])
        rows.append(shares / shares.sum() if softmax else shares)
    return np.array(rows)


@pytest.mark.parametrize("softmax", [True, False])
@pytest.mark.parametrize("item_first", [False, True])
def test_vllm_scores_the_first_label_after_query_and_item(
    server: Any, softmax: bool, item_first: bool
) -> None:
    asked = {"query": QUERY, "items": ITEMS, "label_token_ids": LABELS}
    reply = server.post(VLLM, **asked, apply_softmax=softmax, item_first=item_first).json()
    encode = server.llm.text.encode
    prompts = []
    for item in ITEMS:
        first, second = (item, QUERY) if item_first else (QUERY, item)
        prompts.append([*encode(first), *encode(second, add_special_tokens=False)])
    want = expected(server, prompts, softmax=softmax)[:, 0]
    assert [one["score"] for one in reply["data"]] == pytest.approx(want, rel=1e-5)
    assert [(one["index"], one["object"]) for one in reply["data"]] == [(0, "score"), (1, "score")]
    num_tokens = sum(map(len, prompts))
    assert (reply["object"], reply["usage"]["prompt_tokens"]) == ("list", num_tokens)
    assert (reply["usage"]["completion_tokens"], reply["usage"]["total_tokens"]) == (2, num_tokens + 2)


def test_vllm_normalizes_by_default_and_takes_ids_and_its_own_request_id(server: Any) -> None:
    asked = {"query": [5, 60], "items": [[70], [71, 9]], "label_token_ids": LABELS, "request_id": "mine-1"}
    reply = server.post(VLLM, **asked).json()
    want = expected(server, [[5, 60, 70], [5, 60, 71, 9]], softmax=True)[:, 0]
    assert [one["score"] for one in reply["data"]] == pytest.approx(want, rel=1e-5)
    assert reply["id"] == "generative-scoring-mine-1"


def test_vllm_adds_no_special_tokens_if_told_so(server: Any) -> None:
    asked = {"query": QUERY, "items": [" a"], "label_token_ids": LABELS, "add_special_tokens": False}
    (found,) = server.post(VLLM, **asked).json()["data"]
    ids = [*server.llm.text.encode(QUERY, add_special_tokens=False)]
    ids += [*server.llm.text.encode(" a", add_special_tokens=False)]
    assert found["score"] == pytest.approx(expected(server, [ids], softmax=True)[0, 0], rel=1e-5)


@pytest.mark.parametrize("item_first", [False, True])
def test_sglang_scores_every_label_of_the_joined_text(server: Any, item_first: bool) -> None:
    asked = {"query": QUERY, "items": ITEMS, "label_token_ids": LABELS, "model": "default"}
    reply = server.post(SGLANG, **asked, item_first=item_first).json()
    joined = [item + QUERY if item_first else QUERY + item for item in ITEMS]
    prompts = [server.llm.text.encode(text) for text in joined]
    assert np.array(reply["scores"]) == pytest.approx(expected(server, prompts, softmax=False), rel=1e-5)
    assert (reply["object"], reply["model"]) == ("scoring", server.service.model_name)
    num_tokens = sum(map(len, prompts))
    assert (reply["usage"]["prompt_tokens"], reply["usage"]["total_tokens"]) == (num_tokens, num_tokens)


def test_sglang_takes_one_text_and_ids_and_normalizes_on_request(server: Any) -> None:
    asked = {"query": QUERY, "items": ITEMS[0], "label_token_ids": LABELS, "apply_softmax": True}
    (one,) = server.post(SGLANG, **asked).json()["scores"]
    prompt = server.llm.text.encode(QUERY + ITEMS[0])
    assert one == pytest.approx(expected(server, [prompt], softmax=True)[0], rel=1e-5)
    (other,) = server.post(
        SGLANG, query=[5, 60], items=[[70]], label_token_ids=LABELS, item_first=True
    ).json()["scores"]
    assert other == pytest.approx(expected(server, [[70, 5, 60]], softmax=False)[0], rel=1e-5)


@pytest.mark.parametrize("path", [VLLM, SGLANG])
@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"label_token_ids": []}, "label_token_ids"),
        ({"label_token_ids": [99_999]}, "label_token_ids"),
        ({"label_token_ids": [9_999_999_999, 9_999_999_998]}, "label_token_ids"),
        ({"label_token_ids": [-1]}, "label_token_ids"),
        ({"label_token_ids": [5, 5]}, "label_token_ids"),
        ({"label_token_ids": [*range(257)]}, "label_token_ids"),
        ({"items": []}, "items"),
        ({"items": ["a"] * 100_000}, "items"),
        ({"items": ["the " * 500]}, "items"),
        ({"items": [[99_999]], "query": [5]}, "items"),
        ({"query": [], "items": [[]]}, "items"),
        ({"query": [2**40]}, "query"),
        ({"query": [5] * 10_000}, "query"),
        ({"model": "other"}, "model"),
    ],
)
def test_what_cannot_be_scored_is_a_400_that_names_the_field(
    server: Any, path: str, change: dict[str, Any], param: str
) -> None:
    asked = {"query": QUERY, "items": ITEMS, "label_token_ids": LABELS} | change
    if isinstance(asked["query"], list):
        asked["items"] = change.get("items", [[5]])
    reply = server.post(path, **asked)
    assert reply.status_code == (404 if param == "model" else 400)
    assert reply.json()["error"]["param"] == param


def test_sglang_joins_texts_with_texts_only(server: Any) -> None:
    reply = server.post(SGLANG, query=QUERY, items=[[5]], label_token_ids=LABELS)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "items")


@pytest.mark.parametrize(
    ("body", "param", "route"),
    [
        ({"text_1": "a", "text_2": ["b"]}, "text_1", "/v1/rerank"),
        ({"queries": "a", "documents": ["b"]}, "queries", "/v1/rerank"),
        ({"context": "a", "continuations": ["b"]}, "context", "/v1/loglikelihood"),
    ],
)
def test_a_body_of_another_score_route_names_the_route_to_use(
    server: Any, body: dict[str, Any], param: str, route: str
) -> None:
    reply = server.post(SGLANG, **body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert route in reply.json()["error"]["message"]


def test_a_query_that_is_too_long_is_refused_before_it_is_copied(server: Any) -> None:
    reply = server.post(VLLM, query="the " * 300, items=["a"], label_token_ids=LABELS)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_requests_of_vllms_own_tests_get_the_reply_that_these_expect(server: Any) -> None:
    cities = ["Paris", "London", "Berlin", "New York", "Tokyo"]
    asked = {"query": "Is this city a capital? ", "items": cities, "label_token_ids": [100, 200]}
    first, again = (server.post(VLLM, model=server.service.model_name, **asked).json() for _ in range(2))
    assert first["id"].startswith("generative-scoring-")
    assert first["object"] == "list"
    assert [one["index"] for one in first["data"]] == [*range(5)]
    assert all(one["object"] == "score" and 0 <= one["score"] <= 1 for one in first["data"])
    usage = first["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens"] > 0
    scores = [[one["score"] for one in reply["data"]] for reply in (first, again)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-6)
    del asked["label_token_ids"]
    refused = server.post(VLLM, **asked)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "label_token_ids")
