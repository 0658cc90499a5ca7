"""Chat templates are rendered to the text that transformers renders."""

from __future__ import annotations

import re
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from conftest import CHAT_TEMPLATE
from logprobe.engine.backends.start import text_edge
from logprobe.models import load_tokenizer, resolve
from logprobe.text.chat import Layout, lay_out
from logprobe.text.templates import render_chat

if TYPE_CHECKING:
    from logprobe import LLM

CHATML = (
    "{%- if tools %}\n    {{- '<|im_start|>system\\n' }}\n    {%- for tool in tools %}\n"
    "        {{- '\\n' }}\n        {{- tool | tojson }}\n    {%- endfor %}\n{%- endif %}\n"
    "{% for message in messages %}\n"
    "    {% if message['role'] == 'system' and not loop.first %}\n        {% continue %}\n    {% endif %}\n"
    "{{'<|im_start|>' + message['role'] + '\\n' }}{{ message.content }}{{ '<|im_end|>' + '\\n'}}\n"
    "    {% if message.tool_calls %}{% for call in message.tool_calls %}"
    "{{ call.function.arguments | tojson(indent=2) }}{% endfor %}{% endif %}\n"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TEMPLATES = {
    "of the tests": CHAT_TEMPLATE,
    "ChatML with tools": CHATML,
    "trimmed": "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}\n\n{% endfor %}",
    "assistant's text marked": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{% set x = 1 %}{{ m.content }}"
        "{% endgeneration %}{{ x is defined }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    ),
    "loops": (
        "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}"
    ),
    "namespace": (
        "{% set n = namespace(last='', count=0) %}{% for m in messages %}{% set n.last = m.content %}"
        "{% set n.count = n.count + 1 %}{% endfor %}{{ n.count }}{{ n.last }}"
    ),
    "dict": (
        "{% set d = dict(a=1, **{'b': messages[0].role}) %}{{ d | tojson }}{{ dict.fromkeys([1, 2], 0) }}"
    ),
    "JSON": (
        "{{ messages | tojson }}{{ messages | tojson(indent=1) }}{{ messages | tojson(ensure_ascii=true) }}"
        "{{ tools | tojson(separators=(',', ':'), sort_keys=true) }}{{ messages | tojson(true, 2) }}"
    ),
    "reasoning": (
        "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.reasoning }}|{{ m.content }}"
        "{% endfor %}"
    ),
    "variables": (
        "{{ bos_token }}{{ eos_token }}{{ style }}{{ documents is none }}{{ tools is none }}"
        "{{ add_generation_prompt }}{{ messages | length }}{{ missing }}{{ messages[0].content }}"
    ),
    "spaces": "  {% if true %}\n  a \n  {% endif %}\n\n{{ messages[0].content }}\n",
    "macro": (
        "{% macro f(m) %}<{{ m.content | upper }}>{% endmacro %}{% for m in messages %}{{ f(m) }}{% endfor %}"
    ),
    "methods": (
        "{% for m in messages %}{{ m.get('content').split(' ')[-1].strip('.') }}{{ m.items() | list }}"
        "{% endfor %}{{ messages[-1]['content'][::-1] }}"
    ),
    "year": "{{ strftime_now('%Y') }}{{ messages[0].content }}",
}
TEXTS = [
    "",
    " ",
    "hi",
    "  spaces around \n",
    "{{ messages }}{% if %}<|im_start|>&lt;\"'",
    "👩‍👩‍👧‍👦 é́ 深度学习 العربية \u2028\x00\x7f",
    "CONTINUE_FINAL_MESSAGE_TAG",
]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "é <b>", "parameters": {"type": "object"}},
    }
]
VARIABLES = {"bos_token": "<s>", "eos_token": "</s>", "style": "é\n"}


def conversations() -> list[list[dict[str, Any]]]:
    found = []
    for text in TEXTS:
        user, answer = {"role": "user", "content": text}, {"role": "assistant", "content": text}
        found += [
            [user],
            [{"role": "system", "content": text}, user, answer],
            [user, answer, {"role": "system", "content": "again"}, user],
            [user, answer | {"reasoning": "since", "thinking": None}],
            [user, answer | {"thinking": text}],
            [user, answer | {"tool_calls": [{"function": {"name": "weather", "arguments": {"at": text}}}]}],
        ]
    return found


def both(template: str, messages: list[Any], **options: Any) -> tuple[Any, Any]:
    """The texts here and in transformers, or where it raises, the errors."""
    variables = options.pop("variables", {})

    def ours() -> str:
        return render_chat(template, messages, variables=variables, **options)

    def theirs() -> str:
        # `apply_chat_template` drops the fields that are None.
        chat = [{name: value for name, value in one.items() if value is not None} for one in messages]
        rendered: Any = render_jinja_template([chat], chat_template=template, **options, **variables)
        text: str = rendered[0][0]
        return text

    def outcome(render: Any) -> Any:
        try:
            return render()
        except Exception as error:  # noqa: BLE001 - a template may raise anything
            return type(error)

    return outcome(ours), outcome(theirs)


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_each_template_gives_the_text_of_transformers(template: str) -> None:
    texts = 0
    for messages in conversations():
        for options in (
            {},
            {"add_generation_prompt": True},
            {"tools": TOOLS, "add_generation_prompt": True},
            {"continue_final_message": True},
        ):
            ours, theirs = both(template, messages, variables=VARIABLES, **options)
            assert ours == theirs
            texts += isinstance(ours, str)
    assert texts > len(conversations())


REFUSED = {
    "raised": "{{ raise_exception('no cats') }}",
    "syntax": "{% for %}",
    "undefined": "{{ messages[0].a.b }}",
    "a changed input": "{{ messages.append(1) }}",
    "a changed message": "{{ messages[0].update({'role': 'x'}) }}",
    "internals": "{{ ''.__class__.__mro__ }}{{ messages.__class__.__base__.__subclasses__() }}",
    "a namespace's internals": "{% set n = namespace(__class__=1) %}",
    "a namespace's later internals": "{% set n = namespace() %}{% set n._x = 1 %}",
    "the function's globals": "{{ raise_exception.__globals__ }}{{ strftime_now.__code__.co_code }}",
    "the class of dict": "{{ dict.__mro__[1] }}",
}


@pytest.mark.parametrize("template", REFUSED.values(), ids=REFUSED.keys())
def test_a_template_that_transformers_refuses_is_refused(template: str) -> None:
    ours, theirs = both(template, [{"role": "user", "content": "hi"}])
    assert ours is theirs
    assert issubclass(ours, TemplateError)


def test_a_message_that_the_template_leaves_out_cannot_be_continued() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    for template in ("{{ messages[0].content }}", "{{ messages[0].role }}"):
        assert both(template, messages, continue_final_message=True) == (ValueError, ValueError)
    assert both(CHAT_TEMPLATE, [{"role": "user"}], continue_final_message=True) == (ValueError, ValueError)


@dataclass
class Point:
    x: int


def test_values_reach_a_template_as_plain_data() -> None:
    class Text(str):
        __slots__ = ()

        def shout(self) -> str:
            return "loud"

    variables = {
        "a": [Text("a"), np.float32(0.5), np.bool_(0), True, None, 3, 2.5],
        "b": {"t": (1, np.int64(2)), "p": Point(3), "o": object(), "n": np.arange(3)},
    }
    messages = [{"role": "user", "content": "hi"}]
    ours, theirs = both("{{ a }}{{ b }}{{ b.p.x }}{{ b.o }}{{ a[2] is true }}", messages, variables=variables)
    assert ours == theirs
    assert re.search(r"<object>.*<ndarray>", ours)
    ours, theirs = both("{{ a[0].shout() }}", messages, variables=variables)
    assert ours is theirs
    assert issubclass(ours, TemplateError)


@pytest.mark.real_model
@pytest.mark.parametrize(
    "layout",
    [Layout(), Layout(add_generation_prompt=False), Layout(continue_final_message=True)],
    ids=["answer", "whole", "continued"],
)
def test_a_real_models_conversations_are_those_of_transformers(
    layout: Layout,
) -> None:
    files = resolve("smollm2")
    edge, own = text_edge(files), load_tokenizer(files)
    for text in TEXTS[2:]:
        for before in ([], [{"role": "system", "content": "be brief"}]):
            messages = [*before, {"role": "user", "content": "hi"}, {"role": "assistant", "content": text}]
            laid_out = lay_out(messages, edge, layout)
            assert edge.template_source is edge.fast
            assert laid_out == own.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=layout.begins_a_message,
                continue_final_message=layout.continue_final_message,
            )


def test_named_templates_are_chosen_as_transformers_chooses_them(tiny_llm: LLM) -> None:
    tokenizer = copy(tiny_llm.text.tokenizer)
    edge = replace(tiny_llm.text, load_tokenizer=lambda: tokenizer)
    default = "{% for m in messages %}{{ m.content }}|{% endfor %}{{ style }}"
    tokenizer.chat_template = {"default": default, "tool_use": "{{ tools | tojson }}" + default}
    messages = [{"role": "user", "content": "hi"}]
    for tools in (None, TOOLS):
        expected = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, style="!")
        layout = Layout(tools=tools, add_generation_prompt=False, chat_template_kwargs={"style": "!"})
        assert lay_out(messages, edge, layout) == expected
