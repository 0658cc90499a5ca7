"""A conversation → the text or the ids that the model's own chat template makes of it.

Before it: messages as OpenAI's clients write them. After it: a prompt like any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from logprobe.errors import ParameterError, require

if TYPE_CHECKING:
    from logprobe.records.values import IntArray
    from logprobe.text.edge import TextEdge


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
