"""vLLM's words for a text of a given form → `response_format`, which says the same here.

Before it: a typed body. After it: `fields`.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import msgspec

from logprobe.errors import ParameterError
from logprobe.server.http.errors import ApiError, as_api_error, bad_request

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logprobe.server.openai.bodies import GenerationBody

FORMS: Final = ("json", "json_object", "regex", "choice", "grammar")
STRUCTURED: Final = "structured_outputs."
GUIDED: Final = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")


def structured_format(body: GenerationBody) -> dict[str, Any] | None:
    """The response format that `guided_*` or `structured_outputs` ask for; None where neither does.

    Raises:
        ApiError: both, or beside response_format; an unknown form; a grammar in another notation.
    """
    asked = _asked(body)
    for name, _ in asked:
        if name.startswith(STRUCTURED) and name.removeprefix(STRUCTURED) not in FORMS:
            message = f"is not known here; {', '.join(FORMS)} are"
            raise bad_request(name, message, code="unsupported_parameter")
    if not asked:
        return None
    if len(asked) > 1 or getattr(body, "response_format", None) is not None:
        others = [name for name, _ in asked[1:]] or ["response_format"]
        raise bad_request(asked[0][0], f"and {others[0]} both give the form of the text; give one of them")
    [(name, value)] = asked
    return _as_format(name, value)


@contextmanager
def named_as_asked(body: GenerationBody) -> Iterator[None]:
    """Errors of the form of the text by the field that gave it."""
    try:
        yield
    except (ParameterError, ApiError) as error:
        told, asked = as_api_error(error), _asked(body)
        if told.param != "response_format" or not asked:
            raise
        message = told.message.removeprefix("response_format: ")
        raise bad_request(asked[0][0], message, code=told.code) from error


def _asked(body: GenerationBody) -> list[tuple[str, Any]]:
    """What gives the form of the text: field → value."""
    guided = [(name, getattr(body, name)) for name in GUIDED if getattr(body, name) is not None]
    structured = [
        (f"{STRUCTURED}{name}", value)
        for name, value in (body.structured_outputs or {}).items()
        if value is not None
    ]
    return guided + structured


def _decoded(name: str, text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise bad_request(name, f"is no schema: it is not JSON: {error}") from error


def _as_format(name: str, value: Any) -> dict[str, Any] | None:
    form = name.removeprefix(STRUCTURED).removeprefix("guided_")
    if form == "json":
        if isinstance(value, str):
            value = _decoded(name, value)
        return {"type": "json_schema", "json_schema": {"schema": value}}
    if form == "json_object":
        return {"type": "json_object"} if value else None
    if form != "grammar":
        return {"type": form, form: value}
    if not isinstance(value, str) or "::=" in value:
        remedy = 'response_format {"type": "ebnf", "ebnf": "start: ..."}'
        raise bad_request(name, f"must be in Lark's notation, as in {remedy}")
    return {"type": "ebnf", "ebnf": value}
