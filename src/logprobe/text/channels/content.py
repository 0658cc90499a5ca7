"""Readers of the contents of fields (`content` in a response template): text to value."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import regex

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_BARE_KEY: Final = regex.compile(r"(?<=[{,])(\w+):")


def _text(body: str, args: Mapping[str, Any]) -> str:
    return body.strip() if args.get("strip", True) else body


def _int(body: str, args: Mapping[str, Any]) -> int:
    return int(_text(body, args))


def _float(body: str, args: Mapping[str, Any]) -> float:
    return float(_text(body, args))


def _bool(body: str, args: Mapping[str, Any]) -> bool:
    return _text(body, args).lower() in {"true", "1"}


def _json(body: str, args: Mapping[str, Any]) -> Any:
    """Parse JSON; `unquoted_keys` and `string_delims` allow bare keys and strings in other delimiters."""
    parts = []
    for text, is_string in _delimited(body, args.get("string_delims", [])):
        if is_string:
            parts.append(json.dumps(text))
        else:
            parts.append(_BARE_KEY.sub(r'"\1":', text) if args.get("unquoted_keys") else text)
    try:
        return json.loads("".join(parts))
    except json.JSONDecodeError:
        if args.get("allow_non_json"):
            return _text(body, args)
        raise


def _delimited(body: str, delimiters: list[list[str]]) -> Iterator[tuple[str, bool]]:
    """Yield the parts of a text, each with True if it stood between a pair of delimiters."""
    if not delimiters:
        yield body, False
        return
    (first, last), *others = delimiters
    pattern = f"{regex.escape(first)}(.*?){regex.escape(last)}"
    for index, part in enumerate(regex.split(pattern, body, flags=regex.DOTALL)):
        if index % 2:
            yield part, True
        else:
            yield from _delimited(part, others)


def _xml_inline(body: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """Read a pair from the groups `key` and `value` of each match of `tag_pattern`; a key's last value wins.

    With `merge_duplicates`, the values of a repeated key are collected in a list instead.
    """
    values: dict[str, Any] = {}
    for match in regex.finditer(args["tag_pattern"], body, flags=regex.DOTALL):
        groups = match.groupdict()
        key, value = groups["key"], _inner(groups.get("value", ""), args)
        if key in values and args.get("merge_duplicates", False):
            known = values[key]
            values[key] = [*(known if isinstance(known, list) else [known]), value]
        else:
            values[key] = value
    return values


def _kv_lines(body: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """Read one key and value per line, for example `key: value`."""
    separator = args.get("kv_sep", ":")
    pairs = [
        _text(line, args).partition(separator)
        for line in body.split(args.get("line_sep", "\n"))
        if separator in _text(line, args)
    ]
    return {_text(key, args): _inner(_text(value, args), args) for key, _, value in pairs}


def _inner(value: str, args: Mapping[str, Any]) -> Any:
    """Read a value with the reader in `value_parser`, if there is one."""
    reader = args.get("value_parser")
    return value if reader is None else READERS[reader.get("name", "text")](value, reader.get("args", {}))


READERS: Final[dict[str, Callable[[str, Mapping[str, Any]], Any]]] = {
    "text": _text,
    "int": _int,
    "float": _float,
    "bool": _bool,
    "json": _json,
    "xml-inline": _xml_inline,
    "kv-lines": _kv_lines,
}
"""Readers by the name that a template uses in `content`."""
