"""`/v1/responses` with OpenAI's own client."""

from __future__ import annotations

from typing import Any

import openai
import pytest

LOGPROBS: Any = ["message.output_text.logprobs"]


def create(server: Any, client: Any, **options: Any) -> Any:
    asked = {"model": server.service.model_name, "input": "the cat", "max_output_tokens": 12} | options
    return client.responses.create(**asked)


def own(part: Any) -> list[dict[str, Any]]:
    return [row.model_dump() for row in part.logprobs]


def test_the_text_and_rows_are_chats(server: Any, client: Any) -> None:
    reply = create(server, client, include=LOGPROBS, top_logprobs=3, extra_body={"seed": 1})
    messages = [{"role": "user", "content": "the cat"}]
    asked = {"logprobs": True, "top_logprobs": 3, "seed": 1, "max_tokens": 12}
    chat = server.post("/v1/chat/completions", messages=messages, **asked).json()["choices"][0]
    assert reply.output_text == chat["message"]["content"]
    assert own(reply.output[0].content[0]) == chat["logprobs"]["content"]
    assert reply.status == "incomplete"
    assert reply.incomplete_details.reason == "max_output_tokens"
    assert reply.usage.output_tokens == 12


def test_rows_that_were_not_asked_are_an_empty_list(server: Any) -> None:
    reply = server.post("/v1/responses", input="the cat", max_output_tokens=3).json()
    assert reply["output"][0]["content"][0]["logprobs"] == []


def test_a_stream_builds_the_same_response(server: Any, client: Any) -> None:
    asked: dict[str, Any] = {"include": LOGPROBS, "top_logprobs": 2, "extra_body": {"seed": 4}}
    whole = create(server, client, **asked)
    events = list(create(server, client, stream=True, **asked))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == whole.output_text
    assert events[-1].response.output_text == whole.output_text
    expected = own(whole.output[0].content[0])
    assert own(events[-1].response.output[0].content[0]) == expected
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    # The client's event types have no `bytes` field, but keep unknown fields.
    for rows in ([row for event in deltas for row in event.logprobs], done.logprobs):
        assert [row.model_dump() for row in rows] == expected


def test_a_stored_response_can_be_read_continued_and_deleted(server: Any, client: Any) -> None:
    first = create(server, client)
    again = client.responses.retrieve(first.id)
    assert again.output_text == first.output_text
    second = create(server, client, previous_response_id=first.id, input="and the dog")
    talk = [
        {"role": "user", "content": "the cat"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "and the dog"},
    ]
    assert second.usage.input_tokens == len(server.post("/tokenize", messages=talk).json()["tokens"])
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    private = create(server, client, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(private.id)


def test_only_the_latest_are_kept(new_server: Any) -> None:
    with new_server(max_stored=2) as server:
        made = [server.post("/v1/responses", input="a", max_output_tokens=1).json()["id"] for _ in range(3)]
        assert [server.get(f"/v1/responses/{one}").status_code for one in made] == [404, 200, 200]


def test_input_may_be_messages_with_parts_and_instructions(server: Any, client: Any) -> None:
    items = [{"role": "user", "content": [{"type": "input_text", "text": "the cat"}]}]
    plain = create(server, client, instructions="of a dog", extra_body={"seed": 2})
    in_parts = create(server, client, input=items, instructions="of a dog", extra_body={"seed": 2})
    assert in_parts.output_text == plain.output_text
    assert in_parts.usage.input_tokens > create(server, client).usage.input_tokens


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"include": ["file_search_call.results"]}, "include"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"input": []}, "input"),
        ({"input": [{"type": "function_call_output"}]}, "input[0].call_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"reasoning": {"effort": "odd"}}, "reasoning.effort"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"text": {"format": {"type": "nonsense"}}}, "text"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"n": 2}, "n"),
    ],
)
def test_what_cannot_be_done_is_refused_by_field(server: Any, body: dict[str, Any], param: str) -> None:
    reply = server.post("/v1/responses", **{"input": "a", "max_output_tokens": 1} | body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


METADATA = {str(number).ljust(64): "é" * 512 for number in range(16)}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "the cat", "max_output_tokens": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "the cat"}], "max_tokens": 1}),
        ("/v1/completions", {"prompt": "the cat", "max_tokens": 1}),
    ],
)
def test_metadata_is_held_to_openais_bounds(server: Any, path: str, body: dict[str, Any]) -> None:
    reply = server.post(path, metadata=METADATA, **body)
    assert reply.status_code == 200
    assert reply.json().get("metadata", METADATA) == METADATA
    for beyond in (METADATA | {"one more": ""}, {"k" * 65: ""}, {"key": "é" * 513}):
        refused = server.post(path, metadata=beyond, **body)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"].partition("[")[0] == "metadata"


def test_an_unknown_previous_response_is_a_404(server: Any) -> None:
    reply = server.post("/v1/responses", input="a", previous_response_id="resp_none")
    assert reply.status_code == 404
    assert reply.json()["error"]["param"] == "previous_response_id"


def test_what_is_stored_is_bounded_in_bytes_and_the_oldest_go_first(new_server: Any) -> None:
    with new_server(max_stored_bytes=2500) as server:
        ids = [
            server.post("/v1/responses", input="the cat", max_output_tokens=1).json()["id"] for _ in range(4)
        ]
        statuses = [server.get(f"/v1/responses/{response_id}").status_code for response_id in ids]
        assert statuses[0] == 404
        assert statuses[-1] == 200
