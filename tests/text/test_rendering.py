"""Chat templates that cost anything are rendered apart, within limits, as transformers renders them here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from conftest import CHAT_TEMPLATE
from logprobe.errors import ParameterError
from logprobe.text import rendering, templates
from logprobe.text.chat import Layout, lay_out, variables_of
from logprobe.text.edge import TextEdge
from logprobe.text.template_cost import is_cheap
from refusals import raises

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
ENDLESS = {
    "nested loops": LOOPS,
    "a loop's filter": "{% for a in range(99999) if range(99999) | list | sum < 0 %}{% endfor %}" * 99,
}
TOO_LARGE = {
    "repetition": "{{ 'a' * 3000000000 }}",
    "repetition of a variable": "{{ messages[0].role * 3000000000 }}",
    "padding": "{{ messages[0].role.ljust(3000000000) }}",
    "filter": "{{ messages[0].role | center(3000000000) }}",
    "format": "{{ '%3000000000d' % 1 }}",
    "doubling": "{% set n = namespace(x='a') %}{% for a in range(40) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling in a row": "{% set x = messages[0].role %}" + "{% set x = x ~ x %}" * 40,
    "indent": "{{ messages | tojson(indent=3000000000) }}",
    "recursion": "{% macro f(x) %}{{ f(x ~ x) }}{% endmacro %}{{ f('a') }}",
    "depth": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
}
NESTED = (
    "{{ bos_token }}{% macro line(m) %}{% for part in m.content.split(' ') %}[{{ part | upper }}]{% endfor %}"
    "{% endmacro %}{% if tools %}{{ tools | tojson(indent=1) }}{% endif %}{% for message in messages %}"
    "{{ message.role }}: {{ line(message) }}{{ message.content }}\n{% endfor %}{{ style }}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
MESSAGES = [{"role": "user", "content": "the cat é"}, {"role": "assistant", "content": "and the dog"}]
TOOL = {"type": "function", "function": {"name": "the_cat", "parameters": {"type": "object"}}}


@pytest.fixture
def edge(tiny_model_folder: Path) -> TextEdge:
    from transformers import AutoTokenizer

    return TextEdge.of(AutoTokenizer.from_pretrained(tiny_model_folder))


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    rendering.PROCESS.close()
    yield
    rendering.PROCESS.close()


@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS.keys())
def test_a_template_without_end_is_refused(
    edge: TextEdge, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendering, "LIMIT_S", 1.0)
    edge.tokenizer.chat_template = CHAT_TEMPLATE + template
    for _ in range(rendering.MAX_TIMEOUTS):
        with raises(ParameterError, parameter="messages"):
            lay_out(MESSAGES, edge)
    started: list[Any] = []
    monkeypatch.setattr(rendering.TemplateProcess, "_start", started.append)
    with raises(ParameterError, parameter="messages"):
        lay_out(MESSAGES, edge)
    assert started == []


@pytest.mark.parametrize("template", TOO_LARGE.values(), ids=TOO_LARGE.keys())
def test_a_template_without_bounds_takes_no_memory_here(
    edge: TextEdge, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered: list[Any] = []
    monkeypatch.setattr(templates, "render_chat", lambda *_, **__: rendered.append(1) or "")
    edge.tokenizer.chat_template = CHAT_TEMPLATE + template
    with raises(ParameterError, parameter="messages"):
        lay_out(MESSAGES, edge)
    assert rendered == []


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(add_generation_prompt=False),
        Layout(continue_final_message=True),
        Layout(tools=[TOOL]),
        Layout(chat_template_kwargs={"style": "é\n"}),
    ],
)
def test_what_is_rendered_apart_is_what_transformers_renders(edge: TextEdge, layout: Layout) -> None:
    edge.tokenizer.chat_template = NESTED
    assert not is_cheap(NESTED)
    expected = edge.tokenizer.apply_chat_template(
        MESSAGES,
        tools=layout.tools,
        add_generation_prompt=layout.begins_a_message,
        continue_final_message=layout.continue_final_message,
        tokenize=False,
        **(layout.chat_template_kwargs or {}),
    )
    assert lay_out(MESSAGES, edge, layout) == expected


def test_what_a_template_says_is_passed_on(edge: TextEdge) -> None:
    edge.tokenizer.chat_template = LOOPS.replace("99999", "3") + "{{ raise_exception('no cats here') }}"
    with raises(ParameterError, parameter="messages", match="no cats here"):
        lay_out(MESSAGES, edge)


def test_a_process_that_was_killed_is_started_again(edge: TextEdge) -> None:
    edge.tokenizer.chat_template = NESTED
    first = lay_out(MESSAGES, edge)
    process: Any = rendering.PROCESS._process
    process.kill()
    process.wait()
    assert lay_out(MESSAGES, edge) == first


@pytest.mark.parametrize("template", [*ENDLESS.values(), *TOO_LARGE.values()])
def test_hostile_templates_are_known(template: str) -> None:
    assert not is_cheap(template)


COMMON = {
    "plain": CHAT_TEMPLATE,
    "ChatML": (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|s|>' }}"
        "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>'}}"
        "{% endfor %}"
    ),
    "Gemma": (
        "{{ bos_token }}{% for message in messages %}"
        "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% if message['role'] == 'assistant' %}"
        "{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}"
        "{{ '<turn>' + role + '\n' + message['content'] | trim + '<end>\n' }}{% endfor %}"
    ),
}


@pytest.mark.parametrize("template", COMMON.values(), ids=COMMON.keys())
def test_common_templates_stay_in_this_process(template: str) -> None:
    assert is_cheap(template)


def test_variables_are_read_without_computing_constants() -> None:
    template = "{{ 'a' * 3000000000 }}{{ 'a' | center(3000000000) }}{{ style }}"
    assert variables_of(template) == {"style"}
