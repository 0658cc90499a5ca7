"""Tools, calls and results are texts where a chat template takes none."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from logprobe.errors import ParameterError
from logprobe.text.chat import Layout, lay_out
from logprobe.text.tools import TOOLS_TEXT, read_tools
from refusals import raises

if TYPE_CHECKING:
    from collections.abc import Callable

    from logprobe import LLM

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
OTHER = {"type": "function", "function": {"name": "now"}}
PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
ASK = {"role": "user", "content": "the cat"}
SAID = TOOLS_TEXT.format(tools=json.dumps(TOOL))


def call(number: int, arguments: str = '{"at":"é"}') -> dict[str, Any]:
    return {"id": f"c{number}", "type": "function", "function": {"name": "look", "arguments": arguments}}


CALLS = {"role": "assistant", "content": "Well.", "tool_calls": [call(1), call(2)]}
RESULTS = [{"role": "tool", "tool_call_id": f"c{number}", "content": f"{number} cats"} for number in (1, 2)]


@pytest.fixture
def laid_out(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The prompt that a template makes of messages."""

    def lay(template: str, messages: Any, **layout: Any) -> str:
        monkeypatch.setattr(tiny_llm.text.tokenizer, "chat_template", template)
        return lay_out(messages, tiny_llm.text, Layout(**layout))

    return lay


def test_tools_are_a_system_text_where_the_template_takes_none(laid_out: Any) -> None:
    assert laid_out(PLAIN, [ASK], tools=[TOOL]) == f"<system>{SAID}\n<user>the cat\n<assistant>"
    said = [{"role": "system", "content": "be short"}, ASK]
    assert laid_out(PLAIN, said, tools=[TOOL]) == f"<system>be short\n\n{SAID}\n<user>the cat\n<assistant>"


def test_calls_and_results_are_texts_where_the_template_takes_none(laid_out: Any) -> None:
    written = '<tool_call>\n{"name": "look", "arguments": {"at": "é"}}\n</tool_call>'
    turns = (
        f"<user>the cat\n<assistant>Well.\n{written}\n{written}\n"
        "<user><tool_response>\n1 cats\n</tool_response>\n"
        "<tool_response>\n2 cats\n</tool_response>\n<assistant>"
    )
    assert laid_out(PLAIN, [ASK, CALLS, *RESULTS]) == turns
    assert laid_out(PLAIN, [ASK, CALLS, *RESULTS], tools=[TOOL]) == f"<system>{SAID}\n{turns}"
    silent = CALLS | {"content": None, "tool_calls": [call(1)]}
    assert (
        laid_out(PLAIN, [ASK, silent], add_generation_prompt=False)
        == f"<user>the cat\n<assistant>{written}\n"
    )


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([ASK, CALLS, *RESULTS[::-1]], "messages[2].tool_call_id"),
        ([ASK, CALLS, RESULTS[0] | {"mood": 3}], "messages[2].mood"),
        ([ASK, CALLS, *RESULTS, ASK | {"mood": 3}], "messages[4].mood"),
        ([ASK, CALLS | {"mood": 3}, *RESULTS], "messages[1].mood"),
        ([ASK, RESULTS[0]], "messages[1].tool_call_id"),
        ([ASK, CALLS, RESULTS[0] | {"name": "now"}], "messages[2].name"),
    ],
)
@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_nothing_is_passed_over_in_silence(laid_out: Any, messages: Any, named: str, tools: Any) -> None:
    with raises(ParameterError, parameter=named):
        laid_out(PLAIN, messages, tools=tools)


def test_a_template_that_passes_a_system_text_over_takes_no_tools_at_all(laid_out: Any) -> None:
    with raises(ParameterError, parameter="tools"):
        laid_out(NO_SYSTEM, [ASK], tools=[TOOL])
    with raises(ParameterError, parameter="messages[0].content"):
        laid_out(NO_SYSTEM, [{"role": "system", "content": "be short"}, ASK], tools=[TOOL])


def test_where_a_system_text_is_refused_the_first_message_says_the_tools(laid_out: Any) -> None:
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + PLAIN
    assert laid_out(refuses, [ASK], tools=[TOOL]) == f"<user>{SAID}\n\nthe cat\n<assistant>"
    with raises(ParameterError, parameter="messages"):
        laid_out(refuses, [{"role": "system", "content": "be short"}, ASK], tools=[TOOL])


MALFORMED = [
    ([{"type": "function"}], "tools[0].function.name"),
    ([TOOL, {"type": "function", "function": {"name": ""}}], "tools[1].function.name"),
    ([TOOL, {"type": "function", "function": {"name": 3}}], "tools[1].function.name"),
    ([TOOL, OTHER, TOOL], "tools[2].function.name"),
    ([{"type": "function", "function": {"name": "look", "parameters": 3}}], "tools[0].function.parameters"),
    (
        [{"type": "function", "function": {"name": "look", "parameters": {"type": "string"}}}],
        "tools[0].function.parameters",
    ),
]


@pytest.mark.parametrize(("tools", "named"), MALFORMED)
def test_a_malformed_tool_is_refused_by_its_place(laid_out: Any, tools: Any, named: str) -> None:
    with raises(ParameterError, parameter=named):
        laid_out(PLAIN, [ASK], tools=tools)
    with raises(ParameterError, parameter=named):
        read_tools(tools)
