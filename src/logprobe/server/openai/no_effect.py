"""Fields of bodies that are taken and change no number: where, and why.

A reply names those of its request as `Warning`, and the log each of them once. Whatever else is not honoured
is refused.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from logprobe.server.openai.bodies import ResponsesBody

if TYPE_CHECKING:
    from collections.abc import Callable


class NoEffect(NamedTuple):
    """Why a field has no effect, and where it has one."""

    why: str  # ASCII without quotation marks: it goes into a header
    but_in: tuple[type, ...] = ()  # bodies in which it means something
    beside: Callable[[Any], bool] | None = None  # what makes it mean nothing; None: it never means anything


def _asks_no_alternatives(body: Any) -> bool:
    return getattr(body, "logprobs", None) is False and body.top_logprobs == 0


def _repeats(form: str, body: Any) -> bool:
    value = getattr(body, f"guided_{form}")
    return value is not None and (body.structured_outputs or {}).get(form) == value


BY_KEY: Final = "clients are told apart by their keys, or else by their addresses"
KEPT_PREFIXES: Final = "prefixes are shared token by token as long as there is room, with the same numbers"
NO_EFFECT: Final[dict[str, NoEffect]] = {
    # OpenAI's.
    "user": NoEffect(BY_KEY),
    "safety_identifier": NoEffect(BY_KEY),
    "metadata": NoEffect("replies of this route are not kept", but_in=(ResponsesBody,)),
    "store": NoEffect("replies of this route are not kept", but_in=(ResponsesBody,)),
    "prompt_cache_key": NoEffect(KEPT_PREFIXES),
    "prompt_cache_options": NoEffect(KEPT_PREFIXES),
    "prompt_cache_retention": NoEffect(KEPT_PREFIXES),
    "parallel_tool_calls": NoEffect("calls are text, as the model writes them"),
    "stream_options.include_obfuscation": NoEffect("no padding is ever sent"),
    # Other servers'.
    "cache_prompt": NoEffect(KEPT_PREFIXES),
    "guided_decoding_backend": NoEffect("one compiler serves all grammars"),
    "spaces_between_special_tokens": NoEffect("a text leaves special tokens out"),
    # What says nothing beside another field.
    "top_logprobs": NoEffect("logprobs: false asks for none", beside=_asks_no_alternatives),
    **{
        f"guided_{form}": NoEffect(f"structured_outputs.{form} says the same", beside=partial(_repeats, form))
        for form in ("json", "regex", "choice", "grammar")
    },
}
"""A path in the body → what becomes of it."""


def has_effect(body: Any, name: str) -> bool:
    """Whether a field that is given changes anything."""
    field = NO_EFFECT.get(name)
    if field is None or isinstance(body, field.but_in):
        return True
    return field.beside is not None and not field.beside(body)


def fields_without_effect(body: Any) -> list[str]:
    """The fields of a body that are given and change nothing."""
    return [name for name in NO_EFFECT if _is_given(body, name) and not has_effect(body, name)]


def _is_given(body: Any, path: str) -> bool:
    for name in path.split("."):
        body = getattr(body, name, None)
    return body is not None


def reason(name: str) -> str:
    """That a field changes nothing, and why."""
    return f"{name} changes nothing here: {NO_EFFECT[name].why}"


def warning(name: str) -> str:
    """The value of `Warning` for a field: 299, of an agent without a name (RFC 7234, section 5.5)."""
    return f'299 - "{reason(name)}"'
