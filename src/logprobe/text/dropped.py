"""Whether a chat template lays out all that a conversation says.

A template is a program and may pass over whatever it was not written for. It is asked: the conversation is
laid out once more with a mark in place of each thing said, and what left no mark is taken out by itself. What
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


class Said(NamedTuple):
    """One thing that a message says: a field, or one of its tool calls."""

    place: int
    field: str
    call: int | None = None

    def __str__(self) -> str:
        number = "" if self.call is None else f"[{self.call}]"
        return f"messages[{self.place}].{self.field}{number}"


def check_laid_out(messages: Messages, render: Render, laid_out: str) -> bool:
    """Refuse what the template passed over when it made `laid_out` of the messages.

    Returns whether every mark was left, so that it is so with all other texts in the same places, too.

    Raises:
        ParameterError: a content, a field or a role without effect, by its place; or too many to try.
    """
    marks = {said: f"Mark{number}End" for number, said in enumerate(_all_said(messages))}
    text = _rendered(render, _marked(messages, marks)) or ""
    shown = set(MARK.findall(text))
    unmarked = [said for said, mark in marks.items() if mark not in shown and not _is_told(messages, said)]
    roles = {message["role"]: place for place, message in enumerate(messages)}
    strange = {role: place for role, place in roles.items() if role not in KNOWN_ROLES}
    num_trials = len(unmarked) + len(strange) * len(KNOWN_ROLES)
    many = f"holds {num_trials} things that must be tried on the model's template; at most {MAX_TRIALS}"
    require(num_trials <= MAX_TRIALS, "messages", many)
    for said in unmarked:
        if _rendered(render, _without(messages, said)) == laid_out:
            raise ParameterError(str(said), _refusal(said))
    for role, place in strange.items():
        _check_role(messages, role, place, render, laid_out)
    return shown >= set(marks.values()) and not strange


def _all_said(messages: Messages) -> Iterator[Said]:
    for place, message in enumerate(messages):
        for field, value in message.items():
            if field == "tool_calls":
                yield from (Said(place, field, call) for call in range(len(value)))
            elif field != "role" and value != "":
                yield Said(place, field)


def _marked(messages: Messages, marks: dict[Said, str]) -> list[dict[str, Any]]:
    """The messages with a mark in place of each text and of each called function's name."""

    def value_of(place: int, field: str, value: Any) -> Any:
        if field == "tool_calls":
            named = [{"name": marks[Said(place, field, number)]} for number in range(len(value))]
            return [
                call | {"function": call["function"] | name} for call, name in zip(value, named, strict=True)
            ]
        # Templates check the form of ids: a mark would not pass.
        is_text = isinstance(value, str) and field != "tool_call_id"
        return marks.get(Said(place, field), value) if is_text else value

    return [
        {field: value_of(place, field, value) for field, value in message.items()}
        for place, message in enumerate(messages)
    ]


def _without(messages: Messages, said: Said) -> list[dict[str, Any]]:
    """The messages less one thing; a content is another instead, since templates rely on there being one."""
    others = [dict(message) for message in messages]
    message = others[said.place]
    if said.field == "content":
        message["content"] = "Mark" if message["content"] != "Mark" else "Other"
    elif said.call is not None and len(message["tool_calls"]) > 1:
        message["tool_calls"] = [
            call for number, call in enumerate(message["tool_calls"]) if number != said.call
        ]
    else:
        del message[said.field]
    return others


def _is_told(messages: Messages, said: Said) -> bool:
    """Whether a tool's result says only which call it answers, and stands where that call's result stands."""
    if said.field not in {"tool_call_id", "name"} or messages[said.place]["role"] != "tool":
        return False
    first = said.place
    while first and messages[first - 1]["role"] == "tool":
        first -= 1
    calls = messages[first - 1].get("tool_calls", []) if first else []
    if said.place - first >= len(calls):
        return False
    call = calls[said.place - first]
    own = call.get("id") if said.field == "tool_call_id" else call["function"]["name"]
    return bool(own == messages[said.place][said.field])


def _check_role(messages: Messages, role: str, place: int, render: Render, laid_out: str) -> None:
    """Refuse a role that the template takes for another."""
    for known in KNOWN_ROLES:
        renamed = [message | {"role": known} if message["role"] == role else message for message in messages]
        if _rendered(render, renamed) == laid_out:
            taken = f"takes {shortened(role)!r} for {known!r}"
            message = f"the model's chat template {taken}; use a role that it knows"
            raise ParameterError(f"messages[{place}].role", message)


def _rendered(render: Render, messages: Messages) -> str | None:
    """The text, or None where the template refuses these messages, which it then has read."""
    try:
        return render(messages)
    except Exception:  # noqa: BLE001 - a template is a program of the model's and may raise anything
        return None


def _refusal(said: Said) -> str:
    if said.field == "tool_call_id":
        return "the model's chat template passes it over; give results in the order of their calls"
    return "the model's chat template passes it over; leave it out, or say it in a message that it lays out"
