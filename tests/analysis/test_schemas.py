"""The values that a schema allows at a pointer."""

from __future__ import annotations

from typing import Any

import pytest

from logprobe.analysis.schemas import MAX_INTEGERS, Schema
from logprobe.errors import ParameterError
from refusals import raises

MOOD = {"enum": ["happy", "sad"]}
NODE = {
    "$defs": {"node": {"type": "object", "properties": {"kind": MOOD, "next": {"$ref": "#/$defs/node"}}}},
    "$ref": "#/$defs/node",
}


def as_a(schema: dict[str, Any]) -> dict[str, Any]:
    return {"properties": {"a": schema}}


@pytest.mark.parametrize(
    ("schema", "pointer", "members"),
    [
        (MOOD, "", ["happy", "sad"]),
        ({"const": None}, "", [None]),
        ({"type": ["boolean", "null"]}, "", [True, False, None]),
        ({"enum": [1, True, 1.0, 1, 0.5]}, "", [1, True, 0.5]),
        ({"type": "string"}, "", None),
        ({"type": ["string", "null"]}, "", None),
        ({"properties": {"a": MOOD}}, "/b", None),
        ({"properties": {"a/b~": MOOD}}, "/a~1b~0", ["happy", "sad"]),
        ({"properties": {"a": {"type": "string"}}, "additionalProperties": MOOD}, "/b", ["happy", "sad"]),
        ({"items": MOOD}, "/7", ["happy", "sad"]),
        ({"prefixItems": [{"const": 1}], "items": {"const": 2}}, "/0", [1]),
        ({"prefixItems": [{"const": 1}], "items": {"const": 2}}, "/1", [2]),
        ({"items": [{"const": 1}, MOOD]}, "/1", ["happy", "sad"]),
        ({"properties": {"0": MOOD}}, "/0", ["happy", "sad"]),
        (NODE, "/kind", ["happy", "sad"]),
        (NODE, "/next/next/kind", ["happy", "sad"]),
        (NODE, "/next", None),
        ({"anyOf": [{"const": 1}, {"oneOf": [MOOD, {"const": 1}]}]}, "", [1, "happy", "sad"]),
        ({"anyOf": [{"const": 1}, {"type": "string"}]}, "", None),
        ({"anyOf": [{"const": 1}, False]}, "", [1]),
        ({"anyOf": [as_a({"const": 1}), as_a(MOOD)]}, "/a", [1, "happy", "sad"]),
        ({"allOf": [{"type": "string"}, MOOD]}, "", ["happy", "sad"]),
        ({"allOf": [{"enum": [1, 2, 3]}, {"enum": [3, 2]}]}, "", [2, 3]),
        ({"allOf": [as_a({"enum": [1, 2]}), as_a({"enum": [2, 3]})]}, "/a", [2]),
        ({"$ref": "#/anyOf/1", "anyOf": [{}, MOOD]}, "", ["happy", "sad"]),
        ({"type": "integer", "minimum": -1, "maximum": 1}, "", [-1, 0, 1]),
        ({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 4, "maximum": 9}, "", [1, 2, 3]),
        ({"type": "integer", "minimum": 0, "maximum": MAX_INTEGERS}, "", None),
        ({"type": "integer", "minimum": 0}, "", None),
        ({"type": "integer", "minimum": 0, "maximum": 9, "multipleOf": 3}, "", None),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "", None),
    ],
)  # fmt: skip
def test_the_members_of_a_place(schema: dict[str, Any], pointer: str, members: list[Any] | None) -> None:
    found = Schema(schema).members(pointer)
    assert repr(found) == repr(members)  # True is not 1
    assert members is None or Schema(schema).has_members()


@pytest.mark.parametrize(
    "schema",
    [
        [],
        {"$ref": "https://example.org/mood.json"},
        {"$ref": "#/$defs/mood"},
        {"$ref": "#"},
        {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
        {"allOf": [{"anyOf": [{"const": i} for i in range(13)]}] * 3},
    ],
)
def test_a_schema_that_cannot_be_followed_is_told(schema: Any) -> None:
    with raises(ParameterError, parameter="schema"):
        Schema(schema).members("")


def test_a_schema_without_values_is_known() -> None:
    assert not Schema({"type": "object", "properties": {"a": {"type": "string"}}}).has_members()


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"items": {"$ref": "#/$defs/none"}}}},
        {"additionalProperties": {"$ref": "#/$defs/none"}},
        {"prefixItems": [{"const": 1}, {"$ref": "elsewhere"}]},
        {"anyOf": [{"properties": {"a": {"allOf": [{"$ref": "#/properties/b"}]}}}]},
        {"$defs": {"a": {"$ref": "#/$defs/a"}}, "items": {"$ref": "#/$defs/a"}},
        {"properties": {"a": {"properties": {"b": {"allOf": [{"anyOf": [{}, {}]}] * 12}}}}},
        {"properties": {str(i): {"allOf": [{"anyOf": [{"const": 1}, {"const": 2}]}] * 9} for i in range(20)}},
    ],
)
def test_a_schema_with_a_place_that_cannot_be_followed_is_found_out(schema: dict[str, Any]) -> None:
    with raises(ParameterError, parameter="schema"):
        Schema(schema).check()


def test_a_schema_that_refers_to_itself_is_followed_to_its_end() -> None:
    tree = {
        "properties": {"kind": {"enum": ["leaf", "node"]}, "parts": {"items": {"$ref": "#"}}},
        "anyOf": [{"required": ["kind"]}, {"properties": {"more": {"$ref": "#"}}}],
        "additionalProperties": {"prefixItems": [{"$ref": "#"}]},
    }
    Schema(tree).check()
    assert Schema(tree).members("/parts/0/parts/3/kind") == ["leaf", "node"]
