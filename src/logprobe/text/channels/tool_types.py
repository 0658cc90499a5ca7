"""Convert the arguments of a tool call that a model wrote as text to the types in the tool's schema."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class ToolTypes:
    """JSON schema types of the parameters of each tool."""

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        self._types: dict[str, dict[str, list[str]]] = {}
        for tool in tools:
            function = tool.get("function", tool)
            parameters = function.get("parameters") if isinstance(function, Mapping) else None
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            if isinstance(properties, Mapping) and isinstance(function.get("name"), str):
                own = {name: list(_types(schema)) for name, schema in properties.items()}
                self._types[function["name"]] = own

    def typed(self, value: Any) -> Any:
        """Convert the text arguments of a parsed call, or of a list of calls, to the types in the schemas."""
        if isinstance(value, list):
            return [self.typed(call) for call in value]
        function = value.get("function") if isinstance(value, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("arguments"), dict):
            return value
        name = function.get("name")
        types = self._types.get(name, {}) if isinstance(name, str) else {}
        arguments = {key: _argument(part, types.get(key, [])) for key, part in function["arguments"].items()}
        return {**value, "function": {**function, "arguments": arguments}}


def _types(schema: Any) -> Iterator[str]:
    """Yield the types that a schema allows, in order."""
    if not isinstance(schema, Mapping):
        return
    declared = schema.get("type")
    for one in declared if isinstance(declared, list) else [declared]:
        if isinstance(one, str):
            yield one
    for choice in [*(schema.get("anyOf") or []), *(schema.get("oneOf") or [])]:
        yield from _types(choice)
    if schema.get("nullable"):  # so transformers writes optional parameters
        yield "null"


def _argument(value: Any, types: list[str]) -> Any:
    if isinstance(value, list) and types and "array" not in types:  # values of a key that the model repeated
        return [_converted(item, types) if isinstance(item, str) else item for item in value]
    return _converted(value, types) if isinstance(value, str) else value


def _converted(text: str, types: list[str]) -> Any:
    """Convert a text to the first type for which it is valid; return it unchanged if there is none."""
    for one in types:
        try:
            match one:
                case "integer":
                    return _integer(text)
                case "number":
                    return _number(text)
                case "boolean":
                    return {"true": True, "1": True, "false": False, "0": False}[text.strip().lower()]
                case "null":
                    return {"null": None, "None": None}[text.strip()]
                case "object" | "array":
                    value = json.loads(text)
                    if isinstance(value, dict if one == "object" else list):
                        return value
        except (ValueError, KeyError):
            continue
    return text


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        number = float(text)  # JSON Schema counts 3.0 as an integer
        if not number.is_integer():
            raise
        return int(number)


def _number(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text:.40} is not a JSON number")
    return int(number) if number.is_integer() and "." not in text else number
