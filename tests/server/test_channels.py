"""Reasoning and tool calls over HTTP with their rows: whole, streamed, sent back, and by request."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from logprobe.errors import ParameterError
from logprobe.server.app import ROUTES
from logprobe.server.openai.ignored_fields import warning
from logprobe.server.openai.openapi import document
from refusals import raises

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
ASK: Any = {"role": "user", "content": "the cat"}
TALKS = (
    "{% for tool in tools or [] %}[{{ tool.function | tojson }}]{% endfor %}"
    "{% if reasoning_effort is defined %}({{ reasoning_effort }}){% endif %}"
    "{% for m in messages %}{{ m.role }}: "
    "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)
LOOK: dict[str, Any] = {
    "name": "look",
    "parameters": {
        "type": "object",
        "properties": {"at": {"enum": ["a", "b"]}, "far": {"type": "boolean"}},
        "required": ["at", "far"],
        "additionalProperties": False,
    },
}
TOOLS: Any = [{"type": "function", "function": LOOK}, {"type": "function", "function": {"name": "wait"}}]
STRICT: Any = [{**tool, "function": tool["function"] | {"strict": True}} for tool in TOOLS]
FLAT: Any = [{"type": "function", **LOOK}, {"type": "function", "name": "wait"}]

THOUGHT, SAID = "the cat\nand é🐈", "the dog"
CALLS = ('{"name": "look", "arguments": {"at": "a", "far": true}}', '{"name": "wait", "arguments": {}}')
TEXT = f"<think>\n{THOUGHT}\n</think>\n\n{SAID}\n" + "\n".join(
    f"<tool_call>\n{call}\n</tool_call>" for call in CALLS
)


def forced(*texts: str) -> dict[str, Any]:
    """Return request fields that force a model to write one of some texts."""
    return {"response_format": {"type": "choice", "choice": list(texts)}}


ASKED: dict[str, Any] = {
    "messages": [ASK],
    "tools": TOOLS,
    "max_tokens": 400,
    "logprobs": True,
    "top_logprobs": 2,
    "seed": 1,
    **forced(TEXT),
}


@pytest.fixture(scope="module")
def plain(long_llm: Any, serve_llm: Any) -> Any:
    """A model whose chat template has neither reasoning nor tools."""
    with serve_llm(long_llm) as running:
        yield running


@pytest.fixture
def talks(plain: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The same model with a template that has both."""
    monkeypatch.setattr(plain.llm.text.tokenizer, "chat_template", TALKS)
    return plain


def ok(reply: Any) -> dict[str, Any]:
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def warm(server: Any, asked: dict[str, Any]) -> None:
    """Cache the prompt: its last token computed alone may change the last bits of the first row."""
    ok(server.post(CHAT, **asked | {"max_tokens": 1}))


def choice_of(server: Any, **asked: Any) -> dict[str, Any]:
    (choice,) = ok(server.post(CHAT, **ASKED | asked))["choices"]
    return dict(choice)


def events(server: Any, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    reply = server.post(path, **body | {"stream": True})
    assert reply.status_code == 200, reply.text
    return [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]


def own_bytes(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(bytes(row["bytes"]) for row in rows)


def folded(chunks: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """Merge a stream's chunks into a choice in the form of a whole reply."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "refusal": None}
    logprobs: dict[str, Any] = {"content": [], "refusal": None}
    found: dict[str, Any] = {"index": index, "message": message, "logprobs": logprobs}
    for choice in (one for chunk in chunks for one in chunk["choices"] if one["index"] == index):
        delta, rows = choice.pop("delta"), choice.pop("logprobs") or {}
        for name in ("content", "reasoning_content", "reasoning"):
            if name in delta:
                message[name] = message.get(name, "") + delta[name]
        for call in delta.get("tool_calls", []):
            assert call.pop("index") == len(message.setdefault("tool_calls", []))
            message["tool_calls"].append(call)
        for name, values in rows.items():
            logprobs[name] = None if values is None else [*logprobs.get(name, []), *values]
        for name, value in choice.items():
            if name in {"token_ids", "explain"}:
                found[name] = [*found.get(name, []), *value]
            elif (
                name in {"fields", "tool_call_fields"}
                or (name == "finish_reason" and value)
                or name == "stop_reason"
            ):
                found[name] = value
    if "tool_calls" in message:
        message["content"] = message["content"] or None
    return found


def without_ids(choice: dict[str, Any]) -> dict[str, Any]:
    """Return a choice without its calls' ids, which differ between replies."""
    for call in choice["message"].get("tool_calls", []):
        assert call.pop("id").startswith("call_")
    return choice


# -- chat ----------------------------------------------------------------------------------------------------


def test_each_part_of_a_reply_comes_as_what_it_is_with_the_rows_of_its_text(talks: Any) -> None:
    choice = choice_of(talks)
    message, rows = choice["message"], choice["logprobs"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["content"] == SAID == own_bytes(rows["content"]).decode()
    assert (
        message["reasoning"]
        == message["reasoning_content"]
        == THOUGHT
        == own_bytes(rows["reasoning"]).decode()
    )
    called = [call["function"] for call in message["tool_calls"]]
    assert [(call["name"], json.loads(call["arguments"])) for call in called] == [
        ("look", {"at": "a", "far": True}),
        ("wait", {}),
    ]
    assert [own_bytes(one).decode() for one in rows["tool_calls"]] == [*CALLS]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert all(len(row["top_logprobs"]) == 2 for one in rows["tool_calls"] for row in one)


def test_the_rows_are_those_of_the_same_tokens_unsplit(talks: Any) -> None:
    split = choice_of(talks, return_token_ids=True)
    whole = ok(
        talks.post(
            "/v1/completions",
            prompt=prompt_of(talks, tools=TOOLS),
            max_tokens=400,
            logprobs=0,
            seed=1,
            **forced(TEXT),
        )
    )
    every = whole["choices"][0]["logprobs"]["token_logprobs"]
    rows = split["logprobs"]
    told = [*rows["reasoning"], *rows["content"], *(row for one in rows["tool_calls"] for row in one)]
    texts = whole["choices"][0]["logprobs"]["tokens"]
    left = iter(zip(texts, every, strict=True))
    for row in told:  # in order, without markers; prefixes are computed in other steps there
        assert any(
            text == row["token"] and math.isclose(logprob, row["logprob"], abs_tol=1e-3)
            for text, logprob in left
        )


def prompt_of(server: Any, **body: Any) -> list[int]:
    ids: list[int] = ok(server.post("/tokenize", messages=[ASK], **body))["tokens"]
    return ids


EXTRAS: dict[str, Any] = {
    "logprobs_mode": "both",
    "entropy": True,
    "logprob_token_ids": [5, 6],
    "return_token_ids": True,
    "explain": True,
    "field_logprobs": True,
}


def test_further_columns_are_parallel_to_their_rows(talks: Any) -> None:
    choice = choice_of(talks, **EXTRAS)
    rows = choice["logprobs"]
    for channel, before in (("content", ""), ("reasoning", "reasoning_")):
        assert len(rows[channel]) == len(rows[f"processed_{channel}"])
        for name in ("entropy", "given", "log_kept_mass"):
            assert len(rows[f"{before}{name}"]) == len(rows[channel])
    for name in (
        "processed_tool_calls",
        "tool_calls_entropy",
        "tool_calls_given",
        "tool_calls_log_kept_mass",
    ):
        assert [len(one) for one in rows[name]] == [len(one) for one in rows["tool_calls"]]
    assert len(choice["token_ids"]) == len(choice["explain"]) > sum(map(len, rows["tool_calls"]))


@pytest.mark.parametrize("extras", [{}, EXTRAS], ids=["plain", "extended"])
def test_a_stream_that_is_cut_anywhere_joins_to_the_whole_reply(talks: Any, extras: dict[str, Any]) -> None:
    for max_tokens in range(1, 230, 27 if extras else 11):
        asked = ASKED | extras | {"max_tokens": max_tokens}
        (whole,) = ok(talks.post(CHAT, **asked))["choices"]
        assert without_ids(folded(events(talks, CHAT, asked))) == without_ids(whole), max_tokens
        ends = "tool_calls" if whole["message"].get("tool_calls") else "stop"
        assert whole["finish_reason"] in {"length", ends}


@pytest.mark.parametrize("stop", ["\n", "</think>", "and", '"far"', "<tool_call>", "dog"])
def test_a_stop_string_ends_a_stream_as_it_ends_the_whole_reply(talks: Any, stop: str) -> None:
    asked = ASKED | {"stop": stop}
    (whole,) = ok(talks.post(CHAT, **asked))["choices"]
    assert without_ids(folded(events(talks, CHAT, asked))) == without_ids(whole)
    assert whole["finish_reason"] in {"stop", "tool_calls"}
    for channel, text in (("reasoning", "reasoning_content"), ("content", "content")):
        if channel in whole["logprobs"]:
            assert own_bytes(whole["logprobs"][channel]).decode() == whole["message"].get(text, "")


def test_several_choices_are_split_each_by_itself(talks: Any) -> None:
    texts = (TEXT, "<think>and</think>the dog", "the dog", f"<tool_call>\n{CALLS[1]}\n</tool_call>")
    asked = ASKED | {"n": 4, "temperature": 2, "seed": 5} | forced(*texts)
    warm(talks, asked)
    whole = ok(talks.post(CHAT, **asked))["choices"]
    assert len({json.dumps(without_ids(choice)["message"]) for choice in whole}) > 1
    chunks = events(talks, CHAT, asked)
    for choice in whole:
        assert without_ids(folded(chunks, choice["index"])) == choice
    assert {choice["finish_reason"] for choice in whole} <= {"stop", "tool_calls"}


def test_calls_alone_have_no_content_and_no_reasoning_has_no_field(talks: Any) -> None:
    choice = choice_of(talks, **forced(f"<tool_call>\n{CALLS[0]}\n</tool_call>"))
    assert choice["message"]["content"] is None
    assert choice["logprobs"]["content"] == []
    assert "reasoning" not in choice["message"]
    assert set(choice["logprobs"]) == {"content", "refusal", "tool_calls"}
    said = choice_of(talks, **forced("the dog"))
    assert set(said["message"]) == {"role", "content", "refusal"}
    assert set(said["logprobs"]) == {"content", "refusal"}
    assert said["finish_reason"] == "stop"
    assert choice_of(talks, logprobs=None, top_logprobs=None)["logprobs"] is None


def test_what_is_no_call_stays_content(talks: Any) -> None:
    for text in ("<tool_call>\nthe cat\n</tool_call>", '<tool_call>\n{"name": "look", "arguments": {'):
        choice = choice_of(talks, **forced(text))
        assert choice["message"]["content"] == text == own_bytes(choice["logprobs"]["content"]).decode()
        assert "tool_calls" not in choice["message"]


def test_without_tools_and_with_none_of_them_nothing_is_a_call(talks: Any) -> None:
    text = f"<tool_call>\n{CALLS[1]}\n</tool_call>"
    for asked in ({"tools": None}, {"tool_choice": "none"}):
        choice = choice_of(talks, **asked, **forced(f"<think>and</think>{text}"))
        assert choice["message"]["content"] == text
        assert choice["message"]["reasoning"] == "and"
    bare = ok(talks.post(CHAT, **ASKED | {"tool_choice": "none"}))["usage"]["prompt_tokens"]
    assert bare == len(prompt_of(talks)) < len(prompt_of(talks, tools=TOOLS))


def test_a_model_that_neither_reasons_nor_is_given_tools_answers_as_ever(plain: Any) -> None:
    choice = choice_of(plain, tools=None)
    assert choice["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    assert set(choice["logprobs"]) == {"content", "refusal"}


def test_fields_of_arguments_are_the_rows_of_their_tokens(talks: Any) -> None:
    choice = choice_of(talks, field_logprobs=True, logprobs_mode="both")
    look, wait = choice["tool_call_fields"]
    rows = choice["logprobs"]["tool_calls"][0]
    assert {field["pointer"]: field.get("value") for field in look} == {"": None, "/at": "a", "/far": True}
    for field in look[1:]:
        start, stop = field["tokens"]
        assert field["logprob"] == pytest.approx(
            math.fsum(row["logprob"] for row in rows[start:stop]), abs=1e-4
        )
        assert "processed_logprob" in field
        assert json.dumps(field["value"]).strip('"').encode() in own_bytes(rows[start:stop])
    assert [field["pointer"] for field in wait] == [""]
    assert choice["fields"] is None, "the content is no JSON"
    told = choice_of(talks, field_logprobs=True, **forced('<think>{}</think>\n{"the": "dog"}'))
    assert [field["pointer"] for field in told["fields"]] == ["", "/the"]
    start, stop = told["fields"][1]["tokens"]
    assert b"dog" in own_bytes(told["logprobs"]["content"][start:stop])


# -- tool_choice ---------------------------------------------------------------------------------------------


def test_members_of_a_reply_that_may_hold_more_than_content(talks: Any) -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"the": {"enum": ["dog", "cat"]}},
        "required": ["the"],
    }
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    asked = {"field_logprobs": "members", "response_format": form}
    choice = choice_of(talks, **asked)
    assert "reasoning" not in choice["message"]
    said = json.loads(choice["message"]["content"])["the"]
    whole, field = choice["fields"]
    assert whole["members"] is None
    assert [member["value"] for member in field["members"]] == ["dog", "cat"]
    assert field["value"] == said != field["runner_up"]["value"]
    told = folded(events(talks, CHAT, ASKED | asked))["fields"]
    assert [one["pointer"] for one in told] == ["", "/the"]
    assert [one["value"] for one in told[1]["members"]] == ["dog", "cat"]
    wanted = {"field_logprobs": "members", "tool_choice": "required", "response_format": None}
    refused = talks.post(CHAT, **ASKED | wanted)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "field_logprobs")


@pytest.mark.parametrize("template", ["plain", "talks"])
@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ({"tool_choice": "required", "parallel_tool_calls": False}, {"look", "wait"}),
        ({"tool_choice": {"type": "function", "function": {"name": "look"}}}, {"look"}),
        ({"tool_choice": {"type": "function", "name": "wait"}}, {"wait"}),
    ],
)
def test_a_call_that_is_wanted_comes_and_holds_to_its_schema(
    request: pytest.FixtureRequest, template: str, asked: dict[str, Any], names: set[str]
) -> None:
    server = request.getfixturevalue(template)
    choice = choice_of(server, response_format=None, temperature=1, **asked)
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] in names
    said = json.loads(call["function"]["arguments"])
    assert said == {} if call["function"]["name"] == "wait" else said["at"] in {"a", "b"}
    (rows,) = choice["logprobs"]["tool_calls"]
    assert json.loads(own_bytes(rows)) == {"name": call["function"]["name"], "arguments": said}
    assert choice["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "name": "look"}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "leap"}}}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "look", "mood": 1}}, "tool_choice"),
        ({"tool_choice": "required", "tools": None}, "tool_choice"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools[2].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": 1}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [TOOLS[0] | {"mood": 1}]}, "tools[0].mood"),
        ({"reasoning_effort": "some"}, "reasoning_effort"),
        ({"reasoning_effort": "none", "enable_thinking": True}, "enable_thinking"),
        ({"chat_template_kwargs": {"enable_thinking": True}, "enable_thinking": False}, "enable_thinking"),
        ({"chat_template_kwargs": {"mood": 1}}, "chat_template_kwargs.mood"),
        ({"functions": [{}]}, "functions"),
        ({"field_logprobs": True, "logprobs": False, "top_logprobs": None}, "field_logprobs"),
    ],
)
def test_what_cannot_be_asked_is_a_400_that_names_the_field(
    talks: Any, asked: dict[str, Any], param: str
) -> None:
    reply = talks.post(CHAT, **ASKED | asked)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
def test_a_wanted_call_beside_another_form_is_a_400_that_names_both(talks: Any, choice: Any) -> None:
    forms: list[tuple[str, dict[str, Any]]] = [
        ("response_format", {}),
        ("guided_regex", {"response_format": None, "guided_regex": "a"}),
        ("structured_outputs.json", {"response_format": None, "structured_outputs": {"json": {}}}),
    ]
    for name, form in forms:
        error = talks.post(CHAT, **ASKED | form | {"tool_choice": choice}).json()["error"]
        assert error["param"] == "tool_choice"
        assert name in error["message"]
    error = talks.post(RESPONSES, **INPUT | {"tool_choice": "required"}).json()["error"]
    assert error["param"] == "tool_choice"
    assert "text" in error["message"]


def test_a_schema_that_no_grammar_can_hold_is_a_400_that_names_the_tools(talks: Any) -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "a",
            "parameters": {"type": "object", "properties": {"b": {"$ref": "#/none"}}, "required": ["b"]},
        },
    }
    asked = ASKED | {"tools": [tool], "tool_choice": "required", "response_format": None}
    reply = talks.post(CHAT, **asked)
    assert (reply.status_code, reply.json()["error"]["param"].partition("[")[0]) == (400, "tools")


def test_a_model_whose_calls_are_unknown_keeps_them_as_text(long_llm: Any, serve_llm: Any) -> None:
    template = "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}{{ messages[0].content }}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_llm.text.tokenizer, "chat_template", template)
        with serve_llm(long_llm) as server:
            assert choice_of(server)["message"]["content"] == TEXT
            reply = server.post(CHAT, **ASKED | {"tool_choice": "required", "response_format": None})
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tool_choice")
            assert server.get("/v1/capabilities").json()["reply_form"] is None


# -- reasoning options ---------------------------------------------------------------------------------------


def warnings_of(reply: Any) -> list[str]:
    assert reply.status_code == 200, reply.text
    return [value for name, value in reply.headers.multi_items() if name == "warning"]


def test_how_to_reason_goes_to_a_template_that_reads_it(talks: Any) -> None:
    def laid_out(**asked: Any) -> str:
        reply = talks.post(CHAT, messages=[ASK], max_tokens=1, return_token_ids=True, **asked)
        assert warnings_of(reply) == []
        data: bytes = talks.llm.text.vocabulary.bytes_of(reply.json()["prompt_token_ids"])
        return data.decode()

    bare = "user: the cat\nassistant:"
    assert laid_out() == laid_out(enable_thinking=True) == bare
    assert laid_out(reasoning_effort="high") == f"(high){bare}"
    assert laid_out(enable_thinking=False) == f"{bare}<think></think>"
    assert laid_out(chat_template_kwargs={"enable_thinking": False}) == f"{bare}<think></think>"
    assert laid_out(reasoning_effort="none") == f"(none){bare}<think></think>"
    assert laid_out(reasoning_effort="none", enable_thinking=False) == f"(none){bare}<think></think>"


@pytest.mark.parametrize(
    ("path", "asked", "names"),
    [
        (CHAT, {"reasoning_effort": "high"}, ["reasoning_effort"]),
        (
            CHAT,
            {"reasoning_effort": "none", "enable_thinking": True},
            ["reasoning_effort", "enable_thinking"],
        ),
        (
            CHAT,
            {"chat_template_kwargs": {"enable_thinking": False}},
            ["chat_template_kwargs.enable_thinking"],
        ),
        (
            RESPONSES,
            {"reasoning": {"effort": "low", "summary": "auto"}},
            ["reasoning.summary", "reasoning.effort"],
        ),
        (RESPONSES, {"include": ["reasoning.encrypted_content"]}, ["include.reasoning.encrypted_content"]),
        (RESPONSES, {"reasoning": {}}, []),
        (RESPONSES, {"enable_thinking": True}, ["enable_thinking"]),
        (
            CHAT,
            {"tools": [{"type": "function", "function": LOOK | {"strict": True}}]},
            ["tools.function.strict"],
        ),
        (RESPONSES, {"tools": [FLAT[0] | {"strict": True}]}, ["tools.strict"]),
        (RESPONSES, {"tools": [FLAT[0] | {"strict": True}], "tool_choice": "none"}, []),
    ],
)
def test_what_the_template_does_not_read_is_taken_and_told(
    plain: Any, path: str, asked: dict[str, Any], names: list[str]
) -> None:
    body = (
        {"messages": [ASK], "max_tokens": 1} if path == CHAT else {"input": "the cat", "max_output_tokens": 1}
    )
    assert warnings_of(plain.post(path, **body | asked)) == [warning(name) for name in names]


def test_an_effort_that_turns_reasoning_off_has_an_effect_where_a_template_knows_that_alone(
    long_llm: Any, serve_llm: Any
) -> None:
    template = "{{ messages[0].content }}{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(long_llm.text.tokenizer, "chat_template", template)
        with serve_llm(long_llm) as server:
            for effort, names in (("none", []), ("high", ["reasoning_effort"])):
                reply = server.post(CHAT, messages=[ASK], max_tokens=1, reasoning_effort=effort)
                assert warnings_of(reply) == [warning(name) for name in names]


def test_a_replys_own_message_comes_back(talks: Any) -> None:
    said = choice_of(talks)["message"]
    first, second = said["tool_calls"]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "the dog"} for call in (first, second)]
    reply = talks.post(CHAT, **ASKED | {"messages": [ASK, said, *results]})
    assert warnings_of(reply) == [warning("messages.reasoning_content")]
    begun = {
        "continue_final_message": True,
        "messages": [ASK, {"role": "assistant", "content": "and", "reasoning": "the cat"}],
    }
    reply = talks.post(CHAT, **ASKED | begun | {"return_token_ids": True, "tools": None} | forced("x"))
    assert warnings_of(reply) == []
    data = talks.llm.text.vocabulary.bytes_of(reply.json()["prompt_token_ids"])
    assert data.decode() == "user: the cat\nassistant: <think>the cat</think>and"


def test_what_was_thought_since_the_last_question_goes_along_where_earlier_thoughts_are_left_out(
    plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = (
        "{% set at = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set at.last = loop.index0 %}{% endif %}{% endfor %}"
        + TALKS.replace("and loop.last", "and loop.index0 > at.last")
    )
    monkeypatch.setattr(plain.llm.text.tokenizer, "chat_template", template)
    call = {"id": "c1", "type": "function", "function": {"name": "wait", "arguments": "{}"}}
    said: list[dict[str, Any]] = [
        ASK,
        {"role": "assistant", "content": "a", "reasoning_content": "once"},
        ASK,
        {"role": "assistant", "content": None, "reasoning": "now", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "b"},
    ]
    for messages, names in ((said, ["messages.reasoning_content"]), (said[2:], [])):
        reply = plain.post(CHAT, messages=messages, max_tokens=1, return_token_ids=True)
        assert warnings_of(reply) == [warning(name) for name in names]
        laid_out = plain.llm.text.vocabulary.bytes_of(reply.json()["prompt_token_ids"]).decode()
        assert "<think>now</think>" in laid_out
        assert "once" not in laid_out


def test_tools_calls_and_results_are_texts_where_the_template_takes_none(plain: Any) -> None:
    said = choice_of(plain)["message"]
    assert [call["function"]["name"] for call in said["tool_calls"]] == ["look", "wait"]
    assert said["content"].endswith(SAID), "this template has no marks of reasoning"
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "the dog"} for call in said["tool_calls"]
    ]
    reply = ok(plain.post(CHAT, **ASKED | {"messages": [ASK, said, *results], "return_token_ids": True}))
    laid_out = plain.llm.text.vocabulary.bytes_of(reply["prompt_token_ids"]).decode()
    assert "<tools>" in laid_out
    assert laid_out.count("<tool_response>") == 2


def test_a_call_without_arguments_may_have_no_row(plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = TALKS.replace("assistant:", "assistant:{# <arg_key> #}")
    monkeypatch.setattr(plain.llm.text.tokenizer, "chat_template", opened)
    asked = {**ASKED, **forced("<tool_call>wait\n</tool_call>\n<tool_call>wait\n</tool_call>")}
    whole = choice_of(plain, **asked)
    calls = [call["function"] for call in whole["message"]["tool_calls"]]
    assert calls == [{"name": "wait", "arguments": "{}"}] * 2
    assert whole["logprobs"]["tool_calls"] == [[], []]
    streamed = folded(events(plain, CHAT, asked))
    assert without_ids(streamed)["message"] == without_ids(whole)["message"]


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_a_form_is_the_contents_where_the_prompt_has_opened_a_reasoning(
    path: str, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = TALKS.replace("assistant:", "assistant:<think>")
    monkeypatch.setattr(plain.llm.text.tokenizer, "chat_template", opened)
    schema = {"enum": ["the cat"]}
    if path == CHAT:
        form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        asked: Any = {"messages": [ASK], "max_tokens": 40, "logprobs": True, "response_format": form}
        message = ok(plain.post(path, **asked))["choices"][0]["message"]
        assert (message["content"], "reasoning" in message) == ('"the cat"', False)
        thought = ok(plain.post(path, messages=[ASK], max_tokens=5))["choices"][0]["message"]
        assert thought["reasoning"], "without a form it goes on"
    else:
        text = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
        [item] = ok(plain.post(path, input="the cat", max_output_tokens=40, text=text))["output"]
        assert (item["type"], item["content"][0]["text"]) == ("message", '"the cat"')


# -- responses -----------------------------------------------------------------------------------------------

INPUT: dict[str, Any] = {
    "input": "the cat",
    "tools": FLAT,
    "max_output_tokens": 400,
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 2,
    "seed": 1,
    "text": {"format": {"type": "choice", "choice": [TEXT]}},
}


def response_of(server: Any, **asked: Any) -> dict[str, Any]:
    return ok(server.post(RESPONSES, **INPUT | asked))


def same(response: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the output without its ids."""
    return [
        {name: value for name, value in item.items() if name not in {"id", "call_id"}}
        for item in response["output"]
    ]


def test_a_response_has_an_item_of_each_part_with_chats_rows(talks: Any) -> None:
    response, chat = response_of(talks), choice_of(talks)
    thought, said, *calls = response["output"]
    assert [item["type"] for item in response["output"]] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    assert thought["content"][0]["text"] == THOUGHT
    assert thought["summary"] == []
    assert said["content"][0]["text"] == SAID
    assert thought["content"][0]["logprobs"] == chat["logprobs"]["reasoning"]
    assert said["content"][0]["logprobs"] == chat["logprobs"]["content"]
    assert [call["logprobs"] for call in calls] == chat["logprobs"]["tool_calls"]
    assert [call["name"] for call in calls] == ["look", "wait"]
    assert json.loads(calls[0]["arguments"]) == {"at": "a", "far": True}
    assert len({item["id"] for item in response["output"]}) == 4
    assert response["status"] == "completed"
    used = response["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert used == len(chat["logprobs"]["reasoning"])
    assert response["tools"] == FLAT
    assert response["tool_choice"] == "auto"
    assert response["parallel_tool_calls"] is True


def test_rows_and_fields_come_where_they_were_asked_for(talks: Any) -> None:
    thought, said, call, _ = response_of(talks, include=None, top_logprobs=None)["output"]
    assert "logprobs" not in thought["content"][0]
    assert "logprobs" not in call
    assert said["content"][0]["logprobs"] == []
    both = response_of(talks, logprobs_mode="both", field_logprobs=True)["output"]
    assert len(both[0]["content"][0]["processed_logprobs"]) == len(both[0]["content"][0]["logprobs"])
    assert both[1]["content"][0]["fields"] is None
    assert [field["pointer"] for field in both[2]["fields"]] == ["", "/at", "/far"]
    told = response_of(
        talks, tools=None, field_logprobs=True, text={"format": {"type": "choice", "choice": ['{"the": 1}']}}
    )
    assert [field["pointer"] for field in told["output"][0]["content"][0]["fields"]] == ["", "/the"]


@pytest.mark.parametrize(
    "extras", [{}, {"logprobs_mode": "both", "field_logprobs": True}], ids=["plain", "extended"]
)
def test_events_build_the_same_response_cut_anywhere(talks: Any, extras: dict[str, Any]) -> None:
    for max_tokens in range(1, 230, 31):
        asked = INPUT | extras | {"max_output_tokens": max_tokens}
        talks.service.engine.forget_prefixes()
        whole = ok(talks.post(RESPONSES, **asked))
        talks.service.engine.forget_prefixes()  # cached tokens are reported in usage
        told = events(talks, RESPONSES, asked)
        assert [event["sequence_number"] for event in told] == list(range(len(told)))
        last = told[-1]["response"]
        assert same(last) == same(whole)
        assert (last["status"], last["usage"]) == (whole["status"], whole["usage"])
        assert items_of(told) == last["output"]


def items_of(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the items described by events, in order, each merged from its deltas."""
    items: list[dict[str, Any]] = []
    texts: dict[int, str] = {}
    rows: dict[int, list[Any]] = {}
    for event in told:
        kind, index = event["type"], event.get("output_index", -1)
        if kind == "response.output_item.added":
            assert index == len(items) == len(texts)
            texts[index], rows[index] = "", []
        elif kind.endswith(".delta"):
            texts[index] += event["delta"]
            rows[index] += event.get("logprobs", [])
        elif kind == "response.output_item.done":
            item = event["item"]
            part = item if item["type"] == "function_call" else item["content"][0]
            assert part.get("text", part.get("arguments")) == texts[index]
            assert part["logprobs"] == rows[index]
            items.append(item)
        elif kind.endswith("_text.done"):
            assert event["text"] == texts[index]
        elif kind.endswith("arguments.done"):
            assert event["arguments"] == texts[index]
    return items


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")  # about our own form of a text
def test_openais_client_reads_them(talks: Any) -> None:
    client = talks.client()
    options = {name: value for name, value in INPUT.items() if name != "seed"}
    with client.responses.stream(model="default", **options) as stream:
        for _ in stream:
            pass
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
    assert final.output_text == SAID
    chat = client.chat.completions.create(
        model="default", messages=[ASK], tools=TOOLS, logprobs=True, max_tokens=400, extra_body=forced(TEXT)
    )
    (choice,) = chat.choices
    assert choice.message.reasoning_content == THOUGHT
    assert [call.function.name for call in choice.message.tool_calls] == ["look", "wait"]
    with client.chat.completions.stream(
        model="default", messages=[ASK], tools=STRICT, max_tokens=400, extra_body=forced(TEXT)
    ) as chunks:
        said = chunks.get_final_completion().choices[0].message
    assert [call.function.arguments for call in said.tool_calls] == [
        call.function.arguments for call in choice.message.tool_calls
    ]


def test_a_replys_items_come_back_as_input(talks: Any) -> None:
    first = response_of(talks)
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "the dog"}
        for item in first["output"]
        if item["type"] == "function_call"
    ]
    ask = {"role": "user", "content": "the cat"}
    by_items = talks.post(RESPONSES, **INPUT | {"input": [ask, *first["output"], *results]})
    by_id = talks.post(RESPONSES, **INPUT | {"input": results, "previous_response_id": first["id"]})
    assert warnings_of(by_items) == warnings_of(by_id) == [warning("input.reasoning")]
    assert by_items.json()["usage"]["input_tokens"] == by_id.json()["usage"]["input_tokens"]
    listed = ok(talks.get(f"{RESPONSES}/{by_id.json()['id']}/input_items?order=asc"))["data"]
    kinds = ["message", "reasoning", "message", "function_call", "function_call"]
    assert [item["type"] for item in listed] == [*kinds, "function_call_output", "function_call_output"]
    assert listed[3]["call_id"] == listed[5]["call_id"] == results[0]["call_id"]
    assert len({item["id"] for item in listed}) == len(listed)


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [FLAT[0] | {"parameters": []}]}, "tools[0].parameters"),
        ({"tools": [{"type": "function", "function": LOOK}]}, "tools[0].function"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "leap"}}, "tool_choice"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"reasoning": {"effort": "some"}}, "reasoning.effort"),
        ({"reasoning": {"max_tokens": 1}}, "reasoning.max_tokens"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"field_logprobs": True, "include": None, "top_logprobs": None}, "field_logprobs"),
        ({"input": [{"type": "function_call", "name": "look"}]}, "input[0].call_id"),
        (
            {"input": [{"type": "function_call", "call_id": "a", "name": "look", "arguments": "{"}]},
            "input[0].arguments",
        ),
        (
            {
                "input": [
                    {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}", "mood": 1}
                ]
            },
            "input[0].mood",
        ),
        ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input[0].output"),
        (
            {"input": [ASK, {"type": "function_call_output", "call_id": "a", "output": [1]}]},
            "input[1].output",
        ),
        ({"input": [{"type": "reasoning", "content": ["a"]}]}, "input[0].content"),
        ({"input": [{"type": "reasoning", "encrypted_content": "a"}]}, "input[0].encrypted_content"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
    ],
)
def test_what_a_response_cannot_be_asked_is_a_400_that_names_the_field(
    talks: Any, asked: dict[str, Any], param: str
) -> None:
    reply = talks.post(RESPONSES, **INPUT | asked)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


# -- given reply formats -------------------------------------------------------------------------------------

OTHER_MARKS = {
    "start_anchor": ["assistant:"],
    "fields": {
        "content": {"content": "text"},
        "reasoning_content": {"open": "[the", "close": "dog]", "content": "text"},
    },
}


def test_a_response_template_of_a_file_goes_before_what_the_chat_template_shows(
    long_llm: Any, serve_llm: Any, tmp_path: Any
) -> None:
    path = tmp_path / "template.json"
    path.write_text(json.dumps(OTHER_MARKS))
    with serve_llm(long_llm, response_template=str(path)) as server:
        form = server.get("/v1/capabilities").json()["reply_form"]
        assert form == {"name": "given", "has_reasoning": True, "tools": "text"}
        choice = choice_of(server, tools=None, **forced("[the cat dog]and"))
        assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("cat", "and")


def test_a_token_that_reaches_over_a_mark_is_in_each_channel_with_its_own_bytes(
    long_llm: Any, serve_llm: Any, tmp_path: Any
) -> None:
    marks = {
        **OTHER_MARKS["fields"],
        "reasoning_content": {"open": "the c", "close": " d", "content": "text"},
    }
    path = tmp_path / "template.json"
    path.write_text(json.dumps(OTHER_MARKS | {"fields": marks}))
    text = "the cat dog and"
    ids = long_llm.text.encode(text, add_special_tokens=False).tolist()
    asked = ASKED | EXTRAS | {"tools": None, "allowed_token_ids": [*ids, 1]} | forced(text)
    with serve_llm(long_llm, response_template=str(path)) as server:
        (whole,) = ok(server.post(CHAT, **asked))["choices"]
        assert folded(events(server, CHAT, asked)) == whole
        response = ok(
            server.post(RESPONSES, **INPUT | {"tools": None, "text": {"format": asked["response_format"]}})
        )
    rows = whole["logprobs"]
    told = {
        channel: [(row["token"], bytes(row["bytes"]).decode()) for row in rows[channel]]
        for channel in ("reasoning", "content")
    }
    assert told == {"reasoning": [(" cat", "at")], "content": [("dog", "og"), (" and", " and")]}
    assert rows["processed_reasoning"][0]["bytes"] == rows["reasoning"][0]["bytes"]
    assert [item["content"][0]["text"] for item in response["output"]] == ["at", "og and"]


def test_the_capabilities_tell_how_replies_are_split(talks: Any) -> None:
    form = talks.get("/v1/capabilities").json()["reply_form"]
    assert form == {"name": "hermes", "has_reasoning": True, "tools": "template"}


@pytest.mark.parametrize(
    "content", [None, "{", "[]", "\xff", '{"fields": 5}', '{"fields": {"content": {"close": 5}}}']
)
def test_a_file_that_is_no_response_template_is_refused_at_the_start(
    long_llm: Any, serve_llm: Any, tmp_path: Any, content: str | None
) -> None:
    path = tmp_path / "template.json"
    if content is not None:
        path.write_text(content, encoding="latin-1")
    with (
        raises(ParameterError, parameter="response_template"),
        serve_llm(long_llm, response_template=str(path)),
    ):
        pass


def test_split_replies_have_their_published_shapes(talks: Any) -> None:
    import jsonschema

    whole = document(ROUTES)

    def check(name: str, value: Any) -> None:
        found = jsonschema.Draft202012Validator({"$ref": f"#/components/schemas/{name}", **whole})
        found.validate(value)

    check("ChatCompletion", ok(talks.post(CHAT, **ASKED | EXTRAS)))
    for chunk in events(talks, CHAT, ASKED | EXTRAS):
        check("ChatCompletionChunk", chunk)
    response = response_of(talks, logprobs_mode="both", field_logprobs=True)
    check("Response", response)
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "a"}
        for item in response["output"][2:]
    ]
    second = response_of(talks, input=results, previous_response_id=response["id"])
    check("Items", ok(talks.get(f"{RESPONSES}/{second['id']}/input_items")))


# -- a real model --------------------------------------------------------------------------------------------


@pytest.mark.real_model
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
def test_the_default_model_calls_tools_that_its_template_does_not_take(real_server: Any, choice: Any) -> None:
    asked = ASKED | {
        "tool_choice": choice,
        "response_format": None,
        "parallel_tool_calls": False,
        "temperature": 0,
    }
    warm(real_server, asked)
    (whole,) = ok(real_server.post(CHAT, **asked))["choices"]
    (call,) = whole["message"]["tool_calls"]
    said = json.loads(call["function"]["arguments"])
    body = json.loads(own_bytes(whole["logprobs"]["tool_calls"][0]))
    assert body == {"name": call["function"]["name"], "arguments": said}
    assert whole["logprobs"]["content"] == []
    assert without_ids(folded(events(real_server, CHAT, asked))) == without_ids(whole)


@pytest.mark.real_model
def test_the_default_models_tokens_that_reach_over_marks_are_cut_in_rows(real_server: Any) -> None:
    warm(real_server, ASKED)
    for max_tokens in range(1, 90, 4):
        asked = ASKED | {"max_tokens": max_tokens}
        (whole,) = ok(real_server.post(CHAT, **asked))["choices"]
        assert without_ids(folded(events(real_server, CHAT, asked))) == without_ids(whole)
        calls = whole["message"].get("tool_calls", [])
        assert [own_bytes(rows).decode() for rows in whole["logprobs"].get("tool_calls", [])] == [
            *CALLS[: len(calls)]
        ]
        text = whole["message"]["content"] or ""
        assert own_bytes(whole["logprobs"]["content"]).decode("utf-8", "replace") == text


@pytest.mark.real_model
def test_openais_client_calls_the_default_models_tools(real_server: Any) -> None:
    client = real_server.client()
    reply = client.responses.create(
        model="default",
        input="the cat",
        tools=[FLAT[0] | {"strict": True}],
        tool_choice={"type": "function", "name": "look"},
        max_output_tokens=100,
    )
    (call,) = [item for item in reply.output if item.type == "function_call"]
    assert set(json.loads(call.arguments)) == {"at", "far"}


@pytest.mark.parametrize("is_stream", [False, True])
def test_reasoning_is_left_out_on_request(talks: Any, is_stream: bool) -> None:
    asked = ASKED | {"include_reasoning": False}
    (whole,) = ok(talks.post(CHAT, **ASKED))["choices"]
    found = folded(events(talks, CHAT, asked)) if is_stream else choice_of(talks, include_reasoning=False)
    assert whole["message"]["reasoning"] == THOUGHT
    assert not {"reasoning", "reasoning_content"} & found["message"].keys()
    assert not [name for name in found["logprobs"] if "reasoning" in name]
    assert found["message"]["content"] == SAID
    assert found["logprobs"]["content"] == whole["logprobs"]["content"]
    assert found["finish_reason"] == whole["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("is_stream", [False, True])
def test_content_shows_special_tokens_beside_marks_on_request(talks: Any, is_stream: bool) -> None:
    text = talks.llm.text
    special = next(one for one in sorted(text.special_token_ids) if one != text.eos_token_id)
    asked = {"messages": [ASK], "max_tokens": 12, "seed": 3, "allowed_token_ids": [special, 71]}
    asked |= {"logit_bias": {str(special): 5, "71": 5}, "logprobs": True, "skip_special_tokens": False}
    (choice,) = ok(talks.post(CHAT, **asked, return_token_ids=True))["choices"]
    want = b"".join(map(text.vocabulary.token_bytes, choice["token_ids"])).decode()
    found = folded(events(talks, CHAT, asked)) if is_stream else choice
    assert found["message"]["content"] == want
    assert own_bytes(found["logprobs"]["content"]).decode() == want
