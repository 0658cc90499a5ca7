"""Replies split into content, reasoning and calls: whatever the pieces, each byte in its channel."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from logprobe.errors import ParameterError
from logprobe.text.channels import ToolCall, template_of
from logprobe.text.channels.forms import MAX_FORMS
from logprobe.text.channels.split import opens_reasoning
from refusals import raises
from reply_forms import (
    QWEN,
    QWEN3,
    REPLIES,
    TOOLS,
    Reply,
    chatml,
    edge_of,
    form_of,
    joined,
    parts_of,
    tokens_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from logprobe.text.channels import Part
    from logprobe.text.edge import TextEdge

every_reply = pytest.mark.parametrize("reply", REPLIES.values(), ids=REPLIES.keys())
THINKS = {"open": "<mind>", "close": "</mind>", "content": "text"}
OWN = {"start_anchor": "ai:", "fields": {"thinking": THINKS, "content": {"content": "text"}}}


def cut(reply: Reply, text: str, seed: int, longest: int = 6) -> tuple[TextEdge, list[int]]:
    """A model whose tokens are random cuts of a text, and the text's ids."""
    rng = random.Random(seed)  # noqa: S311 - a test's own
    pieces, ids = tokens_of(text, reply.special, rng, longest)
    return edge_of(pieces, reply.special, reply.template), ids


def nested(call: str, depth: int) -> str:
    """A call within so many others' `function`."""
    return '{"function": ' * depth + call + "}" * depth


def said(parts: Iterable[Part]) -> dict[str, str]:
    return {channel: part.text for (channel, _), part in joined(parts).items() if channel != "tool_call"}


def calls(parts: Iterable[Part]) -> list[ToolCall | None]:
    return [part.call for part in parts if part.channel == "tool_call"]


def check_rows(parts: Iterable[Part], edge: TextEdge, ids: list[int]) -> None:
    """Rows hold the bytes of their channel's text, of tokens in their order, each once a channel."""
    shares: dict[int, int] = {}
    for part in joined(parts).values():
        assert b"".join(data for _, data in part.rows).decode("utf-8", "replace") == part.text
        positions = [position for position, _ in part.rows]
        assert positions == sorted(set(positions))
        for position, data in part.rows:
            assert data
            assert is_within(data, edge.vocabulary.token_bytes(ids[position]))
            shares[position] = shares.get(position, 0) + len(data)
    for position, num_bytes in shares.items():
        assert num_bytes <= len(edge.vocabulary.token_bytes(ids[position]))


@every_reply
@pytest.mark.parametrize("seed", range(3))
def test_a_reply_is_split_into_its_channels(reply: Reply, seed: int) -> None:
    edge, ids = cut(reply, reply.text, seed)
    parts = parts_of(form_of(reply, edge), edge, ids, prefix=reply.prefix, tools=TOOLS)
    expected = {"content": reply.content, "reasoning": reply.reasoning}
    assert said(parts) == {channel: text for channel, text in expected.items() if text}
    assert calls(parts) == [ToolCall(name, arguments) for name, arguments in reply.calls]
    assert [part.text for part in parts if part.channel == "tool_call"] == list(reply.bodies)
    check_rows(parts, edge, ids)


@every_reply
def test_pieces_make_no_difference_wherever_the_text_ends(reply: Reply) -> None:
    rng = random.Random(0)  # noqa: S311 - a test's own
    for stop in range(len(reply.text)):
        edge, ids = cut(reply, reply.text[:stop], seed=stop)
        form = form_of(reply, edge)
        whole = joined(parts_of(form, edge, ids, prefix=reply.prefix, tools=TOOLS))
        check_rows(whole.values(), edge, ids)
        for steps in ([1] * len(ids), [rng.randint(1, 9) for _ in ids]):
            parts = parts_of(form, edge, ids, prefix=reply.prefix, tools=TOOLS, steps=steps)
            assert joined(parts) == whole


@every_reply
def test_cuts_of_the_tokens_make_no_difference(reply: Reply) -> None:
    """Whatever tokens a text is made of, its channels say the same."""
    for stop in range(0, len(reply.text), 3):
        texts = []
        for longest in (1, 4, 40):
            edge, ids = cut(reply, reply.text[:stop], seed=stop, longest=longest)
            parts = parts_of(form_of(reply, edge), edge, ids, prefix=reply.prefix, tools=TOOLS)
            texts.append({key: (part.text, part.call) for key, part in joined(parts).items()})
        assert texts[0] == texts[1] == texts[2]


@every_reply
def test_transformers_finds_the_same(reply: Reply) -> None:
    from transformers.utils.chat_parsing import parse_response

    edge, ids = cut(reply, reply.text, seed=0)
    form = form_of(reply, edge)
    parts = parts_of(form, edge, ids, prefix=reply.prefix, tools=TOOLS)
    ending = next((mark for mark in reply.special if reply.text.endswith(mark)), "")
    message = parse_response(
        reply.text.removesuffix(ending), dict(form.spec), prefix=reply.prefix, tools=TOOLS
    )
    assert message.get("reasoning_content", "") == said(parts).get("reasoning", "").strip()
    if not reply.calls:  # it forgets what was said between two marks
        assert message.get("content", "") == said(parts).get("content", "").strip()
    found = [call["function"] for call in message.get("tool_calls") or []]
    ours = [call for call in calls(parts) if call is not None]
    assert [call["name"] for call in found] == [call.name for call in ours]
    sent = [call.get("arguments", call.get("parameters")) for call in found]
    assert sent == [json.loads(call.arguments) for call in ours]


@every_reply
def test_without_tools_calls_are_content(reply: Reply) -> None:
    edge, ids = cut(reply, reply.text, seed=0)
    form = form_of(reply, edge)
    parts = parts_of(form, edge, ids, prefix=reply.prefix)
    assert calls(parts) == []
    assert said(parts).get("reasoning", "") == reply.reasoning
    for body in reply.bodies:
        ordinary = body.replace('<|"|>', "")
        assert ordinary in said(parts)["content"]
    whole = joined(parts)
    assert joined(parts_of(form, edge, ids, prefix=reply.prefix, steps=[1] * len(ids))) == whole


def test_a_token_stands_in_each_channel_with_its_own_bytes() -> None:
    pieces = [
        b"<think>\nHm",
        b".\n</think>\n\nYes",
        b" or no <tool_call>{",
        b'"name": "now"',
        b"}</tool_call>\n",
    ]
    edge = edge_of(pieces, QWEN, QWEN3)
    form = template_of(edge)
    assert form is not None
    [content, reasoning, call] = sorted(
        parts_of(form, edge, [0, 1, 2, 3, 4], tools=TOOLS), key=lambda part: part.channel
    )
    assert reasoning.rows == [(0, b"Hm"), (1, b".")]
    assert content.rows == [(1, b"Yes"), (2, b" or no")]
    assert call.rows == [(2, b"{"), (3, b'"name": "now"'), (4, b"}")]
    assert call.call == ToolCall("now", "{}")


def test_a_token_is_given_out_once_all_of_it_is_decided() -> None:
    """A row that came in two parts would count twice in a stream."""
    pieces = [b"Yes", b" or <", b"b> no"]
    edge = edge_of(pieces, QWEN, QWEN3)
    form = template_of(edge)
    assert form is not None
    parts = parts_of(form, edge, [0, 1, 2], steps=[1, 1])
    assert [part.rows for part in parts] == [[(0, b"Yes")], [(1, b" or <"), (2, b"b> no")]]


BROKEN = [
    '<tool_call>{"name": "look", "arguments": {"at": }}</tool_call>',
    '<tool_call>{"name": "look", "arguments": {"at": "the do',
    '<tool_call>{"name": "look", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "look", "arguments": {"at": NaN}}</tool_call>',
    '<tool_call>{"name": "look", "arguments": "at"}</tool_call>',
    '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
    '<tool_call>{"name": "", "arguments": {}}</tool_call>',
    '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
    '<tool_call>{"arguments": {}}</tool_call>',
    '<tool_call>[{"name": "now"}, 3]</tool_call>',
    "<tool_call>now</tool_call>",
    "<tool_call>" + nested('{"name": "now", "arguments": {"a": 1}}', 98) + "</tool_call>",
    "<tool_call>" + nested('{"name": "now", "arguments": {"a": 1}}', 900) + "</tool_call>",
    "<tool_call>" + "[" * 20_000 + "</tool_call>",
    "<tool_call></tool_call>",
    "<tool_call>",
]


@pytest.mark.parametrize("broken", BROKEN, ids=range(len(BROKEN)))
def test_what_is_no_call_is_content_as_it_stands(broken: str) -> None:
    text = f" I do: {broken}\n and "
    reply = REPLIES["qwen2.5"]
    edge, ids = cut(reply, text, seed=1)
    form = form_of(reply, edge)
    parts = parts_of(form, edge, ids, tools=TOOLS)
    assert (said(parts), calls(parts)) == ({"content": text}, [])
    check_rows(parts, edge, ids)
    assert joined(parts_of(form, edge, ids, tools=TOOLS, steps=[1] * len(ids))) == joined(parts)


@pytest.mark.parametrize(
    ("body", "call"),
    [
        ('{"name": "now"}', ToolCall("now", "{}")),
        ('{"name": "now", "arguments": null}', ToolCall("now", "{}")),
        ('{"name": "now", "parameters": {"a":1}}', ToolCall("now", '{"a":1}')),
        ('{"name": "now", "arguments": "{\\"a\\":1}"}', ToolCall("now", '{"a":1}')),
        ('{"arguments" :{"a" : [1, {}]} , "name":"now"}', ToolCall("now", '{"a" : [1, {}]}')),
        ('{"name": "x", "arguments": {}, "name": "now", "arguments": {"a": 2}}', ToolCall("now", '{"a": 2}')),
        (
            '{"type": "function", "function": {"name": "now", "arguments": {"é":"\\u00e9"}}}',
            ToolCall("now", '{"é":"\\u00e9"}'),
        ),
        (
            '{"function": 1, "function": {"name": "now", "arguments":{"a" : "]}"}}}',
            ToolCall("now", '{"a" : "]}"}'),
        ),
        (nested('{"name": "now", "arguments": {"a":1e2}}', 97), ToolCall("now", '{"a":1e2}')),
    ],
)
def test_the_arguments_of_a_call_are_as_the_model_wrote_them(body: str, call: ToolCall) -> None:
    reply = REPLIES["qwen2.5"]
    edge, ids = cut(reply, f"<tool_call>{body}</tool_call>", seed=1)
    assert calls(parts_of(form_of(reply, edge), edge, ids, tools=TOOLS)) == [call]


def test_a_call_that_is_whole_but_for_its_last_mark_is_a_call() -> None:
    reply = REPLIES["qwen2.5"]
    for end in ("", "\n", "<|im_end|>", "\n<|im_end|>"):
        edge, ids = cut(reply, '<tool_call>\n{"name": "now"}' + end, seed=1)
        assert calls(parts_of(form_of(reply, edge), edge, ids, tools=TOOLS)) == [ToolCall("now", "{}")]


def test_white_space_beside_a_mark_is_the_marks_and_other_white_space_stays() -> None:
    text = '  \n<think>\n\n a \n b \n</think> \n\t c\n\nd \n<tool_call>\n{"name": "now"}\n</tool_call>\n'
    reply = REPLIES["qwen3"]
    edge, ids = cut(reply, text, seed=2)
    parts = parts_of(form_of(reply, edge), edge, ids, tools=TOOLS, steps=[1] * len(ids))
    assert said(parts) == {"reasoning": "a \n b", "content": "c\n\nd"}
    edge, ids = cut(reply, "\n a \n", seed=2)
    assert said(parts_of(form_of(reply, edge), edge, ids, tools=TOOLS)) == {"content": "\n a \n"}
    edge, ids = cut(reply, "<think> a \n", seed=2)
    assert said(parts_of(form_of(reply, edge), edge, ids, tools=TOOLS)) == {"reasoning": "a \n"}


@pytest.mark.parametrize("text", ["<think>A 😀", "A 😀", '<tool_call>{"name": "😀'])
def test_a_text_cut_inside_a_character_ends_in_a_replacement_and_its_true_bytes(text: str) -> None:
    reply, data = REPLIES["qwen3"], text.encode()
    for num_left in range(1, 4):
        stop = data.index("😀".encode()) + num_left
        # By the last token, or by a stop string.
        for shown, limit in ((data[:stop], None), (data, stop)):
            edge = edge_of([shown[at : at + 1] for at in range(len(shown))], reply.special, reply.template)
            ids, steps = list(range(len(shown))), [] if limit else [1] * len(shown)
            parts = parts_of(form_of(reply, edge), edge, ids, tools=TOOLS, num_text_bytes=limit, steps=steps)
            [part] = joined(parts).values()
            assert part.text == text.removeprefix("<think>").replace("😀", "\ufffd")
            assert b"".join(row for _, row in part.rows).endswith("😀".encode()[:num_left])
            assert part.channel == ("reasoning" if "think" in text else "content")


def test_special_tokens_have_no_bytes_in_a_text() -> None:
    reply = REPLIES["qwen3"]
    edge, ids = cut(
        reply, "<think>a<|im_start|> b</think>c<|im_end|>d <|im_end|> <tool_call><|im_end|>", seed=0
    )
    parts = parts_of(form_of(reply, edge), edge, ids, tools=TOOLS)
    assert said(parts) == {"reasoning": "a b", "content": "cd  <tool_call>"}


def test_a_character_around_a_special_token_is_whole() -> None:
    data = "é".encode()
    edge = edge_of([b"a", data[:1], data[1:]], QWEN, QWEN3)
    form = template_of(edge)
    assert form is not None
    [part] = parts_of(form, edge, [0, 1, 3, 2])
    assert (part.text, part.rows) == ("aé", [(0, b"a"), (1, data[:1]), (3, data[1:])])


def test_a_reply_that_the_prompt_has_begun_goes_on_in_its_channel() -> None:
    reply = REPLIES["qwen3"]
    turn = "<|im_start|>assistant\n"
    begun = {
        f"{turn}<think>\n": {"reasoning": "a", "content": "b"},
        f"{turn}<think>\nWell, ": {"reasoning": " a", "content": "b"},
        f"{turn}<think>x</think>Well, ": {"content": " a</think>b"},
        f"{turn}<think>x</think>\n\n": {"content": "a</think>b"},
        f"<think>{turn}": {"content": " a</think>b"},
        "<think>": {"content": " a</think>b"},
    }
    for prefix, expected in begun.items():
        edge, ids = cut(reply, " a</think>b", seed=0)
        form = form_of(reply, edge)
        parts = parts_of(form, edge, ids, prefix=prefix, tools=TOOLS)
        assert said(parts) == expected, prefix
        assert opens_reasoning(form, prefix) == ("reasoning" in expected)
        check_rows(parts, edge, ids)
    edge, ids = cut(reply, '": "now"}</tool_call>b', seed=0)
    parts = parts_of(form_of(reply, edge), edge, ids, prefix=turn + '<tool_call>{"name', tools=TOOLS)
    assert calls(parts) == [ToolCall("now", "{}")]
    assert [part.text for part in parts if part.call] == ['": "now"}']


def test_a_model_without_a_known_end_of_its_prompt_may_still_think() -> None:
    edge = edge_of([b"a", b"</think>", b"b"], (), "{{ messages }}{{ tools }}</think>")
    form = template_of(edge)
    assert form is not None
    assert (form.name, form.has_reasoning, form.tools) == ("thinking", True, None)
    parts = parts_of(form, edge, [0, 1, 2], prefix="<think> said: <think>\n")
    assert said(parts) == {"reasoning": "a", "content": "b"}


MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>"]
SCRAPS = [
    "<",
    "</",
    "<tool",
    "think>",
    " ",
    "\n",
    "  \n ",
    "é",
    "😀",
    "a",
    "\\",
    '"',
    '{"name": "now"}',
    '{"name": ',
]
WORDS = st.sampled_from([*MARKS, *SCRAPS])


@given(
    words=st.lists(WORDS, max_size=20), seed=st.integers(0, 9), steps=st.lists(st.integers(1, 5), max_size=40)
)
@example(words=["<think>", "</think>", " ", "a"], seed=0, steps=[1] * 20)
@example(words=["a", " ", "<tool_call>", "a", "</tool_call>", "\n", "</think>"], seed=0, steps=[1] * 20)
def test_random_texts_are_split_alike_however_they_come(
    words: list[str], seed: int, steps: list[int]
) -> None:
    text = "".join(words)
    reply = REPLIES["qwen3"]
    edge, ids = cut(reply, text, seed)
    form = form_of(reply, edge)
    parts = parts_of(form, edge, ids, tools=TOOLS)
    whole = joined(parts)
    check_rows(parts, edge, ids)
    assert joined(parts_of(form, edge, ids, tools=TOOLS, steps=steps)) == whole
    # What is in no channel are marks, with the white space beside them.
    shown = edge.text_of(ids)
    if not any(mark in text for mark in ("<think>", "<tool_call>")):
        assert "".join(part.text for part in parts) == shown
    rows = sorted(row for part in parts for row in part.rows)
    kept = b"".join(data for _, data in rows).decode("utf-8", "replace")
    assert is_within(kept, shown)


def is_within(kept: str | bytes, whole: str | bytes) -> bool:
    """Whether characters or bytes stand in others in their order."""
    rest = iter(whole)
    return all(character in rest for character in kept)


@pytest.mark.parametrize("name", ["mistral-named", "gpt-oss", "deepseek", "llama, with a tag", "gemma4"])
@given(data=st.data())
def test_random_texts_of_other_forms_are_split_alike(name: str, data: Any) -> None:
    reply = REPLIES[name]
    words = sorted(
        {*reply.special, *reply.bodies, " ", "\n", "a", "{", "assistant", " to=functions.now", "look"}
    )
    text = "".join(
        data.draw(st.lists(st.sampled_from([*words, reply.text[:40], reply.text[-60:]]), max_size=12))
    )
    edge, ids = cut(reply, text, data.draw(st.integers(0, 9)))
    form = form_of(reply, edge)
    whole = joined(parts_of(form, edge, ids, prefix=reply.prefix, tools=TOOLS))
    check_rows(whole.values(), edge, ids)
    steps = data.draw(st.lists(st.integers(1, 5), max_size=40))
    assert joined(parts_of(form, edge, ids, prefix=reply.prefix, tools=TOOLS, steps=steps)) == whole


def test_a_long_reply_of_many_regions_is_split_whole() -> None:
    reply, count = REPLIES["qwen3"], 300
    text = "<think>hm</think>" + '<tool_call>{"name": "now"}</tool_call> and\n'.join(["so"] * (count + 1))
    edge, ids = cut(reply, text + " " * 5000, seed=0)
    parts = parts_of(form_of(reply, edge), edge, ids, tools=TOOLS, steps=[7] * len(ids))
    assert calls(parts) == [ToolCall("now", "{}")] * count
    assert [part.index for part in parts if part.call] == list(range(count))
    assert said(parts)["content"] == "so" + "and\nso" * count + " " * 5000


def test_what_is_known_comes_before_the_tables() -> None:
    edge = edge_of([b"x<mind>", b"a", b"</mind>", b"b<think>"], (), QWEN3)
    edge.tokenizer.response_template = OWN
    form = template_of(edge)
    assert form is not None
    assert (form.name, form.has_reasoning, form.tools) == ("tokenizer", True, None)
    assert said(parts_of(form, edge, [0, 1, 2, 3], tools=TOOLS)) == {"reasoning": "a", "content": "xb<think>"}
    other = OWN | {"fields": {"content": {"content": "text"}}}
    form = template_of(edge, other)
    assert form is not None
    assert (form.name, form.has_reasoning) == ("given", False)
    assert said(parts_of(form, edge, [0, 1])) == {"content": "x<mind>a"}


@pytest.mark.parametrize(
    "override",
    [
        {},
        {"fields": {}},
        OWN | {"colour": 1},
        OWN | {"fields": {"content": {"content": "yaml"}}},
        OWN | {"fields": {"content": {"open_pattern": "("}}},
        {"fields": {"content": {}}},
        {"fields": {"content": 3}, "start_anchor": "a"},
        [1],
        {"fields": {1j: 2}},
    ],
)
def test_a_form_that_is_none_is_refused(override: Any) -> None:
    with raises(ParameterError, parameter="response_template"):
        template_of(edge_of([b"a"], (), QWEN3), override)


def test_what_a_chat_template_shows_decides_and_is_read_once() -> None:
    edge = edge_of([b"a"], (), QWEN3)
    form = template_of(edge)
    assert template_of(edge) is form
    assert form is not None
    assert (form.name, form.has_reasoning, form.tools) == ("hermes", True, "template")
    form = template_of(edge_of([b"a"], (), "{{ messages }}"))
    assert form is not None
    assert (form.name, form.has_reasoning, form.tools) == ("hermes", False, "text")
    # Calls that a template lays out count for nothing where it says no tools.
    form = template_of(edge_of([b"a"], (), "{{ messages }}[TOOL_CALLS]</think>"))
    assert form is not None
    assert (form.name, form.has_reasoning, form.tools) == ("hermes", True, "text")
    assert template_of(edge_of([b"a"], (), "{{ messages }}{{ tools }}")) is None
    assert template_of(edge_of([b"a"], (), None)) is None
    both = {"default": "{{ messages }}", "tool_use": chatml("<tool_call>")}
    form = template_of(edge_of([b"a"], (), both))
    assert form is not None
    assert form.tools == "template"


def test_no_more_forms_are_kept_than_so_many() -> None:
    edge = edge_of([b"a"], (), QWEN3)
    for number in range(2 * MAX_FORMS):
        form = template_of(edge, OWN | {"start_anchor": str(number)})
        assert form is not None
        assert form.spec["start_anchor"] == str(number)
    assert len(edge.response_forms) == MAX_FORMS


def test_what_a_form_has_no_place_for_is_content() -> None:
    """transformers' parser does not go on where a region without text ends in a mark without text."""
    ends = {"start_anchor": "ai:", "fields": {"content": {"close_pattern": "(?=<x>)"}}}
    edge = edge_of([b"a", b"<x", b">b"], (), QWEN3)
    form = template_of(edge, ends)
    assert form is not None
    for steps in ([], [1, 1, 1]):
        assert said(parts_of(form, edge, [0, 1, 2], steps=steps)) == {"content": "a<x>b"}
