"""Render chat templates with jinja2 alone, with the same result as transformers 5.

The environment is that of transformers' `render_jinja_template`: a sandbox in which inputs cannot be changed,
the functions `raise_exception`, `strftime_now`, `dict` and `namespace`, a filter `tojson` without HTML
escapes, `{% break %}` and `{% continue %}`, and `{% generation %}`, which marks the assistant's text.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jinja2 import Template
    from jinja2.parser import Parser

REASONING: Final = ("reasoning_content", "thinking", "reasoning")
"""Message fields that may hold reasoning. Templates read the first; gpt-oss templates read the second."""
END_MARK: Final = "CONTINUE_FINAL_MESSAGE_TAG "  # rendered after the message that is to be continued


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """Render a conversation as transformers' `apply_chat_template` does.

    Args:
        template: the chat template.
        messages: the conversation; fields whose value is None are left out.
        tools: JSON schemas of the tools.
        add_generation_prompt: if True, the text ends with the start of the assistant's turn.
        continue_final_message: if True, the text ends with the content of the last message.
        variables: further template variables, such as the special tokens by name.

    Raises:
        Exception: the template raised an exception, which may be of any type.
        ValueError: the last message cannot be continued.
    """
    compiled = _compiled(template)
    chat = [_plain({name: value for name, value in one.items() if value is not None}) for one in messages]
    chat = [_with_reasoning(message) for message in chat]
    final = _marked(template, chat) if continue_final_message else ""
    text = compiled.render(
        {
            **_plain(variables or {}),
            "messages": chat,
            "tools": _plain(tools),
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
    )
    return _before_mark(text, final) if continue_final_message else text


def _marked(template: str, chat: list[dict[str, Any]]) -> str:
    """Append `END_MARK` to the content of the last message; return the content without the mark."""
    final = chat[-1].get("content")
    if not isinstance(final, str) or "content" not in template:
        raise ValueError("the last message has no content that the chat template renders")
    chat[-1]["content"] = final + END_MARK
    return final


def _before_mark(text: str, final: str) -> str:
    """Return the part of the rendered text before the end mark; `final` is the last message's content."""
    mark = END_MARK.strip()
    if final.strip() not in text or mark not in text:
        raise ValueError("the chat template does not render the last message as it is")
    at = text.rindex(mark)
    if text.startswith(END_MARK, at):
        return text[:at]
    return text[:at].rstrip()  # the template trims contents


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with its reasoning in both fields that templates read."""
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """Copy a value as plain JSON types, because a template could call unsafe methods of other objects."""
    if value is None or type(value) in {str, int, float, bool}:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, tuple):
        return tuple(_plain(one) for one in value)
    if isinstance(value, np.generic):
        return _plain(value.item())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if callable(dump := getattr(value, "model_dump", None)):  # a Pydantic model
        return _plain(dump())
    return f"<{type(value).__name__}>"


class _GenerationTag(Extension):
    """The tag `{% generation %}` … `{% endgeneration %}`, which is rendered as its body."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> Any:
        return caller()


class _Dict:
    """The function `dict` in templates, without the other attributes of the class."""

    def __call__(self, *args: Any, **fields: Any) -> dict[Any, Any]:
        return dict(*args, **fields)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """The function `namespace` in templates; attributes must not begin with an underscore."""

    def __init__(*args: Any, **fields: Any) -> None:  # so that a field may be named `self`
        own, *others = args
        attributes = dict(*others, **fields)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(own, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace of a chat template cannot have the attribute {name!r}")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005 - local time, as in transformers


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@lru_cache(maxsize=16)
def _compiled(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment.from_string(template)
