"""Fields of request bodies that are ignored: known fields without effect, and unknown fields.

A reply names known fields without effect in its `Warning` header; the log names each of these fields once.

An unknown field is rejected if it is misspelled, belongs to another route, or belongs to another server's
interface and would change the reply. Ignoring such a field would give results that the client did not ask
for. Any other unknown field is ignored, named in `Warning` and counted. Names from clients are shortened and
shown in plain ASCII.
"""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from logprobe.errors import MAX_NAME_CHARS, shortened
from logprobe.ignored_kwargs import FIELDS_WITHOUT_EFFECT, FOREIGN_FIELDS
from logprobe.server.http.errors import bad_request
from logprobe.server.openai.bodies import BODIES, NESTED, ResponsesBody
from logprobe.server.openai.prompts import unread_fields, variables_by_field

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from collections.abc import Set as AbstractSet

    from logprobe.server.http.errors import ApiError

MAX_UNKNOWN: Final = 32  # limit per body, because each unknown name is compared with every known name
MAX_NAMED: Final = 8  # maximum number of names in a `Warning` header
MAX_EDITS: Final = 2  # maximum number of edits in a misspelling
CHARS_AN_EDIT: Final = 3  # a misspelling may have one edit per 3 characters


def _asks_no_alternatives(body: Any) -> bool:
    return getattr(body, "logprobs", None) is False and body.top_logprobs == 0


def _repeats(form: str, body: Any) -> bool:
    value = getattr(body, f"guided_{form}")
    return value is not None and (body.structured_outputs or {}).get(form) == value


def _has_no_tools(body: Any) -> bool:
    return not body.tools


def _binds_no_call(body: Any) -> bool:
    """Return True if a tool sets `strict`, but `tool_choice` does not make calls follow the schemas."""
    functions = [tool.get("function", tool) for tool in body.tools]
    is_strict = any(isinstance(function, dict) and function.get("strict") for function in functions)
    return is_strict and getattr(body, "tool_choice", None) in (None, "auto")


CONDITIONS: Final[dict[str, Callable[[Any], bool]]] = {
    "parallel_tool_calls": _has_no_tools,
    "tools.strict": _binds_no_call,
    "tools.function.strict": _binds_no_call,
    "top_logprobs": _asks_no_alternatives,
    **{f"guided_{form}": partial(_repeats, form) for form in ("json", "regex", "choice", "grammar")},
}
"""Fields that have no effect in some bodies: path → function that returns True for such a body."""
STORED_FIELDS: Final = frozenset({"metadata", "store"})  # fields with an effect only on stored responses
TEMPLATE_FIELDS: Final = frozenset(
    {"reasoning_effort", "reasoning.effort", "enable_thinking", "chat_template_kwargs.enable_thinking"}
    | {"messages.reasoning_content", "input.reasoning"}
)
"""Fields that have an effect only if the chat template uses them."""
ROUTES: Final = {
    name: path for path, body in reversed(BODIES.items()) for name in reversed(body.__struct_fields__)
}
"""The first route that has a body field, by field name."""


def has_effect(body: Any, name: str) -> bool:
    """Return True if a field that the body sets has an effect with at least some models."""
    if name not in FIELDS_WITHOUT_EFFECT or name in TEMPLATE_FIELDS:
        return True
    if name in STORED_FIELDS:
        return isinstance(body, ResponsesBody)
    return name in CONDITIONS and not CONDITIONS[name](body)


def fields_without_effect(body: Any, known: Callable[[], AbstractSet[str]]) -> list[str]:
    """Return the fields set in a request body that have no effect.

    `known` returns the names of the chat template's variables.
    """
    by_model = unread_fields(body, known()) if variables_by_field(body) else []
    return [
        name
        for name in FIELDS_WITHOUT_EFFECT
        if name in by_model or (_is_given(body, name) and not has_effect(body, name))
    ]


def _is_given(body: Any, path: str) -> bool:
    """Return True if a body has a value at a dotted path; in a list, one item with the value is enough."""
    if isinstance(body, list):
        return path in body or any(_is_given(item, path) for item in body)
    name, _, rest = path.partition(".")
    value = body.get(name) if isinstance(body, dict) else getattr(body, name, None)
    return value is not None and (not rest or _is_given(value, rest))


def reason(name: str) -> str:
    """Return a sentence that says why a field has no effect."""
    return f"{name} has no effect: {FIELDS_WITHOUT_EFFECT[name].reason}"


def warning(name: str) -> str:
    """Return the `Warning` header for a field, with code 299 and no agent name (RFC 7234, section 5.5)."""
    return f'299 - "{reason(name)}"'


def without_unknown(data: bytes, body_type: type[msgspec.Struct]) -> tuple[bytes, list[str]]:
    """Return a body without its unknown fields, and the paths of the removed fields.

    Raises:
        ApiError: 400 if a field must not be ignored, or if there are more than `MAX_UNKNOWN` unknown fields.
    """
    known = body_type.__struct_fields__
    fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    ignored: dict[str, None] = {}  # an ordered set
    _take_unknown(fields, known, "", ignored)
    for name in NESTED.keys() & fields.keys() & set(known):
        value = msgspec.json.decode(fields[name])
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict):
                _take_unknown(item, NESTED[name].__struct_fields__, f"{name}.", ignored)
        fields[name] = msgspec.Raw(msgspec.json.encode(value))
    return msgspec.json.encode(fields), [*ignored]


def _take_unknown(
    fields: dict[str, Any], known: Collection[str], prefix: str, ignored: dict[str, None]
) -> None:
    """Remove the unknown fields of an object, and add their paths to `ignored`."""
    for name in [name for name in fields if name not in known]:
        value = fields.pop(name)
        value = msgspec.json.decode(value) if isinstance(value, msgspec.Raw) else value
        if value is None:
            continue  # null means not given
        path = f"{prefix}{name}"
        if path in ignored and path not in FOREIGN_FIELDS:  # seen in an earlier item of the same list
            continue
        remedy = remedy_for(path, name, known, value)
        if remedy is not None:
            raise unknown_field(path, remedy)
        ignored[path] = None
        if len(ignored) > MAX_UNKNOWN:
            remedy = f"the body has more than {MAX_UNKNOWN} unknown fields; leave them out"
            raise unknown_field(path, remedy)


def unknown_field(path: str, remedy: str | None) -> ApiError:
    """Return the 400 that rejects an unknown field."""
    message = "unknown field" if remedy is None else f"unknown field; {remedy}"
    return bad_request(path, message, code="unknown_parameter")


def remedy_for(path: str, name: str, known: Collection[str], value: Any = ...) -> str | None:
    """Return the remedy for an unknown field that must be rejected, or None if the field may be ignored."""
    foreign = FOREIGN_FIELDS.get(path)
    if foreign is not None:
        if foreign.accepts(value):
            return None
        ours = next((own for own in foreign.use if own in known), None)
        return foreign.reason if ours is None else f"use {ours!r} instead"
    near = nearest_spelling(name, known)
    if near is not None:
        return f"did you mean {near!r}?"
    route = ROUTES.get(path)
    if route is None or (path in FIELDS_WITHOUT_EFFECT and path not in CONDITIONS):
        return None
    return f"it is a field of {route}, not of this route; leave it out"


def nearest_spelling(name: str, known: Collection[str]) -> str | None:
    """Return the known name that `name` probably misspells, or None.

    Case, hyphens and underscores are ignored, and at most `MAX_EDITS` edits are allowed.
    """
    if len(name) > MAX_NAME_CHARS:
        return None
    plain = _plain(name)
    edits = {own: num_edits(plain, _plain(own)) for own in known}
    least = min(edits.values(), default=MAX_EDITS + 1)
    if least > MAX_EDITS:
        return None
    near = min((own for own in edits if edits[own] == least), key=lambda own: num_edits(name, own))
    allowed = min(len(plain), len(_plain(near))) // CHARS_AN_EDIT
    return near if least <= allowed else None


def _plain(name: str) -> str:
    return name.casefold().replace("_", "").replace("-", "")


def num_edits(a: str, b: str) -> int:
    """Return the optimal string alignment distance between two names, capped at `MAX_EDITS` + 1.

    The distance counts insertions, deletions, substitutions, and transpositions of adjacent characters.
    """
    too_many = MAX_EDITS + 1
    if abs(len(a) - len(b)) > MAX_EDITS or len({*a} - {*b}) > MAX_EDITS or len({*b} - {*a}) > MAX_EDITS:
        return too_many
    before = last = list(range(len(b) + 1))  # rows of the distance matrix
    for i, char in enumerate(a, start=1):
        row = [i]
        for j, other in enumerate(b, start=1):
            row.append(min(last[j] + 1, row[j - 1] + 1, last[j - 1] + int(char != other)))
            if i > 1 and j > 1 and char == b[j - 2] and a[i - 2] == other:
                row[j] = min(row[j], before[j - 2] + 1)
        before, last = last, row
    return min(last[-1], too_many)


def ignored_warning(paths: Sequence[str]) -> str:
    """Return the `Warning` header that names ignored unknown fields (RFC 7234, section 5.5)."""
    names = ", ".join(re.sub(r"[^\w.-]", "?", shortened(path), flags=re.ASCII) for path in paths[:MAX_NAMED])
    more = f" and {len(paths) - MAX_NAMED} more" if len(paths) > MAX_NAMED else ""
    return f'299 - "unknown fields were ignored: {names}{more}"'
