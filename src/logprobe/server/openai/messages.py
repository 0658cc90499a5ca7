"""The fields that messages of OpenAI's clients have; others are refused where nothing else would do it.

Before it: the messages of a body. After it: the chat template, which is asked about each field that says
something, and about no empty one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from logprobe.server.http.errors import bad_request
from logprobe.text.chat import EMPTY, PART_REPORTS, TEXT_PARTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

MESSAGE_FIELDS: Final = frozenset(
    {"role", "content", "name", "tool_calls", "tool_call_id", "function_call", "refusal", "audio"}
    | {"annotations", "parsed", "phase"}
    # What other servers' replies have.
    | {"reasoning", "reasoning_content", "reasoning_details", "images", "provider_specific_fields"}
)
PART_FIELDS: Final = frozenset(
    {"type", "text", "parsed", "prompt_cache_breakpoint", "cache_control", *PART_REPORTS}
)
CALL_FIELDS: Final = frozenset({"id", "type", "index", "function"})
FUNCTION_FIELDS: Final = frozenset({"name", "arguments", "parsed_arguments"})


def check_fields(messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuse fields of no known name that say nothing; those that say something are the template's to take.

    Raises:
        ApiError: 400 naming the field.
    """
    for place, message in enumerate(messages):
        where = f"messages[{place}]"
        _check_known((name for name, value in message.items() if value in EMPTY), MESSAGE_FIELDS, where)
        for part in _objects(message.get("content")):
            if part.get("type") in TEXT_PARTS:
                _check_known(part, PART_FIELDS, f"{where}.content")
        for number, call in enumerate(_objects(message.get("tool_calls"))):
            _check_known(call, CALL_FIELDS, f"{where}.tool_calls[{number}]")
            for function in _objects([call.get("function")]):
                _check_known(function, FUNCTION_FIELDS, f"{where}.tool_calls[{number}].function")


def _objects(values: Any) -> list[dict[str, Any]]:
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []


def _check_known(names: Iterable[str], known: frozenset[str], where: str) -> None:
    for name in names:
        if name not in known:
            message = "is no field that is read here; leave it out"
            raise bad_request(f"{where}.{name}", message, code="unknown_parameter")
