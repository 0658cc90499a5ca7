"""Fields of bodies that are taken and change no number: where, and why.

A reply names those of its request as `Warning`, and the log each of them once. Whatever else is not honoured
is refused.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from logprobe.server.openai.bodies import ResponsesBody
from logprobe.server.openai.prompts import unread_fields, variables_by_field

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Set as AbstractSet


class NoEffect(NamedTuple):
    """Why a field has no effect, and where it has one."""

    why: str  # ASCII without quotation marks: it goes into a header
    but_in: tuple[type, ...] = ()  # bodies in which it means something
    beside: Callable[[Any], bool] | None = None  # what makes it mean nothing; None: it never means anything
    is_templates: bool = False  # whether it means anything is for the model's chat template to say


def _asks_no_alternatives(body: Any) -> bool:
    return getattr(body, "logprobs", None) is False and body.top_logprobs == 0


def _repeats(form: str, body: Any) -> bool:
    value = getattr(body, f"guided_{form}")
    return value is not None and (body.structured_outputs or {}).get(form) == value


def _has_no_tools(body: Any) -> bool:
    return not body.tools


def _binds_no_call(body: Any) -> bool:
    """Whether nothing holds calls to their schemas, though a tool asks for that."""
    functions = [tool.get("function", tool) for tool in body.tools]
    is_strict = any(isinstance(function, dict) and function.get("strict") for function in functions)
    return is_strict and getattr(body, "tool_choice", None) in (None, "auto")


BY_KEY: Final = "clients are told apart by their keys, or else by their addresses"
KEPT_PREFIXES: Final = "prefixes are shared token by token as long as there is room, with the same numbers"
NOT_READ: Final = "the model's chat template reads no such variable"
NO_SUMMARY: Final = "reasoning comes as it was written"
LEFT_OUT: Final = "the chat template leaves it out, of earlier turns or always"
NOT_BOUND: Final = "calls are held to their schemas where tool_choice asks for one"
NO_EFFECT: Final[dict[str, NoEffect]] = {
    # OpenAI's.
    "user": NoEffect(BY_KEY),
    "safety_identifier": NoEffect(BY_KEY),
    "metadata": NoEffect("replies of this route are not kept", but_in=(ResponsesBody,)),
    "store": NoEffect("replies of this route are not kept", but_in=(ResponsesBody,)),
    "prompt_cache_key": NoEffect(KEPT_PREFIXES),
    "prompt_cache_options": NoEffect(KEPT_PREFIXES),
    "prompt_cache_retention": NoEffect(KEPT_PREFIXES),
    "stream_options.include_obfuscation": NoEffect("no padding is ever sent"),
    "reasoning.summary": NoEffect(NO_SUMMARY),
    "reasoning.generate_summary": NoEffect(NO_SUMMARY),
    "include.reasoning.encrypted_content": NoEffect("reasoning comes as text, and is read back as such"),
    # Other servers'.
    "cache_prompt": NoEffect(KEPT_PREFIXES),
    "guided_decoding_backend": NoEffect("one compiler serves all grammars"),
    "spaces_between_special_tokens": NoEffect("a text leaves special tokens out"),
    # What says nothing to some models.
    "reasoning_effort": NoEffect(NOT_READ, is_templates=True),
    "reasoning.effort": NoEffect(NOT_READ, is_templates=True),
    "enable_thinking": NoEffect(NOT_READ, is_templates=True),
    "chat_template_kwargs.enable_thinking": NoEffect(NOT_READ, is_templates=True),
    "messages.reasoning_content": NoEffect(LEFT_OUT, is_templates=True),
    "input.reasoning": NoEffect(LEFT_OUT, is_templates=True),
    # What says nothing beside another field, or without one.
    "parallel_tool_calls": NoEffect("there are no tools", beside=_has_no_tools),
    "tools.strict": NoEffect(NOT_BOUND, beside=_binds_no_call),
    "tools.function.strict": NoEffect(NOT_BOUND, beside=_binds_no_call),
    "top_logprobs": NoEffect("logprobs: false asks for none", beside=_asks_no_alternatives),
    **{
        f"guided_{form}": NoEffect(f"structured_outputs.{form} says the same", beside=partial(_repeats, form))
        for form in ("json", "regex", "choice", "grammar")
    },
}
"""A path in the body → what becomes of it."""


def has_effect(body: Any, name: str) -> bool:
    """Whether a field that is given changes anything, with any model."""
    field = NO_EFFECT.get(name)
    if field is None or field.is_templates or isinstance(body, field.but_in):
        return True
    return field.beside is not None and not field.beside(body)


def fields_without_effect(body: Any, known: Callable[[], AbstractSet[str]]) -> list[str]:
    """The fields of a body that are given and change nothing, where the chat template `known` variables."""
    by_model = unread_fields(body, known()) if variables_by_field(body) else []
    return [
        name
        for name in NO_EFFECT
        if name in by_model or (_is_given(body, name) and not has_effect(body, name))
    ]


def _is_given(body: Any, path: str) -> bool:
    """Whether a body has a value at a path, which may go through objects, and end as a value of a list."""
    if isinstance(body, list):
        return path in body or any(_is_given(item, path) for item in body)
    name, _, rest = path.partition(".")
    value = body.get(name) if isinstance(body, dict) else getattr(body, name, None)
    return value is not None and (not rest or _is_given(value, rest))


def reason(name: str) -> str:
    """That a field changes nothing, and why."""
    return f"{name} changes nothing here: {NO_EFFECT[name].why}"


def warning(name: str) -> str:
    """The value of `Warning` for a field: 299, of an agent without a name (RFC 7234, section 5.5)."""
    return f'299 - "{reason(name)}"'
