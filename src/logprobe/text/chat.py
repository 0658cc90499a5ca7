"""A conversation → the text or the ids that the model's own chat template makes of it.

Before it: messages as OpenAI's clients write them. After it: a prompt like any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from logprobe.errors import ParameterError, require

if TYPE_CHECKING:
    from logprobe.records.values import IntArray
    from logprobe.text.edge import TextEdge

Conversation: TypeAlias = "Sequence[Mapping[str, Any]]"
Conversations: TypeAlias = "str | Conversation | Sequence[Conversation]"
"""A text or the content parts of one user's message, one conversation, or many."""


def as_conversations(messages: Conversations) -> list[Conversation]:
    """Each conversation as its messages.

    Raises:
        ParameterError: nothing of the kind, or a conversation without a message.
    """
    if isinstance(messages, str):
        return [[{"role": "user", "content": messages}]]
    is_list = isinstance(messages, Sequence) and not isinstance(messages, bytes)
    known = "must be a list of messages, a list of such lists, or a text"
    require(is_list, "messages", f"{known}, got {messages!r:.60}")
    are_lists = [isinstance(item, list | tuple) for item in messages]
    require(all(are_lists) or not any(are_lists), "messages", "holds messages beside lists of messages")
    if not messages:
        return []
    many: list[Any] = list(messages) if are_lists[0] else [messages]
    for place, conversation in enumerate(many):
        require(conversation, f"messages[{place}]", "is empty; give at least one message")
    if not are_lists[0] and all(isinstance(item, Mapping) and _is_part(item) for item in messages):
        return [[{"role": "user", "content": list(messages)}]]
    return cast("list[Conversation]", many)


def _is_part(item: Mapping[str, Any]) -> bool:
    return "type" in item and "role" not in item


def read_messages(messages: Sequence[Mapping[str, Any]], text: TextEdge) -> IntArray:
    """A conversation as ids; see `lay_out`."""
    return text.encode(lay_out(messages, text), add_special_tokens=False)


def lay_out(messages: Sequence[Mapping[str, Any]], text: TextEdge) -> str:
    """A conversation laid out by the model's chat template, ready for the assistant's turn.

    Raises:
        ParameterError: no template, no role, parts other than text, or the template's refusal.
    """
    tokenizer = text.tokenizer
    if tokenizer.chat_template is None:
        raise ParameterError(
            "messages", "the model has no chat template; complete a text instead (generate, /v1/completions)"
        )
    require(isinstance(messages, Sequence) and not isinstance(messages, str), "messages", "must be a list")
    plain = [_plain_message(message, place) for place, message in enumerate(messages)]
    try:
        laid_out: str = tokenizer.apply_chat_template(plain, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # a template is a program of the model's and may raise anything
        raise ParameterError("messages", f"the model's chat template refuses them: {error}") from error
    return laid_out


def _plain_message(message: Mapping[str, Any], place: int) -> dict[str, Any]:
    where = f"messages[{place}]"
    require(isinstance(message, Mapping), where, f"must be a dict with role and content, got {message!r:.60}")
    if not isinstance(message.get("role"), str):
        raise ParameterError(f"{where}.role", "must be a string")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_part_text(part, f"{where}.content") for part in content)
    elif content is None and message["role"] == "assistant":
        content = ""
    if not isinstance(content, str):
        raise ParameterError(f"{where}.content", "must be a string or a list of text parts")
    return {**message, "content": content}


def _part_text(part: Any, where: str) -> str:
    is_part = isinstance(part, dict) and part.get("type") in {"text", "input_text", "output_text"}
    if not is_part or not isinstance(part.get("text"), str):
        raise ParameterError(where, "holds a part other than {type: text, text: ...}; this model reads text")
    found: str = part["text"]
    return found
