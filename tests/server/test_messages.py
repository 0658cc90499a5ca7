"""Chat messages over HTTP, with OpenAI's own client: rendered by the template, or refused."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from server_process import PATIENCE_S

ASK: Any = {"role": "user", "content": "the cat"}
TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL: Any = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
TAKES_TOOLS = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}<{{ call.function.name }}>{% endfor %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def refused(server: Any, path: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    reply = server.post(path, **body)
    assert reply.status_code == 400, reply.text
    error: dict[str, Any] = reply.json()["error"]
    assert error["message"].startswith(str(error["param"]))
    return error


def prompt_of(server: Any, **body: Any) -> str:
    asked = {"messages": [ASK], "max_tokens": 1, "return_token_ids": True} | body
    reply = server.post("/v1/chat/completions", **asked)
    assert reply.status_code == 200, reply.text
    data: bytes = server.llm.text.vocabulary.bytes_of(reply.json()["prompt_token_ids"])
    return data.decode()


@pytest.fixture
def takes_tools(server: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(server.llm.text.tokenizer, "chat_template", TAKES_TOOLS)
    return server


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (ASK | {"name": "Ann"}, "messages[0].name"),
        (ASK | {"mood": "glad"}, "messages[0].mood"),
        ({"role": "tool", "content": "a", "tool_call_id": "c9"}, "messages[0].tool_call_id"),
        ({"role": "user", "content": [{"type": "text", "text": "a", "mood": 1}]}, "messages[0].content.mood"),
    ],
)
def test_what_the_template_passes_over_is_a_400_that_names_it(
    server: Any, message: dict[str, Any], param: str
) -> None:
    assert refused(server, messages=[message])["param"] == param
    assert refused(server, "/tokenize", messages=[message])["param"] == param
    assert refused(server, "/v1/loglikelihood", messages=[message], continuations=[" a"])["param"] == param
    assert refused(server, "/v1/label", messages=[message], labels=[" a"])["param"] == param
    assert refused(server, "/v1/judge", messages=[message])["param"] == param


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (ASK | {"mood": None}, "messages[0].mood"),
        (ASK | {"mo\n": []}, "messages[0].mo\n"),
        ({"role": "user", "content": [{"type": "text", "text": "a", "mood": 0}]}, "messages[0].content.mood"),
        (
            {"role": "assistant", "content": "a", "tool_calls": [CALL | {"mood": 1}]},
            "messages[0].tool_calls[0].mood",
        ),
        (
            {"role": "assistant", "tool_calls": [CALL | {"function": CALL["function"] | {"mood": None}}]},
            "messages[0].tool_calls[0].function.mood",
        ),
    ],
)
def test_an_unknown_field_is_refused_by_name_where_it_says_nothing_too(
    takes_tools: Any, message: dict[str, Any], param: str
) -> None:
    reply = takes_tools.post("/v1/chat/completions", messages=[message], max_tokens=1)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param
    reply = takes_tools.post("/v1/responses", input=[message], max_output_tokens=1)
    assert reply.json()["error"]["param"] == param.replace("messages", "input")


def test_the_empty_fields_of_replies_are_taken(server: Any) -> None:
    names = ("name", "tool_calls", "function_call", "refusal", "audio", "annotations", "parsed", "phase")
    names += ("reasoning", "reasoning_content", "reasoning_details", "provider_specific_fields", "images")
    part = {"type": "text", "text": "the cat", "annotations": [1], "logprobs": [1], "parsed": None}
    said = {"role": "assistant", "content": [part], **dict.fromkeys(names)}
    assert prompt_of(server, messages=[ASK, said]).endswith("assistant: the cat\nassistant:")


def test_the_developer_is_the_system(server: Any, client: openai.OpenAI) -> None:
    said: Any = [{"role": "developer", "content": "be short"}, ASK]
    assert prompt_of(server, messages=said) == "system: be short\nuser: the cat\nassistant:"
    client.chat.completions.create(model="default", messages=said, max_tokens=1)


def test_tools_go_to_templates_that_take_them(takes_tools: Any, client: openai.OpenAI) -> None:
    assert prompt_of(takes_tools, tools=[TOOL], tool_choice="auto").startswith("[look]user: the cat")
    said: Any = [ASK, {"role": "assistant", "tool_calls": [CALL]}]
    said.append({"role": "tool", "tool_call_id": "c1", "content": "a dog"})
    assert "assistant: <look>\ntool: a dog\n" in prompt_of(takes_tools, messages=said, tools=[TOOL])
    reply = client.chat.completions.create(model="default", messages=said, tools=[TOOL], max_tokens=2)
    assert reply.choices[0].message.tool_calls is None
    for choice in ("required", {"type": "function", "function": {"name": "look"}}):
        error = refused(takes_tools, messages=[ASK], tools=[TOOL], tool_choice=choice)
        assert error["param"] == "tool_choice"
    error = refused(takes_tools, messages=[ASK], tools=[TOOL], parallel_tool_calls=False)
    assert error["param"] == "parallel_tool_calls"


def test_tools_are_said_where_the_template_takes_none(server: Any) -> None:
    ids = server.post("/tokenize", messages=[ASK], tools=[TOOL]).json()["tokens"]
    prompt = server.llm.text.vocabulary.bytes_of(ids).decode()
    assert prompt.startswith("system: # Tools\n")
    assert prompt.endswith("</tool_call>\nuser: the cat\nassistant:")


def test_an_assistants_message_is_continued(server: Any, client: openai.OpenAI) -> None:
    begun: Any = [ASK, {"role": "assistant", "content": "the dog and"}]
    layout = {"continue_final_message": True, "add_generation_prompt": False}
    whole = "user: the cat\nassistant: the dog and"
    assert prompt_of(server, messages=begun, **layout) == whole
    tokens = server.post("/tokenize", messages=begun, **layout).json()["tokens"]
    assert server.llm.text.vocabulary.bytes_of(tokens).decode() == whole
    reply = client.chat.completions.create(
        model="default", messages=begun, max_tokens=4, temperature=0, extra_body=layout
    )
    ids = server.llm.text.encode(whole, add_special_tokens=False).tolist()
    text = server.post("/v1/completions", prompt=ids, max_tokens=4, temperature=0).json()["choices"][0][
        "text"
    ]
    assert reply.choices[0].message.content == text
    error = refused(server, messages=begun, continue_final_message=True, add_generation_prompt=True)
    assert error["param"] == "continue_final_message"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/v1/loglikelihood"])
def test_whitespace_that_a_template_trims_of_a_continued_message_is_a_400(
    server: Any, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    trims = server.llm.text.tokenizer.chat_template.replace("message.content", "message.content | trim")
    monkeypatch.setattr(server.llm.text.tokenizer, "chat_template", trims)
    begun = [ASK, {"role": "assistant", "content": "the dog and "}]
    more = {"continuations": ["the cat"]} if path == "/v1/loglikelihood" else {}
    error = refused(server, path, messages=begun, continue_final_message=True, **more)
    assert error["param"] == "messages[1].content"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": [ASK | {"name": "Ann"}]}, "input[0].name"),
        ({"input": [ASK, {"role": "user", "content": 5}], "instructions": "be short"}, "input[1].content"),
        ({"input": [ASK, {"content": "a"}]}, "input[1].role"),
        ({"input": [{"type": "function_call", "name": "look"}]}, "input[0].call_id"),
        ({"input": []}, "input"),
        ({"input": "the cat " * 2000}, "input"),
        ({"input": [ASK | {"content": "the cat " * 2000}]}, "input"),
    ],
)
def test_errors_of_responses_name_the_input(server: Any, body: dict[str, Any], param: str) -> None:
    assert refused(server, "/v1/responses", **body)["param"] == param


def test_errors_of_a_continued_response_name_the_field_that_said_it(server: Any) -> None:
    first = server.post("/v1/responses", input="the cat", max_output_tokens=1).json()["id"]
    asked = {"previous_response_id": first, "max_output_tokens": 1}
    error = refused(server, "/v1/responses", input=[ASK | {"name": "Ann"}], **asked)
    assert error["param"] == "input[0].name"


def test_what_a_response_answered_can_be_listed(server: Any, client: openai.OpenAI) -> None:
    first = client.responses.create(
        model="default", input="the cat", max_output_tokens=1, instructions="be short"
    )
    second = client.responses.create(
        model="default",
        input=[{"role": "user", "content": [{"type": "input_text", "text": "and the dog"}]}],
        max_output_tokens=1,
        previous_response_id=first.id,
    )
    listed = list(client.responses.input_items.list(second.id, order="asc"))
    texts: list[Any] = [item.content[0].text for item in listed]  # type: ignore[union-attr]
    assert texts == ["the cat", first.output_text, "and the dog"]
    assert [item.role for item in listed] == ["user", "assistant", "user"]  # type: ignore[union-attr]
    page = client.responses.input_items.list(second.id, limit=2)
    assert [item.id for item in page.data] == [item.id for item in listed[:0:-1]]
    assert page.has_more
    assert len(list(client.responses.input_items.list(second.id, limit=1))) == 3  # page by page
    for query, param in {
        "limit=0": "limit",
        "order=up": "order",
        "after=x": "after",
        "page=1": "page",
    }.items():
        reply = server.get(f"/v1/responses/{second.id}/input_items?{query}")
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == param
    assert server.get("/v1/responses/none/input_items").status_code == 404


def test_a_responses_own_message_comes_back_as_input(client: openai.OpenAI) -> None:
    include: Any = ["message.output_text.logprobs"]
    first = client.responses.create(model="default", input="the cat", max_output_tokens=2, include=include)
    said: Any = [ASK, *(item.model_dump() for item in first.output), {"role": "user", "content": "and"}]
    again = client.responses.create(model="default", input=said, max_output_tokens=2)
    assert again.usage is not None
    assert first.usage is not None
    assert again.usage.input_tokens > first.usage.input_tokens


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("logit_bias", {"5": -100, "6": 100}, {"5": 100.5}),
        ("service_tier", "auto", "flex"),
        ("service_tier", "default", "cheap"),
    ],
)
def test_openais_own_bounds_hold(capped_server: Any, path: str, field: str, good: Any, bad: Any) -> None:
    asked: dict[str, Any] = {"max_tokens": 1}
    asked |= {"messages": [ASK]} if "chat" in path else {"prompt": "the cat"}
    assert capped_server.post(path, **asked, **{field: good}).status_code == 200
    assert refused(capped_server, path, **asked, **{field: bad})["param"] == field


def test_how_many_stops_are_taken_is_the_operators_to_say(new_server: Any) -> None:
    asked = {"prompt": "a", "max_tokens": 1}
    with new_server(max_stop=5) as server:
        assert server.get("/v1/capabilities").json()["limits"]["max_stop"] == 5
        assert server.post("/v1/completions", **asked, stop=list("abcde")).status_code == 200
        assert refused(server, "/v1/completions", **asked, stop=list("abcdef"))["param"] == "stop"


def test_every_reply_has_an_id_also_a_refusal_and_a_stream(server: Any, client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(model="default", messages=[ASK], max_tokens=1)
    ids = [raw.headers["x-request-id"], raw.parse()._request_id]
    assert ids[0] == ids[1]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="default", messages=[ASK | {"name": "Ann"}], max_tokens=1)
    ids.append(caught.value.request_id)
    replies = (
        server.get("/health"),
        server.get("/nowhere"),
        server.post("/v1/chat/completions", messages=[ASK], max_tokens=1, stream=True),
        httpx.get(server.url + "/health", headers={"Host": "elsewhere.example"}, timeout=PATIENCE_S),
        httpx.get(server.url + "/health", headers={"Origin": "http://elsewhere.example"}, timeout=PATIENCE_S),
        httpx.request("OPTIONS", server.url + "/v1/models", timeout=PATIENCE_S),
    )
    ids += [reply.headers["x-request-id"] for reply in replies]
    assert all(ids)
    assert len(set(ids)) == len(ids) - 1


def test_control_characters_of_a_field_name_are_quoted_as_escapes(new_server: Any) -> None:
    with new_server(strict_fields=True) as server:
        error = server.post("/v1/completions", **{"prompt": "a", "\x1f\n": 1}).json()["error"]
    assert error["message"] == r"\x1f\n: unknown field"
    assert error["param"] == "\x1f\n"
