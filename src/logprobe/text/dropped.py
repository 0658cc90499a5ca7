"""Check that a chat template renders every field of a conversation.

A template is a program and may ignore fields that its author did not expect. The conversation is therefore
rendered once more with a unique mark in place of each field. Each field whose mark is missing in the output
is then removed on its own: if the output does not change, the model would never see the field, and the
field is rejected.
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
MAX_TRIALS: Final = 128  # limit on the renderings per conversation
OWN_TEXT: Final = -1
"""Index of the generated system message that describes the tools; the caller did not write it."""


class FieldPath(NamedTuple):
    """Path of a field in a message, or of one of its tool calls."""

    message: int
    field: str
    call: int | None = None

    def __str__(self) -> str:
        number = "" if self.call is None else f"[{self.call}]"
        return f"messages[{self.message}].{self.field}{number}"


def check_laid_out(
    messages: Messages, render: Render, laid_out: str, numbers: Sequence[int] | None = None
) -> bool:
    """Reject fields that had no effect on `laid_out`, the template's output for `messages`.

    If `messages` differ from the caller's messages, `numbers` maps each index in `messages` to the index of
    the caller's message, or to `OWN_TEXT` for a generated message that describes the tools. Return True if
    every mark was rendered: then conversations with the same roles and fields but other texts are rendered
    completely, too.

    Raises:
        ParameterError: a content, field or role has no effect (the error's `parameter` is its path), or the
            check would need too many renderings.
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
    many = (
        f"have too many fields whose effect must be checked: {num_trials} checks, at most "
        f"{MAX_TRIALS}; send fewer"
    )
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
    """Return the messages with marks in place of all texts and of the function names in calls."""

    def value_of(index: int, field: str, value: Any) -> Any:
        if field == "tool_calls":
            named = [{"name": marks[FieldPath(index, field, number)]} for number in range(len(value))]
            return [
                call | {"function": call["function"] | name} for call, name in zip(value, named, strict=True)
            ]
        # Templates validate ids, so a mark would be rejected.
        is_text = isinstance(value, str) and field != "tool_call_id"
        return marks.get(FieldPath(index, field), value) if is_text else value

    return [
        {field: value_of(index, field, value) for field, value in message.items()}
        for index, message in enumerate(messages)
    ]


def _without(messages: Messages, path: FieldPath) -> list[dict[str, Any]]:
    """Return the messages without one field or call; content is replaced, since templates require it."""
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
    """Return True if the field only names the call that a tool result answers, which its position shows."""
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
    """Reject a role that the template renders exactly like a known role."""
    for known in KNOWN_ROLES:
        renamed = [message | {"role": known} if message["role"] == role else message for message in messages]
        if _rendered(render, renamed) == laid_out:
            taken = f"renders {shortened(role)!r} like {known!r}"
            message = f"the model's chat template {taken}; use a role that it supports"
            raise ParameterError(f"messages[{number}].role", message)


def _rendered(render: Render, messages: Messages) -> str | None:
    """Return the rendered text; None if the template raises, which shows that the change had an effect."""
    try:
        return render(messages)
    except ParameterError:  # time limit
        raise
    except Exception:  # noqa: BLE001 - a template is a program and may raise anything
        return None


def refusal(path: FieldPath) -> str:
    """Return the error message for a field that the template ignores."""
    if path.field == "tool_call_id":
        return "the model's chat template ignores it; give results in the order of their calls"
    return "the model's chat template ignores it; leave it out, or put it into a message's content"


def _refused(path: FieldPath, number: int) -> ParameterError:
    if number == OWN_TEXT:
        takes_none = (
            "the model's chat template ignores them, and also a system message that would describe them"
        )
        return ParameterError("tools", f"{takes_none}; describe them in a user message")
    return ParameterError(str(path._replace(message=number)), refusal(path))
