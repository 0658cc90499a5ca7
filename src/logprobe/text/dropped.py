"""Whether a chat template lays out everything in a conversation.

A template is a program and may pass over whatever it was not written for. So the conversation is rendered
once more with a mark in place of each field, and each field whose mark is missing is left out by itself. What
makes no difference then, the model would never see.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from logprobe.errors import ParameterError, require, shortened

Messages: TypeAlias = Sequence[dict[str, Any]]
Render: TypeAlias = Callable[[Messages], str]

KNOWN_ROLES: Final = ("user", "assistant", "system")
MARK: Final = re.compile(r"Mark\d+End")
MAX_TRIALS: Final = 128  # renderings of one conversation
OWN_TEXT: Final = -1
"""The number of a message that nobody wrote: it says the tools."""


class FieldPath(NamedTuple):
    """Where a conversation holds a field of a message, or one of a message's tool calls."""

    message: int
    field: str
    call: int | None = None

    def __str__(self) -> str:
        number = "" if self.call is None else f"[{self.call}]"
        return f"messages[{self.message}].{self.field}{number}"


def check_laid_out(
    messages: Messages, render: Render, laid_out: str, numbers: Sequence[int] | None = None
) -> bool:
    """Refuse what the template passed over when it made `laid_out` of the messages.

    `numbers` are those that errors call the messages by, where others were made of what was given; `OWN_TEXT`
    is the number of a message that says the tools. Returns whether every mark was rendered, so that other
    texts in the same fields are, too.

    Raises:
        ParameterError: a content, a field or a role without effect, by its path; or too many to try.
    """
    marks = {path: f"Mark{number}End" for number, path in enumerate(_field_paths(messages))}
    text = _rendered(render, _marked(messages, marks)) or ""
    rendered_marks = set(MARK.findall(text))
    unmarked = [
        path for path, mark in marks.items() if mark not in rendered_marks and not is_implied(messages, path)
    ]
    roles = {message["role"]: index for index, message in enumerate(messages)}
    unknown_roles = {role: index for role, index in roles.items() if role not in KNOWN_ROLES}
    num_trials = len(unmarked) + len(unknown_roles) * len(KNOWN_ROLES)
    many = f"holds {num_trials} things that must be tried on the model's template; at most {MAX_TRIALS}"
    require(num_trials <= MAX_TRIALS, "messages", many)
    for path in unmarked:
        if _rendered(render, _without(messages, path)) == laid_out:
            raise _refused(path, path.message if numbers is None else numbers[path.message])
    for role, index in unknown_roles.items():
        _check_role(messages, role, index if numbers is None else numbers[index], render, laid_out)
    return rendered_marks >= set(marks.values()) and not unknown_roles


def _field_paths(messages: Messages) -> Iterator[FieldPath]:
    for index, message in enumerate(messages):
        for field, value in message.items():
            if field == "tool_calls":
                yield from (FieldPath(index, field, call) for call in range(len(value)))
            elif field != "role" and value != "":
                yield FieldPath(index, field)


def _marked(messages: Messages, marks: dict[FieldPath, str]) -> list[dict[str, Any]]:
    """The messages with a mark in place of each text and of each called function's name."""

    def value_of(index: int, field: str, value: Any) -> Any:
        if field == "tool_calls":
            named = [{"name": marks[FieldPath(index, field, number)]} for number in range(len(value))]
            return [
                call | {"function": call["function"] | name} for call, name in zip(value, named, strict=True)
            ]
        # Templates check the form of ids: a mark would not pass.
        is_text = isinstance(value, str) and field != "tool_call_id"
        return marks.get(FieldPath(index, field), value) if is_text else value

    return [
        {field: value_of(index, field, value) for field, value in message.items()}
        for index, message in enumerate(messages)
    ]


def _without(messages: Messages, path: FieldPath) -> list[dict[str, Any]]:
    """The messages without one field; a content, on which templates rely, is replaced instead."""
    others = [dict(message) for message in messages]
    message = others[path.message]
    if path.field == "content":
        message["content"] = "Mark" if message["content"] != "Mark" else "Other"
    elif path.call is not None and len(message["tool_calls"]) > 1:
        message["tool_calls"] = [
            call for number, call in enumerate(message["tool_calls"]) if number != path.call
        ]
    else:
        del message[path.field]
    return others


def is_implied(messages: Messages, path: FieldPath) -> bool:
    """Whether a field of a tool's result only names the call that the result answers by its position, too."""
    if path.field not in {"tool_call_id", "name"} or messages[path.message]["role"] != "tool":
        return False
    first = path.message
    while first and messages[first - 1]["role"] == "tool":
        first -= 1
    calls = messages[first - 1].get("tool_calls", []) if first else []
    if path.message - first >= len(calls):
        return False
    call = calls[path.message - first]
    own = call.get("id") if path.field == "tool_call_id" else call["function"]["name"]
    return bool(own == messages[path.message][path.field])


def _check_role(messages: Messages, role: str, number: int, render: Render, laid_out: str) -> None:
    """Refuse a role that the template takes for another."""
    for known in KNOWN_ROLES:
        renamed = [message | {"role": known} if message["role"] == role else message for message in messages]
        if _rendered(render, renamed) == laid_out:
            taken = f"takes {shortened(role)!r} for {known!r}"
            message = f"the model's chat template {taken}; use a role that it knows"
            raise ParameterError(f"messages[{number}].role", message)


def _rendered(render: Render, messages: Messages) -> str | None:
    """The text, or None where the template refuses these messages, which it then has read."""
    try:
        return render(messages)
    except ParameterError:  # it takes too long
        raise
    except Exception:  # noqa: BLE001 - a template is a program of the model's and may raise anything
        return None


def refusal(path: FieldPath) -> str:
    """What is said of a field that goes nowhere."""
    if path.field == "tool_call_id":
        return "the model's chat template passes it over; give results in the order of their calls"
    return "the model's chat template passes it over; leave it out, or say it in a message that it lays out"


def _refused(path: FieldPath, number: int) -> ParameterError:
    if number == OWN_TEXT:
        takes_none = "the model's chat template takes none, and passes over a system text that says them"
        return ParameterError("tools", f"{takes_none}; describe them in a message")
    return ParameterError(str(path._replace(message=number)), refusal(path))
