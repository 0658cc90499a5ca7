"""Move reasoning that clients send back to the message field that the model's chat template reads."""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any, Final

from logprobe.errors import ParameterError
from logprobe.text.chat import lay_out

if TYPE_CHECKING:
    from collections.abc import Mapping

    from logprobe.text.chat import Conversation, Layout
    from logprobe.text.edge import TextEdge

FIELDS: Final = ("reasoning_content", "reasoning")
"""Message fields in which clients send reasoning back; our replies contain both, with the same text."""
READ_AS: Final = (*FIELDS, "thinking")
_LEFT_OUT: Final = re.compile(rf"messages\[\d+\]\.({'|'.join(READ_AS)})")


def lay_out_reasoning(messages: Conversation, text: TextEdge, layout: Layout) -> tuple[str, bool]:
    """Render a conversation; also return True if all of its reasoning was rendered.

    Chat templates usually drop the reasoning in earlier turns. If the template ignores some reasoning, the
    reasoning before the last user message is left out; if it still ignores some, all of it is left out.

    Raises:
        ParameterError: for the reasons given in `lay_out`.
    """
    bare = [_without_reasoning(message) for message in messages]
    if bare == [*messages]:
        return lay_out(messages, text, layout), True
    name = _field_read(str(text.template_source.chat_template))
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
    """Return the message field from which a template reads reasoning."""
    read = (name for name in READ_AS if re.search(rf"""[.'"]{name}\b""", template))
    return next(read, READ_AS[0])


def _in_one_field(message: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Move a message's reasoning to the field `name`, unless there is none, or two fields differ."""
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
