"""Enumerates the values that a JSON schema allows at a position of a document, if the schema lists them."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from logprobe.errors import ParameterError, require, shortened

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

MAX_WAYS: Final = 2_000  # combinations of alternatives ("ways") at one position
MAX_WAYS_IN_ALL: Final = 10_000  # combinations at all positions, in `Schema.check`
MAX_PARTS: Final = 100_000  # subschemas that one `_Layout` visits, counting repetitions
MAX_DEPTH: Final = 100  # nested references and alternatives
MAX_INTEGERS: Final = 1_000  # values of an integer with two bounds
_TOO_MANY: Final = f"has more than {MAX_WAYS_IN_ALL:,} alternatives in total; use fewer or nest them less"
_TELLING: Final = frozenset(
    {"const", "enum", "type", "properties", "additionalProperties", "items", "prefixItems"}
)
"""Keywords that constrain a value or the values inside it."""
_TYPES: Final[dict[str, list[Any]]] = {"boolean": [True, False], "null": [None]}

Way: TypeAlias = "tuple[Mapping[str, Any], ...]"
"""One combination of alternatives at a position: the subschemas that apply together."""


def json_text(value: Any) -> str:
    """Serialize a value as JSON in the spelling that grammars use.

    Separators are `", "` and `": "`. Strings have no unnecessary escapes, numbers no exponents, and whole
    floats no fraction.
    """
    if isinstance(value, float):
        return format(Decimal(repr(value)), "f").removesuffix(".0")
    return json.dumps(value, ensure_ascii=False)


class Schema:
    """Finds the values that a JSON schema allows at a position, if the schema lists them.

    The values are listed by `enum`, `const`, a boolean or null type, integers between two bounds, or unions
    of these. Supports `properties`, `additionalProperties`, `items`, `prefixItems`, `$ref` within the schema,
    `anyOf`, `oneOf` and `allOf`. Other keywords are ignored, so a listed value may violate them; a grammar
    gives such a value no probability.

    Raises:
        ParameterError: the schema is not an object.
    """

    def __init__(self, root: Any) -> None:
        require(isinstance(root, dict), "schema", "must be a JSON schema (an object)", got=root)
        self._root: Mapping[str, Any] = root
        self._known: dict[str, list[Way]] = {}  # JSON pointer → ways

    def has_members(self) -> bool:
        """Return True if any part of the schema lists its values."""
        level: list[Any] = [self._root]
        while level:
            if any(isinstance(part, dict) and _own_members(part) is not None for part in level):
                return True
            level = [inner for part in level for inner in _parts(part)]
        return False

    def check(self) -> None:
        """Visit all positions of the schema, so that `members` cannot fail later.

        The number of combinations at each position is checked before they are expanded.

        Raises:
            ParameterError: `members` would raise this error, or there are too many alternatives in total.
        """
        layout = _Layout(self._root)
        pending, count, seen = [iter([layout.ways(self._root)])], 0, set[frozenset[tuple[int, ...]]]()
        while pending:
            ways = next(pending[-1], None)
            if ways is None:
                pending.pop()
                continue
            own_parts = frozenset(map(_ids, ways))
            if own_parts in seen:  # reached before through a reference
                continue
            seen.add(own_parts)
            count += len(ways)
            require(count <= MAX_WAYS_IN_ALL, "schema", _TOO_MANY)
            pending.append(layout.all_further(ways))

    def members(self, pointer: str) -> list[Any] | None:
        """Return the values allowed at a JSON pointer (RFC 6901), in the schema's order.

        Returns None if the schema does not list the values.

        Raises:
            ParameterError: a `$ref` cannot be resolved or is circular, or there are too many alternatives.
        """
        own: dict[int, list[Any] | None] = {}  # id of a subschema → values that it lists itself
        found: dict[str, Any] = {}
        seen = set[tuple[int, ...]]()
        for way in self._ways_at(pointer):
            own |= {id(schema): _own_members(schema) for schema in way if id(schema) not in own}
            named = {key: members for key in _ids(way) if (members := own[key]) is not None}
            if not named:
                return None
            if tuple(named) not in seen:  # otherwise the values are known
                seen.add(tuple(named))
                for member in _in_all([*named.values()]):
                    found.setdefault(json_text(member), member)
        return list(found.values()) or None

    def _ways_at(self, pointer: str) -> list[Way]:
        """Return the combinations of alternatives at a position, cached."""
        if pointer not in self._known:
            parent, is_below, part = pointer.rpartition("/")
            layout = _Layout(self._root)
            self._known[pointer] = (
                layout.further(self._ways_at(parent), part.replace("~1", "/").replace("~0", "~"))
                if is_below
                else layout.ways(self._root)
            )
        return self._known[pointer]


class _Layout:
    """Computes the combinations of alternatives at positions of a schema.

    Raises ParameterError before it visits more than `MAX_PARTS` subschemas.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._left = MAX_PARTS

    def all_further(self, ways: list[Way]) -> Iterator[list[Way]]:
        """Yield the combinations of each child of a position, given the position's combinations."""
        keys = _keys(ways)
        require(len(keys) * _num_parts(ways) <= self._left, "schema", _TOO_MANY)
        for key in keys:
            yield self.further(ways, key)

    def further(self, ways: list[Way], key: str) -> list[Way]:
        """Return the distinct combinations of one child of a position, given the position's combinations."""
        self._spend(_num_parts(ways))
        found: dict[tuple[int, ...], Way] = {}
        seen = set[tuple[int, ...]]()
        for way in ways:
            children = list(_children(way, key))
            if _ids(children) in seen:
                continue
            seen.add(_ids(children))
            found |= {_ids(below): below for below in self.ways({"allOf": children})}
            _check_ways(len(found))
        return list(found.values())

    def ways(self, schema: Any, depth: int = 0) -> list[Way]:
        """Return the combinations of alternatives in `schema`."""
        require(
            depth <= MAX_DEPTH,
            "schema",
            "has a circular $ref or is nested too deeply; remove the cycle or some levels",
        )
        self._spend(1)
        if schema is False:
            return []
        if not isinstance(schema, dict):  # True allows any value
            return [()]
        ways: list[Way] = [(schema,) if _TELLING & schema.keys() else ()]
        for choices in self._choices(schema):
            further: list[Way] = []
            for choice in choices:
                further += self.ways(choice, depth + 1)
                _check_ways(len(ways) * len(further))
            self._spend(len(further) * _num_parts(ways) + len(ways) * _num_parts(further))
            ways = [way + more for way in ways for more in further]
            if not ways:
                break
        return ways

    def _spend(self, count: int) -> None:
        self._left -= count
        require(self._left >= 0, "schema", _TOO_MANY)

    def _choices(self, schema: Mapping[str, Any]) -> Iterator[list[Any]]:
        """Yield lists of alternatives; besides the schema's keywords, one subschema per list must hold."""
        if "$ref" in schema:
            yield [self._referred(schema["$ref"])]
        yield from ([part] for part in _list(schema.get("allOf")))
        yield from (_list(schema[name]) for name in ("anyOf", "oneOf") if name in schema)

    def _referred(self, reference: Any) -> Any:
        is_inner = isinstance(reference, str) and reference.startswith("#")
        remedy = "copy the target into the schema's $defs"
        require(is_inner, "schema", f"$ref {reference!r:.60} is outside the schema; {remedy}")
        place: Any = self._root
        for part in reference[1:].split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(place, list) and key.isdigit() and int(key) < len(place):
                place = place[int(key)]
            elif isinstance(place, dict) and key in place:
                place = place[key]
            else:
                raise ParameterError("schema", f"$ref {shortened(reference)!r} does not exist; {remedy}")
        return place


def _check_ways(count: int) -> None:
    require(count <= MAX_WAYS, "schema", f"has over {MAX_WAYS:,} alternatives at one position; use fewer")


def _ids(parts: Iterable[Any]) -> tuple[int, ...]:
    """Return the `id()` of each subschema, which stays valid as long as the root schema exists."""
    return tuple(map(id, parts))


def _num_parts(ways: list[Way]) -> int:
    """Return the cost of visiting `ways`: the number of ways plus the number of subschemas in them."""
    return len(ways) + sum(map(len, ways))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _parts(part: Any) -> list[Any]:
    return list(part.values()) if isinstance(part, dict) else part if isinstance(part, list) else []


def _children(way: Way, key: str) -> Iterator[Any]:
    """Yield the subschemas that the schemas in `way` apply to one child."""
    for schema in way:
        properties, items = schema.get("properties"), schema.get("items")
        first = _list(schema.get("prefixItems")) or _list(items)  # a list of `items`: drafts before 2020-12
        if isinstance(properties, dict) and key in properties:
            yield properties[key]
        elif key.isdigit() and int(key) < len(first):
            yield first[int(key)]
        elif key.isdigit() and isinstance(items, dict):
            yield items
        elif isinstance(schema.get("additionalProperties"), dict):
            yield schema["additionalProperties"]


def _keys(ways: list[Way]) -> set[str]:
    """Return the keys of all children that the schemas in `ways` name, and one key for all other children."""
    schemas = list({id(schema): schema for way in ways for schema in way}.values())
    named = {
        key
        for schema in schemas
        if isinstance(schema.get("properties"), dict)
        for key in schema["properties"]
    }
    items = [max(map(len, (_list(one.get("prefixItems")), _list(one.get("items"))))) for one in schemas]
    places = {str(place) for place in range(max(items, default=0))}
    further: set[str] = set()
    if any(isinstance(schema.get("items"), dict) for schema in schemas):
        further.add(str(max(items)))
    if any(isinstance(schema.get("additionalProperties"), dict) for schema in schemas):
        further.add(max(named, key=len, default="") + "x")
    return named | places | further


def _in_all(named: list[list[Any]]) -> list[Any]:
    """Return the values that all lists contain, in the order of the first list."""
    texts = [set(map(json_text, members)) for members in named[1:]]
    return [member for member in named[0] if all(json_text(member) in others for others in texts)]


def _own_members(schema: Mapping[str, Any]) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    if isinstance(schema.get("enum"), list):
        return list(schema["enum"])
    kinds = schema.get("type")
    members: list[Any] = []
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        some = _integers(schema) if kind == "integer" else _TYPES.get(kind) if isinstance(kind, str) else None
        if some is None:
            return None
        members += some
    return members or None


def _integers(schema: Mapping[str, Any]) -> list[int] | None:
    """Return the integers between a schema's bounds.

    Returns None without both bounds, with `multipleOf`, or if there are more than `MAX_INTEGERS`.
    """
    lows = [schema.get("minimum"), _next_to(schema.get("exclusiveMinimum"), 1)]
    highs = [schema.get("maximum"), _next_to(schema.get("exclusiveMaximum"), -1)]
    low = max((bound for bound in lows if _is_integer(bound)), default=None)
    high = min((bound for bound in highs if _is_integer(bound)), default=None)
    is_few = low is not None and high is not None and high - low < MAX_INTEGERS
    if not is_few or "multipleOf" in schema:
        return None
    assert low is not None
    assert high is not None
    return list(range(low, high + 1))


def _next_to(bound: Any, step: int) -> Any:
    return bound + step if _is_integer(bound) else None


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
