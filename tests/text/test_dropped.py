"""Nothing that a message says is passed over in silence, whatever the template."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from logprobe.errors import ParameterError
from logprobe.text import templates
from logprobe.text.chat import Layout, lay_out
from logprobe.text.dropped import MAX_TRIALS
from refusals import raises

if TYPE_CHECKING:
    from collections.abc import Callable

    from logprobe import LLM

# What the templates of published models do: names, tools and calls laid out; roles that fall through; and
# roles that are taken for another.
END = "{{ '\\n' }}"
ANSWER = "{% if add_generation_prompt %}assistant:{% endif %}"
WHOLE = (
    "{% if tools %}tools: {{ tools | tojson }}" + END + "{% endif %}"
    "{% for m in messages %}{{ m.role }}{% if m.name %} ({{ m.name }}){% endif %}: {{ m.content | trim }}"
    "{% for call in m.tool_calls or [] %}<{{ call.function.name }} {{ call.function.arguments | tojson }}>"
    "{% endfor %}" + END + "{% endfor %}" + ANSWER
)
TWO_ROLES = (
    "{% for m in messages %}{% if m.role == 'user' %}U: {{ m.content }}"
    + END
    + "{% elif m.role == 'assistant' %}"
    "A: {{ m.content }}" + END + "{% endif %}{% endfor %}A:"
)
ELSE_USER = (
    "{% for m in messages %}{{ 'A' if m.role == 'assistant' else 'U' }}: {{ m.content }}"
    + END
    + "{% endfor %}A:"
)
FIRST_CALL = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}{% endif %}" + END + "{% endfor %}"
)
QUOTED = "{% for m in messages %}{{ m.role }}: {{ m.content | upper | tojson }}" + END + "{% endfor %}A:"
ASK = {"role": "user", "content": "the cat"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def call(number: int = 1, arguments: Any = '{"at": "the dog"}') -> dict[str, Any]:
    return {"id": f"c{number}", "type": "function", "function": {"name": "look", "arguments": arguments}}


CALLS = {"role": "assistant", "content": None, "tool_calls": [call(1), call(2)]}
RESULTS = [{"role": "tool", "tool_call_id": f"c{number}", "content": f"{number} cats"} for number in (1, 2)]


@pytest.fixture
def laid_out(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """The prompt that a template makes of messages."""

    def lay(template: str, messages: Any, **layout: Any) -> str:
        monkeypatch.setattr(tiny_llm.text.tokenizer, "chat_template", template)
        return lay_out(messages, tiny_llm.text, Layout(**layout))

    return lay


def test_what_the_template_takes_is_laid_out(laid_out: Any) -> None:
    said = [{"role": "developer", "content": "be short"}, ASK | {"name": "Ann"}, CALLS, *RESULTS]
    assert laid_out(WHOLE, said, tools=[TOOL]).splitlines()[1:] == [
        "system: be short",
        "user (Ann): the cat",
        'assistant: <look {"at": "the dog"}><look {"at": "the dog"}>',
        "tool: 1 cats",
        "tool: 2 cats",
        "assistant:",
    ]


def test_what_the_template_writes_in_its_own_way_counts_as_laid_out(laid_out: Any) -> None:
    assert laid_out(QUOTED, [ASK]) == 'user: "THE CAT"\nA:'


@pytest.mark.parametrize(
    ("template", "messages", "named"),
    [
        (TWO_ROLES, [ASK | {"name": "Ann"}], r"messages\[0\]\.name"),
        (TWO_ROLES, [{"role": "system", "content": "be short"}, ASK], r"messages\[0\]\.content"),
        # Its text stands in another message, too.
        (TWO_ROLES, [{"role": "system", "content": "the"}, ASK], r"messages\[0\]\.content"),
        (TWO_ROLES, [{"role": "developer", "content": "be short"}, ASK], r"messages\[0\]\.content"),
        (TWO_ROLES, [ASK, {"role": "wizard", "content": "abra"}], r"messages\[1\]\.content"),
        (TWO_ROLES, [ASK | {"mood": 3}], r"messages\[0\]\.mood"),
        (TWO_ROLES, [ASK | {"flags": [False]}], r"messages\[0\]\.flags"),
        (
            ELSE_USER,
            [ASK, {"role": "wizard", "content": "abra"}],
            r"messages\[1\]\.role: .*'wizard' like 'user'",
        ),
        (FIRST_CALL, [ASK, CALLS], r"messages\[1\]\.tool_calls\[1\]"),
        (WHOLE, [ASK, CALLS, *RESULTS[::-1]], r"messages\[2\]\.tool_call_id: .*in the order of their calls"),
        (WHOLE, [ASK, CALLS | {"reasoning_content": "a cat?"}], r"messages\[1\]\.reasoning_content"),
    ],
)
def test_what_the_template_passes_over_is_refused_by_its_place(
    laid_out: Any, template: str, messages: Any, named: str
) -> None:
    with pytest.raises(ParameterError, match=named):
        laid_out(template, messages)


@pytest.mark.parametrize("template", [TWO_ROLES, ELSE_USER, WHOLE])
def test_a_shape_that_was_laid_out_whole_vouches_for_itself_alone(laid_out: Any, template: str) -> None:
    talk = [ASK, {"role": "assistant", "content": "a dog"}, ASK]
    first = laid_out(template, talk)
    other = [ASK | {"content": "two cats"}, *talk[1:]]
    assert laid_out(template, other) == first.replace("the cat", "two cats", 1)
    drops = "{% for m in messages[1:] %}{{ m.role }}: {{ m.content }}{% endfor %}"
    with raises(ParameterError, parameter="messages[0].content"):
        laid_out(drops, talk)
    if template == TWO_ROLES:
        with raises(ParameterError, parameter="messages[0].content"):
            laid_out(template, [{"role": "system", "content": "be short"}, *talk[1:]])
    with raises(ParameterError, parameter="messages[2].mood"):
        laid_out(template, [*talk[:2], ASK | {"mood": "sad"}])


def test_a_conversation_of_a_known_shape_is_laid_out_once(
    laid_out: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    laid_out(TWO_ROLES, [ASK])
    lay, count = templates.render_chat, []
    monkeypatch.setattr(templates, "render_chat", lambda *args, **more: count.append(1) or lay(*args, **more))
    laid_out(TWO_ROLES, [ASK | {"content": "a dog"}])
    assert len(count) == 1
    laid_out(TWO_ROLES, [ASK | {"content": ""}, ASK])
    assert len(count) > 2


def test_empty_fields_of_a_reply_that_comes_back_say_nothing(laid_out: Any) -> None:
    answer = {"role": "assistant", "content": "a dog", "refusal": None, "tool_calls": None, "annotations": []}
    assert laid_out(TWO_ROLES, [ASK, answer]) == "U: the cat\nA: a dog\nA:"


@pytest.mark.parametrize(
    ("calls", "named"),
    [
        ("look", "tool_calls"),
        ([{"function": {}}], r"tool_calls\[0\]"),
        ([call(1, "{")], r"tool_calls\[0\]\.function\.arguments: are not valid JSON"),
        ([call(1, "[]")], r"tool_calls\[0\]\.function\.arguments"),
    ],
)
def test_calls_of_a_wrong_shape_are_refused(laid_out: Any, calls: Any, named: str) -> None:
    with pytest.raises(ParameterError, match=named):
        laid_out(WHOLE, [ASK, {"role": "assistant", "tool_calls": calls}])


def test_tools_go_to_templates_that_take_them(laid_out: Any) -> None:
    assert '"name": "look"' in laid_out(WHOLE, [ASK], tools=[TOOL])
    with pytest.raises(ParameterError, match="tools: the model's chat template ignores them"):
        laid_out(TWO_ROLES, [ASK], tools=[TOOL])
    assert laid_out(TWO_ROLES, [ASK], tools=[]) == laid_out(TWO_ROLES, [ASK])


def test_variables_go_to_templates_that_read_them(laid_out: Any) -> None:
    template = "{% set own = 1 %}{% if thinks is defined and not thinks %}quick {% endif %}" + TWO_ROLES
    assert laid_out(template, [ASK], chat_template_kwargs={"thinks": False}).startswith("quick U: ")
    for name, says in {"thinkz": "it reads thinks", "own": "is not read", "messages": "is reserved"}.items():
        with pytest.raises(ParameterError, match=rf"chat_template_kwargs\.{name}: .*{says}"):
            laid_out(template, [ASK], chat_template_kwargs={name: 1})


def test_an_assistants_message_is_continued(laid_out: Any) -> None:
    begun = [ASK, {"role": "assistant", "content": "the dog and"}]
    assert laid_out(WHOLE, begun, continue_final_message=True) == "user: the cat\nassistant: the dog and"
    assert laid_out(WHOLE, begun).endswith("assistant: the dog and\nassistant:")
    assert laid_out(WHOLE, begun, add_generation_prompt=False).endswith("assistant: the dog and\n")
    with pytest.raises(ParameterError, match=r"continue_final_message: .* set one of them"):
        laid_out(WHOLE, begun, continue_final_message=True, add_generation_prompt=True)


@pytest.mark.parametrize("content", ["the dog ", "the dog\n", " the dog", "\n", "\u2003"])
def test_whitespace_that_a_template_trims_of_a_continued_message_is_refused(
    laid_out: Any, content: str
) -> None:
    begun = [ASK, {"role": "assistant", "content": content}]
    with raises(ParameterError, parameter="messages[1].content"):
        laid_out(WHOLE.replace(": {{", ":{{"), begun, continue_final_message=True)
    kept = laid_out(TWO_ROLES, begun, continue_final_message=True)
    assert kept == f"U: the cat\nA: {content}"


def test_an_empty_message_is_continued_at_its_beginning(laid_out: Any) -> None:
    begun = [ASK, {"role": "assistant", "content": ""}]
    for template in (WHOLE, TWO_ROLES):
        prompt = laid_out(template, [ASK, ASK | {"role": "assistant"}], continue_final_message=True)
        assert laid_out(template, begun, continue_final_message=True) == prompt.removesuffix("the cat")


def test_a_part_that_says_more_than_text_is_refused(laid_out: Any) -> None:
    part = {"type": "text", "text": "the cat", "cache_control": {"type": "ephemeral"}}
    with pytest.raises(ParameterError, match=r"messages\[0\]\.content\.cache_control"):
        laid_out(WHOLE, [{"role": "user", "content": [part]}])


def test_a_conversation_that_would_need_many_trials_is_refused_before_them(laid_out: Any) -> None:
    messages = [ASK | {"mood": 1}] * (MAX_TRIALS + 1)
    with pytest.raises(ParameterError, match=f"messages: .*: {MAX_TRIALS + 1} checks, at most {MAX_TRIALS}"):
        laid_out(WHOLE, messages)


def test_a_template_that_takes_arguments_as_their_text_has_them(laid_out: Any) -> None:
    joins = (
        "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}"
        "{{ '<' + call.function.name + ' ' + call.function.arguments + '>' }}{% endfor %}{% endfor %}"
    )
    assert laid_out(joins, [ASK, CALLS]) == "the cat" + '<look {"at": "the dog"}>' * 2
    with raises(ParameterError, parameter="messages"):
        laid_out(joins + "{{ raise_exception('no') }}", [ASK, CALLS])
