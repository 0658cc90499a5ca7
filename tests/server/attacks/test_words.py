"""Labels, messages and log lines stay bounded whatever text a client sends."""

from __future__ import annotations

import json
import re
import socket
import time
from typing import TYPE_CHECKING, Any

import pytest

from server_process import PATIENCE_S, eventually

if TYPE_CHECKING:
    from server_process import Attacked

MESSAGES = [{"role": "user", "content": "the cat"}]
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": MESSAGES, "max_tokens": 1},
    COMPLETIONS: {"prompt": "the cat", "max_tokens": 1},
    RESPONSES: {"input": "the cat", "max_output_tokens": 1},
    "/v1/loglikelihood": {"context": "the", "continuations": [" cat"]},
    "/v1/label": {"input": "the", "labels": [" cat", " dog"]},
    "/generative_scoring": {"query": "the", "items": [" cat"], "label_token_ids": [5, 6]},
    "/v1/score": {"query": "the", "items": [" cat"], "label_token_ids": [5, 6]},
    "/v1/judge": {"input": "the"},
    "/v1/uncertainty": {"input": "the", "n": 1, "max_tokens": 1},
    "/v1/rerank": {"query": "the", "documents": [" cat"], "template": ["", "{query}{document}", ":"]},
    "/v1/next_token_logprobs": {"prompts": ["the cat"]},
}
LONG = "w" * 200_000
NAMED = {"type": "function", "function": {"name": "b"}}
MAX_BYTES = 4096  # maximum size of an error reply
RUBBISH = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 no request\r\n\r\n"
TIMED = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d")  # start of each log line
UPGRADE = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"


def rejected(server: Attacked) -> dict[str, float]:
    """Return the number of refused requests by label."""
    found = re.findall(rb'logprobe_rejected_total\{param="(.*)"\} (.*)', server.get("/metrics").data)
    return {name.decode(): float(count) for name, count in found}


def test_invented_fields_are_counted_as_other(attacked: Attacked) -> None:
    before = rejected(attacked)
    invented = [letter * 1_000_000 for letter in "abcdefghijklmnopqrst"] + [f"field{n}" for n in range(120)]
    for name in invented:
        assert attacked.post(COMPLETIONS, prompt="the cat", max_tokens=1, **{name: 1}).status == 200
    too_many = dict.fromkeys((f"field{n}" for n in range(120)), 1)
    assert attacked.post(COMPLETIONS, prompt="the cat", **too_many).status == 400
    misspelt = [f"temperatur{letter}" for letter in "abcdf"]
    for name in misspelt:
        assert attacked.post(COMPLETIONS, prompt="the cat", **{name: 1}).status == 400
    message = {"role": "user", "content": "the cat", "mood": "glad"}
    assert attacked.post(CHAT, messages=[message]).status == 400
    assert attacked.post(COMPLETIONS, prompt="the cat", temperature=3).status == 400
    assert attacked.get(f"{RESPONSES}/x/input_items?{'q' * 1000}=1").status == 404
    grown = {name: count - before.get(name, 0) for name, count in rejected(attacked).items()}
    grown = {name: count for name, count in grown.items() if count}
    assert grown == {"other": len(misspelt) + 1, "messages": 1, "temperature": 1}
    assert len(attacked.get("/metrics").data) < 100_000


def test_a_field_of_eight_megabytes_holds_nobody_up(attacked: Attacked) -> None:
    with attacked.watched():
        replies = [attacked.post(COMPLETIONS, **BODIES[COMPLETIONS], **{"temperatur" * 790_000: 1})] * 4
    assert {reply.status for reply in replies} == {200}
    assert all(len(reply.data) < MAX_BYTES for reply in replies)


@pytest.mark.parametrize("name", ["model", "lora"])
def test_names_of_weights_that_are_not_loaded_are_kept_nowhere(attacked: Attacked, name: str) -> None:
    begin, size = len(attacked.log), len(attacked.get("/metrics").data)
    invented = [LONG, *(f"invented-{number}" for number in range(20))]
    for path, body in BODIES.items():
        for word in invented:
            assert attacked.post(path, **body | {name: word}).status in {400, 404}
    num_sent = len(BODIES) * len(invented)
    eventually(lambda: len(attacked.log) >= begin + num_sent, "requests are not logged")
    assert not [line for line in attacked.log[begin:] if len(line) > MAX_BYTES or "invented-" in line]
    figures = attacked.get("/metrics").data
    assert b"invented-" not in figures
    assert len(figures) < size + 10_000  # refusals by route and field, once each


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        *((path, {LONG: 1}) for path in BODIES),
        (COMPLETIONS, {"stream": True, "stream_options": {LONG: 1}}),
        (RESPONSES, {"reasoning": {LONG: 1}}),
        ("/v1/rerank", {"documents": [{"text": "a", LONG: 1}]}),
    ],
)
def test_a_reply_does_not_repeat_a_field_that_was_ignored(
    attacked: Attacked, path: str, fields: dict[str, Any]
) -> None:
    reply = attacked.post(path, **BODIES[path] | fields)
    assert reply.status == 200
    assert LONG[:100].encode() not in reply.data


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        *((path, {"model": LONG}) for path in BODIES),
        *((path, {"lora": LONG}) for path in BODIES),
        (CHAT, {"messages": [MESSAGES[0] | {"role": LONG}]}),
        (CHAT, {"messages": [MESSAGES[0] | {LONG: 1}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", LONG: 1}]}]}),
        (CHAT, {"chat_template_kwargs": {LONG: 1}}),
        (CHAT, {"tools": [{"type": "function", "function": {"name": LONG}}]}),
        (CHAT, {"tools": [{"type": "function", "function": {"name": LONG}}] * 2}),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "a"}, LONG: 1}]}),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": LONG}}}]}),
        (CHAT, {"tools": [{"type": LONG}]}),
        (CHAT, {"tool_choice": LONG}),
        (CHAT, {"tools": [{"type": "function", "function": {"name": LONG}}], "tool_choice": {"name": LONG}}),
        (CHAT, {"tools": [{"type": "function", "function": {"name": LONG}}], "tool_choice": NAMED}),
        (CHAT, {"reasoning_effort": LONG}),
        (COMPLETIONS, {"logprobs_mode": LONG}),
        (COMPLETIONS, {"response_format": {"type": LONG}}),
        (COMPLETIONS, {"response_format": {"type": "regex", "regex": f"({LONG}"}}),
        (COMPLETIONS, {"structured_outputs": {LONG: 1}}),
        (COMPLETIONS, {"guided_grammar": LONG}),
        (COMPLETIONS, {"logits_processors_args": {LONG: 1}}),
        (COMPLETIONS, {"logits_processors_args": {LONG: LONG}}),
        (COMPLETIONS, {"logit_bias": {LONG: 1}}),
        (COMPLETIONS, {"service_tier": LONG}),
        (RESPONSES, {"include": [LONG]}),
        (RESPONSES, {"previous_response_id": LONG}),
        (RESPONSES, {"input": [MESSAGES[0] | {LONG: 1}]}),
        (RESPONSES, {"input": [MESSAGES[0] | {"type": LONG}]}),
        (RESPONSES, {"input": [{"type": "function_call", LONG: 1}]}),
        (RESPONSES, {"input": [{"type": "function_call", "call_id": LONG, "name": LONG, "arguments": LONG}]}),
        (RESPONSES, {"input": [{"type": "function_call_output", "call_id": LONG, "output": "a"}]}),
        (RESPONSES, {"input": [{"type": "reasoning", "content": [{"type": LONG}]}]}),
        (RESPONSES, {"tools": [{"type": "function", "name": "a", LONG: 1}]}),
        (
            RESPONSES,
            {"tools": [{"type": "function", "name": "a"}], "tool_choice": {"type": "function", "name": LONG}},
        ),
        (RESPONSES, {"reasoning": {"effort": LONG}}),
        (RESPONSES, {"text": {"format": {"type": LONG}}}),
        ("/v1/next_token_logprobs", {"dtype": LONG}),
        ("/v1/label", {"correction": LONG}),
        ("/v1/label", {"labels": [LONG, LONG]}),
        ("/v1/label", {"labels": {LONG: LONG, LONG + "s": LONG}}),
        ("/v1/label", {"labels": {LONG: []}}),
        ("/v1/rerank", {"template": [LONG, LONG, LONG]}),
        ("/v1/rerank", {"labels": [LONG, LONG]}),
    ],
)
def test_a_refusal_repeats_no_more_than_a_name_of_what_was_sent(
    attacked: Attacked, path: str, fields: dict[str, Any]
) -> None:
    reply = attacked.post(path, **BODIES[path] | fields)
    assert reply.status in {400, 404}, reply.data[:300]
    assert len(reply.data) < MAX_BYTES
    assert reply.error["message"].isprintable()


@pytest.mark.parametrize(
    ("path", "headers"),
    [
        (f"/v1/models/{'w' * 30_000}", {}),
        (f"/v1/responses/{'w' * 30_000}", {}),
        (f"/v1/responses/{'w' * 30_000}/input_items", {}),
        (f"/{'w' * 30_000}", {}),
        ("/health", {"Host": "w" * 30_000}),
        ("/health", {"Origin": "w" * 30_000}),
    ],
)
def test_nor_does_one_of_a_header(attacked: Attacked, path: str, headers: dict[str, str]) -> None:
    reply = attacked.get(path, **headers)
    assert reply.status in {403, 404}
    assert len(reply.data) < MAX_BYTES


@pytest.mark.parametrize("query", ["after", "limit", "order", "w" * 30_000])
def test_nor_does_one_of_a_query(attacked: Attacked, query: str) -> None:
    stored = json.loads(attacked.post(RESPONSES, **BODIES[RESPONSES]).data)["id"]
    reply = attacked.get(f"{RESPONSES}/{stored}/input_items?{query}={'w' * 30_000}")
    assert reply.status == 400
    assert len(reply.data) < MAX_BYTES


@pytest.mark.parametrize("place", ["bad_words", "think_start", "think_end", "think_stop_sentence"])
def test_texts_that_a_processor_keeps_the_tokens_of_are_words(serve_process: Any, place: str) -> None:
    with serve_process("--logits-processors", "ThinkingBudgetLogitsProcessor") as server:
        server.check_alive()
        statuses = set()
        with server.watched():
            for number in range(40):
                text = f"{number} the cat" * 12_000
                thinks = {"thinking_budget": 1, place: text}
                asked = {"bad_words": [text]} if place == "bad_words" else {"logits_processors_args": thinks}
                statuses.add(server.post(COMPLETIONS, prompt="the cat", max_tokens=1, **asked).status)
        assert statuses == {400}


@pytest.mark.parametrize(
    ("sent", "told"),
    [(RUBBISH, b"HTTP/1.1 400"), (UPGRADE, b"HTTP/1.1 200")],
    ids=["no request", "another protocol"],
)
def test_connections_that_send_rubbish_are_counted_and_logged_now_and_then(
    serve_process: Any, sent: bytes, told: bytes
) -> None:
    with serve_process() as server:
        start, num_links = time.monotonic(), 40
        for _ in range(num_links):
            with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as link:
                link.sendall(sent)
                assert link.recv(1 << 16).startswith(told)
        most_lines = 1 + (time.monotonic() - start) / 10
        figure = rb"logprobe_bad_connections_total (\d+)"
        assert int(re.findall(figure, server.get("/metrics").data)[0]) == num_links
        eventually(lambda: bool(server.log), "nothing is logged")
        lines = [*server.log]
    assert len(lines) <= most_lines, lines
    assert all(TIMED.match(line) and "127.0.0.1" in line for line in lines)


def test_what_the_operator_asked_for_is_logged_with_the_time(serve_process: Any) -> None:
    with serve_process("--enable-log-requests") as server:
        server.check_alive()
        eventually(lambda: bool(server.log), "nothing is logged")
    assert TIMED.match(server.log[0])
    assert "the cat" in server.log[0]
