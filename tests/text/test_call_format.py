"""Calls of tools as the form that a reply must have: a grammar admits them, and they are found again."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from logprobe import LLM, SamplingParams
from logprobe.errors import ParameterError
from logprobe.processors.arguments import format_args
from logprobe.processors.builtin.grammar import byte_tokenizer, grammar_of
from logprobe.processors.builtin.matchers import LlguidanceMatcher, allowed_tokens
from logprobe.text.channels import Channels, ToolCall, call_format, template_of
from logprobe.text.chat import Layout, lay_out
from logprobe.text.pieces import Cutter
from logprobe.text.tools import as_texts
from refusals import raises
from reply_forms import OTHER, REPLIES, TOOLS, edge_of, form_of, parts_of

if TYPE_CHECKING:
    from logprobe.text.channels import ResponseForm
    from logprobe.text.edge import TextEdge
    from reply_forms import Reply


def bytewise(reply: Reply) -> tuple[ResponseForm, TextEdge]:
    """A model whose tokens are single bytes, and a reply's special tokens."""
    edge = edge_of([bytes([value]) for value in range(256)], (*reply.special, "<eos of all>"), reply.template)
    return form_of(reply, edge), edge


def matcher_of(response_format: dict[str, Any], edge: TextEdge) -> LlguidanceMatcher:
    import llguidance

    size = len(edge.vocabulary)
    model: Any = SimpleNamespace(
        text=SimpleNamespace(eos_token_id=size - 1, special_token_ids=edge.special_token_ids),
        vocabulary=edge.vocabulary,
        vocab_size=size,
        encode=lambda text: list(text.encode()),
    )
    args = format_args(response_format)
    assert args is not None
    matcher = llguidance.LLMatcher(byte_tokenizer(model), grammar_of(args))
    assert not matcher.is_error(), matcher.get_error()
    return LlguidanceMatcher(matcher)


def ids_of(text: str, special: tuple[str, ...]) -> list[int]:
    ids: list[int] = []
    while text:
        mark = next((mark for mark in special if text.startswith(mark)), None)
        ids += list(text[0].encode()) if mark is None else [256 + special.index(mark)]
        text = text[len(mark or text[0]) :]
    return ids


def accepts(response_format: dict[str, Any], edge: TextEdge, ids: list[int]) -> bool:
    """Whether a text may come whole and end there."""
    matcher = matcher_of(response_format, edge)
    end = len(edge.vocabulary) - 1
    for token_id in ids:
        mask = matcher.mask()
        if mask is None or not allowed_tokens(mask, end + 1)[token_id]:
            return False
        matcher.accept(token_id)
    mask = matcher.mask()
    return mask is None or bool(allowed_tokens(mask, end + 1)[end])


WRITTEN = '{"at": "é \\" 😀", "times": 1}'
# What stands before all calls, a call, what stands between two, and after all.
WRITINGS: dict[str, tuple[str, str, str | None, str]] = {
    "qwen2.5": ("", '<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>', "\n", ""),
    "llama": ("", '{"name": "NAME", "parameters": ARGUMENTS}', None, ""),
    "mistral": ("[TOOL_CALLS] [", '{"name": "NAME", "arguments": ARGUMENTS}', ", ", "]"),
    "mistral-named": ("", "[TOOL_CALLS]NAME[ARGS]ARGUMENTS", "", ""),
    "deepseek": (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```<｜tool▁call▁end｜>",
        "\n",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek-v3.1": (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>",
        "",
        "<｜tool▁calls▁end｜>",
    ),
    "gpt-oss": (
        "",
        "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS<|call|>",
        None,
        "",
    ),
}


def writing(name: str, *calls: ToolCall) -> list[int]:
    """The ids of some calls in a form."""
    first, one, between, last = WRITINGS[name]
    texts = [one.replace("NAME", call.name).replace("ARGUMENTS", call.arguments) for call in calls]
    return ids_of(first + (between or "").join(texts) + last, REPLIES[name].special)


every_writing = pytest.mark.parametrize("name", WRITINGS)
LOOKED, NOW = ToolCall("look", WRITTEN), ToolCall("now", "{}")


@every_writing
def test_a_grammar_admits_the_calls_of_a_form_and_no_others(name: str) -> None:
    reply = REPLIES[name]
    form, edge = bytewise(reply)
    look, now, both = writing(name, LOOKED), writing(name, NOW), writing(name, LOOKED, NOW)
    many = call_format(form, TOOLS, "required", parallel=True)
    one = call_format(form, TOOLS, "required", parallel=False)
    named = call_format(form, TOOLS, "now", parallel=True)
    assert all(accepts(grammar, edge, ids) for grammar in (many, one) for ids in (look, now))
    assert accepts(named, edge, now)
    assert not accepts(named, edge, look)
    unfinished = [look[:-1], [*look, ord(" ")], [], ids_of("Well.", reply.special)]
    assert not any(accepts(many, edge, ids) for ids in unfinished)
    if WRITINGS[name][2] is not None:
        assert accepts(many, edge, both)
        assert [part.call for part in parts_of(form, edge, both, tools=TOOLS)] == [LOOKED, NOW]
    assert not accepts(one, edge, both)
    assert not accepts(named, edge, writing(name, NOW, NOW))
    for ids, call_of_it in ((look, LOOKED), (now, NOW)):
        assert [part.call for part in parts_of(form, edge, ids, tools=TOOLS)] == [call_of_it]


@every_writing
def test_whatever_a_grammar_admits_is_a_call(name: str) -> None:
    schema = {
        "type": "object",
        "properties": {"at": {"enum": ["a", "é", '"']}, "far": {"type": "boolean"}},
        "required": ["at"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": "look", "parameters": schema}}, OTHER]
    form, edge = bytewise(REPLIES[name])
    end = len(edge.vocabulary) - 1
    rng = random.Random(0)  # noqa: S311 - a test's own
    for _ in range(20):
        matcher, ids = matcher_of(call_format(form, tools, "required", parallel=True), edge), list[int]()
        while (mask := matcher.mask()) is not None:
            allowed = allowed_tokens(mask, end + 1).nonzero()[0].tolist()
            token_id = end if end in allowed else rng.choice(allowed)
            if token_id == end:
                break
            ids.append(token_id)
            assert matcher.accept(token_id)
        parts = parts_of(form, edge, ids, tools=tools)
        assert parts
        assert all(part.call is not None and part.call.name in {"look", "now"} for part in parts)
        assert all(isinstance(json.loads(part.call.arguments), dict) for part in parts if part.call)


def test_a_reasoning_that_the_prompt_has_opened_ends_before_the_calls() -> None:
    for name in ("qwq, thinking already", "deepseek", "magistral"):
        reply = REPLIES[name]
        form, edge = bytewise(reply)
        opening = "[THINK]" if name == "magistral" else "<think>\n"
        prefix = reply.prefix.removesuffix(opening) + opening
        grammar = call_format(form, [OTHER], "required", parallel=False, prefix=prefix)
        closing = "[/THINK]" if name == "magistral" else "</think>"
        form_of_call = {"magistral": "mistral-named", "deepseek": "deepseek"}.get(name, "qwen2.5")
        first, one, _, last = WRITINGS[form_of_call]
        text = first + one.replace("NAME", "now").replace("ARGUMENTS", "{}") + last
        ids = ids_of(f"Hm,\n é{closing}{text}", reply.special)
        assert accepts(grammar, edge, ids)
        assert not accepts(grammar, edge, ids_of(text, reply.special))
        parts = parts_of(form, edge, ids, prefix=prefix, tools=[OTHER])
        assert [(part.channel, part.call) for part in parts] == [("reasoning", None), ("tool_call", NOW)]


def test_calls_come_back_as_they_were_written() -> None:
    function = {"name": "look", "arguments": {"at": "é"}}
    called = {"role": "assistant", "content": "Well.", "tool_calls": [{"function": function}]}
    [([message], _)] = as_texts([called], None)
    reply = REPLIES["no tools taken"]
    data = message["content"].encode()
    edge = edge_of([data], reply.special, reply.template)
    parts = parts_of(form_of(reply, edge), edge, [0], tools=TOOLS)
    assert [(part.text, part.call) for part in parts] == [
        ("Well.", None),
        ('{"name": "look", "arguments": {"at": "é"}}', ToolCall("look", '{"at": "é"}')),
    ]


def test_choices_that_no_grammar_can_keep_are_refused() -> None:
    form, _ = bytewise(REPLIES["qwen2.5"])
    with raises(ParameterError, parameter="tool_choice", match="known: look, now"):
        call_format(form, TOOLS, "loook", parallel=False)
    with raises(ParameterError, parameter="tool_choice"):
        call_format(form, [], "required", parallel=False)
    with raises(ParameterError, parameter="tools[1].function.name"):
        call_format(form, [OTHER, OTHER], "required", parallel=False)
    for name in ("gemma4", "qwen-coder", "glm"):
        with raises(ParameterError, parameter="tool_choice", match="grammar"):
            call_format(bytewise(REPLIES[name])[0], TOOLS, "required", parallel=False)
    spaced = [{"type": "function", "function": {"name": "look at"}}]
    assert call_format(form, spaced, "look at", parallel=False)["type"] == "ebnf"
    with raises(ParameterError, parameter="tools[0].function.name"):
        call_format(bytewise(REPLIES["mistral-named"])[0], spaced, "required", parallel=False)


def test_a_form_of_ones_own_is_forced_where_its_calls_are_known() -> None:
    form, edge = bytewise(REPLIES["qwen2.5"])
    thinking = {"open": "<mind>", "close_pattern": "</mind>+"}
    own = {"start_anchor": "ai:", "fields": {**form.spec["fields"], "thinking": thinking}}
    given = template_of(edge, own)
    assert given is not None
    assert call_format(given, TOOLS, "required", parallel=True) == call_format(
        form, TOOLS, "required", parallel=True
    )
    with raises(ParameterError, parameter="tool_choice"):  # where a reasoning ends is a pattern
        call_format(given, TOOLS, "required", parallel=True, prefix="ai:<mind>")
    calls = {"open": "<do>", "close": "</do>", "content": "json"}
    given = template_of(edge, {"start_anchor": "ai:", "fields": {"content": {}, "tool_calls": calls}})
    assert given is not None
    with raises(ParameterError, parameter="tool_choice"):
        call_format(given, TOOLS, "required", parallel=True)


def test_a_schema_that_is_no_json_is_refused_by_its_place() -> None:
    form, _ = bytewise(REPLIES["qwen2.5"])
    tools = [OTHER, {"type": "function", "function": {"name": "look", "parameters": {"default": object()}}}]
    with raises(ParameterError, parameter="tools[1].function.parameters"):
        call_format(form, tools, "look", parallel=False)


@pytest.mark.real_model
def test_a_real_model_that_must_call_a_tool_does(real_llm: LLM) -> None:
    text = real_llm.text
    form = template_of(text)
    assert form is not None
    assert (form.name, form.has_reasoning, form.tools) == ("hermes", False, "text")
    place = {"type": "string", "enum": ["Paris", "Rome", "Oslo"]}
    weather = {
        "type": "object",
        "properties": {"city": place},
        "required": ["city"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": "weather", "parameters": weather}}, OTHER]
    prompt = lay_out([{"role": "user", "content": "What is the weather in Rome?"}], text, Layout(tools=tools))
    assert "<tools>" in prompt
    for choice, names in (("required", {"weather", "now"}), ("weather", {"weather"})):
        form_of_calls = call_format(form, tools, choice, parallel=False)
        params = SamplingParams(
            max_tokens=64, n=4, seed=1, temperature=1.0, response_format=form_of_calls, logprobs=0
        )
        ids = text.encode(prompt, add_special_tokens=False)
        for completion in real_llm.generate([ids.tolist()], params)[0].outputs:
            assert completion.finish_reason == "stop"
            piece = Cutter[Any](text.bytes_of, [], 0).take(completion)
            assert piece is not None
            [part] = Channels(form, prompt, text, tools).take(piece)
            assert part.call is not None
            assert part.call.name in names
            arguments = json.loads(part.call.arguments)
            assert arguments == {} if part.call.name == "now" else set(arguments) == {"city"}
            assert completion.logprobs is not None
            assert all(position < len(completion.logprobs) for position, _ in part.rows)
