"""Replies match the published schemas; any request gets 2xx, or 4xx with a reason."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from logprobe.server.app import ROUTES
from logprobe.server.openai.bodies import BODIES
from logprobe.server.openai.openapi import document
from logprobe.testing import check_integrity
from server_process import PATIENCE_S

ROOT = Path(__file__).parents[2]
MESSAGES = [{"role": "user", "content": "the cat é 🐈"}]
EXTENDED = {
    "entropy": True,
    "logprob_token_ids": [3, 4],
    "return_token_ids": True,
    "prompt_logprobs": 2,
    "prompt_rows": True,
    "logprobs_mode": "both",
    "explain": True,
    "field_logprobs": True,
    "logit_bias": {"5": -100, "6": 3.5},
    "temperature": 0.7,
    "top_k": 5,
}
NUM_BODIES = 2000
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="session")
def schema() -> Any:
    """Make the validator of one component."""
    whole = document(ROUTES)

    def validator(name: str) -> Any:
        return jsonschema.Draft202012Validator({"$ref": f"#/components/schemas/{name}", **whole})

    return validator


def post(server: Any, path: str, body: dict[str, Any]) -> str:
    reply = httpx.post(server.url + path, json=body, timeout=PATIENCE_S)
    assert reply.status_code == 200, reply.text
    assert "NaN" not in reply.text
    assert "Infinity" not in reply.text
    return reply.text


def chunks_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


VLLMS = {
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "prompt_logprobs": 2,
    "logprobs_mode": "processed_logprobs",
    "temperature": 0.7,
}


@pytest.mark.parametrize("extra", [{}, EXTENDED, VLLMS], ids=["plain", "extended", "as vLLM"])
def test_replies_have_the_published_shapes(server: Any, schema: Any, extra: dict[str, Any]) -> None:
    chat = {"messages": MESSAGES, "max_tokens": 8, "logprobs": True, "top_logprobs": 4, **extra}
    text = {"prompt": ["the cat", "a"], "max_tokens": 8, "logprobs": 4, "n": 2, **extra}
    schema("ChatCompletion").validate(json.loads(post(server, "/v1/chat/completions", chat)))
    schema("Completion").validate(json.loads(post(server, "/v1/completions", text)))
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    for chunk in chunks_of(post(server, "/v1/chat/completions", chat | usage)):
        schema("ChatCompletionChunk").validate(chunk)
    for chunk in chunks_of(post(server, "/v1/completions", text | usage)):
        schema("Completion").validate(chunk)


def test_other_replies_have_their_shapes(server: Any, schema: Any) -> None:
    include = ["message.output_text.logprobs"]
    asked = {"input": "the cat", "max_output_tokens": 4, "include": include, "top_logprobs": 2}
    schema("Response").validate(json.loads(post(server, "/v1/responses", asked)))
    schema("Loglikelihoods").validate(
        json.loads(post(server, "/v1/loglikelihood", {"context": "a", "continuations": ["b", " c"]}))
    )
    shapes = {
        "/v1/label": "Labels",
        "/generative_scoring": "GenerativeScores",
        "/v1/score": "TokenScores",
        "/v1/judge": "Judgements",
        "/v1/uncertainty": "Uncertain",
    }
    for path, name in shapes.items():
        schema(name).validate(json.loads(post(server, path, NEEDED[path])))
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        schema("Ranking").validate(json.loads(post(server, path, NEEDED["/v1/rerank"])))
    one = {"input": ["a", "b"], "labels": {"only": ["c", "d"]}, "correction": "calibrated"}
    schema("Labels").validate(json.loads(post(server, "/v1/label", one)))
    echo = {"prompt": "the cat", "max_tokens": 0, "logprobs": 0, "echo": True}
    schema("Completion").validate(json.loads(post(server, "/v1/completions", echo)))
    schema("Models").validate(server.get("/v1/models").json())
    schema("Error").validate(server.post("/v1/completions").json())
    reply = httpx.post(server.url + "/v1/completions", content=b"{}", timeout=PATIENCE_S)
    schema("Error").validate(reply.json())


def test_the_published_document_is_the_servers_own() -> None:
    made = subprocess.run(
        [sys.executable, ROOT / "docs/openapi_json.py"], capture_output=True, text=True, check=True
    )
    assert json.loads(made.stdout) == json.loads((ROOT / "docs/openapi.json").read_text())


VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    7,
    10**6,
    2**31,
    10**30,
    -0.5,
    0.3,
    1e308,
    "",
    "a",
    "the cat",
    "é🐈\u0000",
    "\ud800",
    [],
    [1],
    [[1, 2], [3]],
    ["a", 1],
    [None],
    [[]],
    {},
    {"a": 1},
    {"5": 3},
    {"5": "x"},
    {"-1": 1},
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
    {"type": "regex", "regex": "("},
    {"include_usage": True},
    MESSAGES,
    [{"role": "user"}],
    [{"role": "x", "content": [{"type": "text", "text": "a"}]}],
]


def random_body(draw: random.Random, fields: list[str], needed: dict[str, Any]) -> dict[str, Any]:
    body = dict(needed)
    for name in draw.sample(fields, draw.randint(0, min(4, len(fields)))):
        body[name] = draw.choice(VALUES)
    if draw.random() < 0.1:
        body.pop(draw.choice(list(body)), None)
    if draw.random() < 0.05:
        body["no_such_field"] = draw.choice(VALUES)
    return body


NEEDED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/completions": {"prompt": "the cat", "max_tokens": 2},
    "/v1/responses": {"input": "the cat", "max_output_tokens": 2},
    "/v1/loglikelihood": {"context": "a", "continuations": ["b"]},
    "/v1/label": {"input": "a", "labels": ["b", "c"]},
    "/generative_scoring": {"query": "a", "items": ["b", "c"], "label_token_ids": [5, 6]},
    "/v1/score": {"query": "a", "items": ["b", "c"], "label_token_ids": [5, 6]},
    "/v1/judge": {"messages": MESSAGES},
    "/v1/uncertainty": {"input": "the cat", "n": 2, "max_tokens": 2},
    "/v1/rerank": {
        "query": "a",
        "documents": ["b", {"text": "c"}],
        "template": ["", "{query}{document}", ":"],
    },
    "/v1/next_token_logprobs": {"prompts": ["a"]},
    "/v1/hidden_states": {"prompts": ["a"]},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
}


def test_no_body_makes_the_server_fail(server: Any, schema: Any) -> None:
    draw = random.Random(0)  # noqa: S311 - chooses test inputs
    error = schema("Error")
    statuses: set[int] = set()
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client:
        for _ in range(NUM_BODIES):
            path = draw.choice(list(NEEDED))
            fields = list(BODIES[path].__struct_fields__)
            body = random_body(draw, fields, NEEDED[path])
            reply = client.post(path, content=json.dumps(body).encode(), headers=JSON)
            statuses.add(reply.status_code)
            assert reply.status_code < 500, (path, body, reply.text)
            if reply.status_code >= 400:
                error.validate(reply.json())
                assert reply.json()["error"]["message"]
            elif "text/event-stream" in reply.headers["content-type"]:
                assert '"error"' not in reply.text, (path, body, reply.text)
    assert {200, 400} <= statuses
    check_integrity(server.llm)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"prompt": NaN}', b"[" * 100_000])
def test_what_is_no_json_object_is_a_400(server: Any, data: bytes) -> None:
    for path in NEEDED:
        reply = httpx.post(server.url + path, content=data, headers=JSON, timeout=PATIENCE_S)
        assert reply.status_code == 400, (path, reply.text)
        assert reply.json()["error"]["code"]


def test_schemathesis_finds_no_reply_that_breaks_the_document(server: Any) -> None:
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, settings

    whole = schemathesis.openapi.from_dict(document(ROUTES))
    for operation in whole.get_all_operations():
        found = operation.ok()

        @given(case=found.as_strategy())
        @settings(
            max_examples=10,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def holds(case: Any) -> None:
            reply = case.call(base_url=server.url, timeout=PATIENCE_S)
            assert reply.status_code < 500, (case.path, case.body, reply.text)

        holds()
