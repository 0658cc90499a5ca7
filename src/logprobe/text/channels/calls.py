"""Parse the text between call markers into calls, the JSON text of their arguments, and their byte spans."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from logprobe.records.fields import is_deeper
from logprobe.text.channels.response_template import read_field

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from logprobe.text.channels.response_template import TemplateField

ARGUMENTS: Final = ("arguments", "parameters")
"""Keys under which models write a call's arguments."""
MAX_DEPTH: Final = 100
"""Maximum nesting depth of a call's values; deeper text is treated as content."""
_SPACE: Final = re.compile(r"[ \t\n\r]*")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_TOKEN: Final = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]')  # a JSON string, or a bracket
_read: Final = json.JSONDecoder().raw_decode


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool by the model."""

    name: str
    arguments: str  # JSON text of an object


class FoundCall(NamedTuple):
    """A call, and the range of bytes [start, stop) that it occupies in the text."""

    call: ToolCall
    start: int
    stop: int


def read_calls(
    field: TemplateField, data: bytes, captures: Mapping[str, str], typed: Callable[[Any], Any]
) -> list[FoundCall]:
    """Return the calls in `data`, the text between call markers; an empty list if any call is invalid.

    `field` is the response template's definition of the calls, and `captures` has the named groups of the
    opening marker's pattern. `typed` converts arguments written as strings to the types in the tools'
    schemas.
    """
    try:
        return _read_calls(field, data.decode(), captures, typed)
    except (ValueError, KeyError, RecursionError):
        return []  # invalid calls are an expected result


def _read_calls(
    field: TemplateField, body: str, captures: Mapping[str, str], typed: Callable[[Any], Any]
) -> list[FoundCall]:
    value = read_field(body, field, captures)
    is_json = field.content == "json"
    if not is_json:
        value = typed(value)
    _check_depth(value)
    values = value if isinstance(value, list) else [value]
    found, at, num_bytes = [], 0, 0
    for one, (start, stop) in zip(values, _spans(body, value, is_json=is_json), strict=True):
        first = num_bytes + len(body[at:start].encode())
        at, num_bytes = stop, first + len(body[start:stop].encode())
        found.append(FoundCall(_call(one, body[start:stop]), first, num_bytes))
    return found


def _spans(body: str, value: Any, *, is_json: bool) -> list[tuple[int, int]]:
    """Return each call's character span; unless all are found, the first has all text, others none."""
    start = _after_space(body, 0)
    stop = max(start, len(body.rstrip()))
    if not isinstance(value, list):
        return [(start, stop)]
    spans = list(_items(body, start)) if is_json and body.startswith("[", start) else []
    return spans if len(spans) == len(value) else [(start, stop), *[(stop, stop)] * (len(value) - 1)]


def _call(value: Any, source: str) -> ToolCall:
    """Build a call from the parsed value of a template's field.

    Raises:
        ValueError: the value is no function, its name is not a text, or its arguments are not a JSON object.
        KeyError: the function has no name.
    """
    function = value
    while isinstance(function, Mapping) and "function" in function:
        function = function["function"]
    if not isinstance(function, Mapping) or not isinstance(function["name"], str) or not function["name"]:
        raise ValueError("no function with a name")
    arguments = next((function[key] for key in ARGUMENTS if key in function), None)
    if isinstance(arguments, str):  # JSON text inside JSON
        text, arguments = arguments, json.loads(arguments)
        _check_depth(arguments)
    else:
        arguments = {} if arguments is None else arguments
        text = _own_text(source, arguments) or _dumped(arguments)
    if not isinstance(arguments, Mapping):
        raise ValueError("the arguments are not an object")  # noqa: TRY004 - the text is wrong, not a type
    json.dumps(arguments, allow_nan=False)  # raises for values that are not JSON (NaN)
    if _SURROGATE.search(function["name"] + text):
        raise ValueError("the text contains surrogates")
    return ToolCall(function["name"], text)


def _own_text(source: str, arguments: Any) -> str | None:
    """Return the JSON text of a call's arguments as the model wrote it; None if `source` does not contain it.

    `source` is parsed once; nested values are then located with a table of end positions.
    """
    try:
        value, stop = _read(source)
    except ValueError:
        return None
    start, stops, found = 0, _stops(source[:stop]), None
    while isinstance(value, dict):
        if value == arguments:
            return source[start:stop]
        spans = {key: span for key, *span in _members(source, start, stops)}  # the last duplicate key wins
        for key in ARGUMENTS:
            if key in value and value[key] == arguments:
                found = source[slice(*spans[key])]
        if "function" not in value:
            break
        value, (start, stop) = value["function"], spans["function"]
    return found


def _check_depth(value: Any) -> None:
    if is_deeper(value, MAX_DEPTH):
        raise ValueError(f"is nested deeper than {MAX_DEPTH}")


def _dumped(arguments: Any) -> str:
    text = json.dumps(arguments, ensure_ascii=False)
    return json.dumps(arguments) if _SURROGATE.search(text) else text


def _stops(source: str) -> dict[int, int]:
    """Return a map from the start to the end index of each string, object and array in a JSON document."""
    stops: dict[int, int] = {}
    opened: list[int] = []
    for match in _TOKEN.finditer(source):
        mark = match[0]
        if mark in "[{":
            opened.append(match.start())
        else:
            stops[opened.pop() if mark in "]}" else match.start()] = match.end()
    return stops


def _members(source: str, at: int, stops: Mapping[int, int]) -> Iterator[tuple[str, int, int]]:
    """Yield (key, start, stop) for each value in the JSON object that starts at `at`."""
    at = _after_space(source, at + 1)
    while source[at] != "}":
        key, at = _read(source, at)
        start = _after_space(source, _after_space(source, at) + 1)
        stop = stops[start] if start in stops else _read(source, start)[1]  # number or literal
        yield key, start, stop
        at = _after_separator(source, stop)


def _items(source: str, at: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) for each item in the JSON array that starts at `at`."""
    at = _after_space(source, at + 1)
    while source[at] != "]":
        _, stop = _read(source, at)
        yield at, stop
        at = _after_separator(source, stop)


def _after_separator(source: str, at: int) -> int:
    at = _after_space(source, at)
    return _after_space(source, at + 1) if source[at] == "," else at


def _after_space(source: str, at: int) -> int:
    match = _SPACE.match(source, at)
    assert match is not None
    return match.end()
