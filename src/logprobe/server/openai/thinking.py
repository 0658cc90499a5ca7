"""Reasoning that requests ask for, and that they send back, in the words of the model's own chat template.

Before it: a typed body. After it: the template's variables, and messages as it reads them.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any, Final

from logprobe.errors import ParameterError
from logprobe.server.http.errors import bad_request
from logprobe.text.chat import lay_out

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Set as AbstractSet

    from logprobe.text.chat import Conversation, Layout
    from logprobe.text.edge import TextEdge

EFFORT: Final = "reasoning_effort"
THINKING: Final = "enable_thinking"
"""Variables by which templates know how to reason."""
FIELDS: Final = ("reasoning_content", "reasoning")
"""A message's fields in which clients send reasoning back; a reply has both, with one text."""
READ_AS: Final = (*FIELDS, "thinking")
_LEFT_OUT: Final = re.compile(rf"messages\[\d+\]\.({'|'.join(READ_AS)})")


def variables_by_field(body: Any) -> dict[str, dict[str, Any]]:
    """The fields of a body that say how to reason, each with the variables that say the same."""
    reasoning, kwargs = getattr(body, "reasoning", None), getattr(body, "chat_template_kwargs", None) or {}
    efforts = {
        "reasoning_effort": getattr(body, "reasoning_effort", None),
        "reasoning.effort": None if reasoning is None else reasoning.effort,
    }
    switches = {
        "chat_template_kwargs.enable_thinking": kwargs.get(THINKING),
        "enable_thinking": getattr(body, "enable_thinking", None),
    }
    fields: dict[str, dict[str, Any]] = {
        name: {EFFORT: effort} | ({THINKING: False} if effort == "none" else {})
        for name, effort in efforts.items()
        if effort is not None
    }
    return fields | {name: {THINKING: value} for name, value in switches.items() if value is not None}


def unread_fields(body: Any, known: AbstractSet[str]) -> list[str]:
    """Those that say nothing to a template that reads these variables."""
    return [name for name, variables in variables_by_field(body).items() if known.isdisjoint(variables)]


def template_variables(body: Any, known: AbstractSet[str]) -> dict[str, Any]:
    """The variables that a body gives a template, of those about reasoning the ones that it knows.

    Raises:
        ApiError: 400, two fields say different things.
    """
    given = getattr(body, "chat_template_kwargs", None) or {}
    variables = {name: value for name, value in given.items() if name != THINKING}
    for field, values in variables_by_field(body).items():
        for name in known & values.keys():
            if variables.setdefault(name, values[name]) != values[name]:
                message = f"and another field give {name} different values; give one of them"
                raise bad_request(field, message)
    return variables


def lay_out_reasoning(messages: Conversation, text: TextEdge, layout: Layout) -> tuple[str, bool]:
    """A conversation laid out, and whether with all of its reasoning.

    Models are made not to read what they thought in earlier turns, so that of those is left out where the
    template passes it over, and what it thought since the last question where it passes that over, too.

    Raises:
        ParameterError: as `lay_out` does.
    """
    bare = [_without_reasoning(message) for message in messages]
    if bare == [*messages]:
        return lay_out(messages, text, layout), True
    name = _field_read(str(text.tokenizer.chat_template))
    whole = [_in_one_field(message, name) for message in messages]
    last = max((index for index, message in enumerate(bare) if message.get("role") == "user"), default=0)
    for first in (0, last):
        try:
            return lay_out([*bare[:first], *whole[first:]], text, layout), not first
        except ParameterError as error:
            if not _LEFT_OUT.fullmatch(error.parameter):
                raise
    return lay_out(bare, text, layout), False


@functools.lru_cache(maxsize=16)
def _field_read(template: str) -> str:
    """The field of a message in which a template looks for reasoning."""
    read = (name for name in READ_AS if re.search(rf"""[.'"]{name}\b""", template))
    return next(read, READ_AS[0])


def _in_one_field(message: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A message with its reasoning in the field that is read; as it is where it has two of them."""
    texts = {message[field] for field in FIELDS if _is_reasoning(message, field)}
    if len(texts) != 1:
        return message
    (text,) = texts
    return _without_reasoning(message) | {name: text}


def _without_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    return {field: value for field, value in message.items() if not _is_reasoning(message, field)}


def _is_reasoning(message: Mapping[str, Any], field: str) -> bool:
    is_text = isinstance(message.get(field), str) and bool(message[field])
    return field in FIELDS and is_text and message.get("role") == "assistant"
