"""How requests ask a model to reason, in the words of its own chat template.

Before it: a typed body. After it: the template's variables.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from logprobe.server.http.errors import bad_request

if TYPE_CHECKING:
    from collections.abc import Set as AbstractSet

EFFORT: Final = "reasoning_effort"
THINKING: Final = "enable_thinking"
"""Variables by which templates know how to reason."""


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
