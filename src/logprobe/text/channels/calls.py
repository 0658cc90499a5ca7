"""The text between the marks of a call → calls, the JSON text of their arguments, and where each stands."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ARGUMENTS: Final = ("arguments", "parameters")
"""What models call the arguments of a call."""
MAX_DEPTH: Final = 100
"""Of values within each other in a call; what is nested deeper is content."""
_SPACE: Final = re.compile(r"[ \t\n\r]*")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_TOKEN: Final = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]')  # a JSON string, or a bracket
_read: Final = json.JSONDecoder().raw_decode


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool."""

    name: str
    arguments: str  # JSON text of an object


class FoundCall(NamedTuple):
    """A call, and the bytes [start, stop) of a text that are its."""

    call: ToolCall
    start: int
    stop: int


def read_calls(
    field: Any, data: bytes, captures: Mapping[str, str], typed: Callable[[Any], Any]
) -> list[FoundCall]:
    """The calls that the region of a response template's field holds; none where something in it is no call.

    `typed` gives values that were written as texts the types that the tools' schemas say.
    """
    try:
        return _read_calls(field, data.decode(), captures, typed)
    except (ValueError, KeyError, RecursionError):
        return []  # that it cannot be read is what was asked


def _read_calls(
    field: Any, body: str, captures: Mapping[str, str], typed: Callable[[Any], Any]
) -> list[FoundCall]:
    from transformers.utils.chat_parsing.content_parsers import process_field

    value = process_field(body, field, dict(captures))
    is_json = field.content == "json"
    if not is_json:
        value = typed(value)
    check_depth(value)
    values = value if isinstance(value, list) else [value]
    found, at, num_bytes = [], 0, 0
    for one, (start, stop) in zip(values, _spans(body, value, is_json=is_json), strict=True):
        first = num_bytes + len(body[at:start].encode())
        at, num_bytes = stop, first + len(body[start:stop].encode())
        found.append(FoundCall(_call(one, body[start:stop]), first, num_bytes))
    return found


def _spans(body: str, value: Any, *, is_json: bool) -> list[tuple[int, int]]:
    """Where each call stands; where that cannot be told apart, the first has all of it."""
    start = _after_space(body, 0)
    stop = max(start, len(body.rstrip()))
    if not isinstance(value, list):
        return [(start, stop)]
    spans = list(_items(body, start)) if is_json and body.startswith("[", start) else []
    return spans if len(spans) == len(value) else [(start, stop), *[(stop, stop)] * (len(value) - 1)]


def _call(value: Any, source: str) -> ToolCall:
    """A call of what a template's field was parsed to.

    Raises:
        ValueError: it is none.
        KeyError: likewise.
    """
    function = value
    while isinstance(function, Mapping) and "function" in function:
        function = function["function"]
    if not isinstance(function, Mapping) or not isinstance(function["name"], str) or not function["name"]:
        raise ValueError("no function with a name")
    arguments = next((function[key] for key in ARGUMENTS if key in function), None)
    if isinstance(arguments, str):  # JSON within JSON
        text, arguments = arguments, json.loads(arguments)
        check_depth(arguments)
    else:
        arguments = {} if arguments is None else arguments
        text = _own_text(source, arguments) or _dumped(arguments)
    if not isinstance(arguments, Mapping):
        raise ValueError("the arguments are no object")  # noqa: TRY004 - of a text, not of a caller
    json.dumps(arguments, allow_nan=False)  # what is no JSON was none before, either
    if _SURROGATE.search(function["name"] + text):
        raise ValueError("a text that cannot be sent")
    return ToolCall(function["name"], text)


def _own_text(source: str, arguments: Any) -> str | None:
    """Return the arguments of a call as its model wrote them; None where that is not their JSON.

    The text is read once; values within it are then found by the places where they end.
    """
    try:
        value, stop = _read(source)
    except ValueError:
        return None
    start, stops, found = 0, _stops(source[:stop]), None
    while isinstance(value, dict):
        if value == arguments:
            return source[start:stop]
        spans = {key: span for key, *span in _members(source, start, stops)}  # of equal keys the last counts
        for key in ARGUMENTS:
            if key in value and value[key] == arguments:
                found = source[slice(*spans[key])]
        if "function" not in value:
            break
        value, (start, stop) = value["function"], spans["function"]
    return found


def check_depth(value: Any) -> None:
    """Refuse a value that is nested deeper than `MAX_DEPTH`, without recursion.

    Raises:
        ValueError: it is.
    """
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            inner
            for part in level
            if isinstance(part, dict | list)
            for inner in (part.values() if isinstance(part, dict) else part)
        ]
        if not level:
            return
    raise ValueError(f"is nested deeper than {MAX_DEPTH}")


def _dumped(arguments: Any) -> str:
    text = json.dumps(arguments, ensure_ascii=False)
    return json.dumps(arguments) if _SURROGATE.search(text) else text


def _stops(source: str) -> dict[int, int]:
    """Where each text, object and array of a JSON document ends, by where it begins."""
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
    """The keys of a JSON object that begins at a place, and where their values start and stop."""
    at = _after_space(source, at + 1)
    while source[at] != "}":
        key, at = _read(source, at)
        start = _after_space(source, _after_space(source, at) + 1)
        stop = stops[start] if start in stops else _read(source, start)[1]  # a number or a word
        yield key, start, stop
        at = _after_separator(source, stop)


def _items(source: str, at: int) -> Iterator[tuple[int, int]]:
    """Where the items of a JSON array stand."""
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
