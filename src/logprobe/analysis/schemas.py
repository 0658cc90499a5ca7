"""Which values a JSON schema lets stand at a place, where it names them one by one."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from logprobe.errors import ParameterError, require, shortened

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

MAX_WAYS: Final = 2_000  # to read a place of a schema: its alternatives, each with each
MAX_WAYS_IN_ALL: Final = 10_000  # to read all places of one that is checked
MAX_PARTS: Final = 100_000  # schemas of ways, as often as one is laid out
MAX_DEPTH: Final = 100  # of references and alternatives within each other
MAX_INTEGERS: Final = 1_000  # between two bounds
_TOO_MANY: Final = f"has more than {MAX_WAYS_IN_ALL:,} alternatives in all; name fewer, or nest them less"
_TELLING: Final = frozenset(
    {"const", "enum", "type", "properties", "additionalProperties", "items", "prefixItems"}
)
"""Words of a schema that say something of its values, or of those within them."""
_TYPES: Final[dict[str, list[Any]]] = {"boolean": [True, False], "null": [None]}

Way: TypeAlias = "tuple[Mapping[str, Any], ...]"
"""Schemas that all hold at a place, and say something of it themselves."""


def json_text(value: Any) -> str:
    """A value as JSON in its usual spelling, which is a grammar's.

    `", "` and `": "` between parts, no escape that need not be, no exponent, no fraction of a whole number.
    """
    if isinstance(value, float):
        return format(Decimal(repr(value)), "f").removesuffix(".0")
    return json.dumps(value, ensure_ascii=False)


class Schema:
    """A JSON schema, asked for the members of a place: of an enum, a const, a boolean, a union of such.

    It knows `properties`, `additionalProperties`, `items`, `prefixItems`, `$ref` into the schema itself,
    `anyOf`, `oneOf` and `allOf`, and integers between two bounds. Of what else it says, members may break it:
    a grammar then gives them nothing.

    Raises:
        ParameterError: it is no object.
    """

    def __init__(self, root: Any) -> None:
        require(isinstance(root, dict), "schema", "must be a JSON schema, an object", got=root)
        self._root: Mapping[str, Any] = root
        self._known: dict[str, list[Way]] = {}  # by pointer

    def has_members(self) -> bool:
        """Whether any part of it names values one by one."""
        level: list[Any] = [self._root]
        while level:
            if any(isinstance(part, dict) and _own_members(part) is not None for part in level):
                return True
            level = [inner for part in level for inner in _parts(part)]
        return False

    def check(self) -> None:
        """Follow the schema to all of its places, so that `members` can go to each.

        A place is laid out only after what it takes has been counted.

        Raises:
            ParameterError: as `members`, or too many alternatives in all.
        """
        layout = _Layout(self._root)
        pending, count, seen = [iter([layout.ways(self._root)])], 0, set[frozenset[tuple[int, ...]]]()
        while pending:
            ways = next(pending[-1], None)
            if ways is None:
                pending.pop()
                continue
            own_parts = frozenset(map(_ids, ways))
            if own_parts in seen:  # a reference led there before
                continue
            seen.add(own_parts)
            count += len(ways)
            require(count <= MAX_WAYS_IN_ALL, "schema", _TOO_MANY)
            pending.append(layout.all_further(ways))

    def members(self, pointer: str) -> list[Any] | None:
        """The values that may stand at a place (RFC 6901), in the schema's order; None: it names none.

        Raises:
            ParameterError: a reference that leads nowhere or in a circle, or too many alternatives.
        """
        own: dict[int, list[Any] | None] = {}  # what each schema names itself
        found: dict[str, Any] = {}
        seen = set[tuple[int, ...]]()
        for way in self._ways_at(pointer):
            own |= {id(schema): _own_members(schema) for schema in way if id(schema) not in own}
            named = {key: members for key in _ids(way) if (members := own[key]) is not None}
            if not named:
                return None
            if tuple(named) not in seen:  # else its values are those of another one
                seen.add(tuple(named))
                for member in _in_all([*named.values()]):
                    found.setdefault(json_text(member), member)
        return list(found.values()) or None

    def _ways_at(self, pointer: str) -> list[Way]:
        """The ways to read a place, laid out once."""
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
    """The ways to read places of a schema; beyond `MAX_PARTS` it refuses before it begins."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._left = MAX_PARTS

    def all_further(self, ways: list[Way]) -> Iterator[list[Way]]:
        """The ways to read each value within one that may be read in these, value by value."""
        keys = _keys(ways)
        require(len(keys) * _num_parts(ways) <= self._left, "schema", _TOO_MANY)
        for key in keys:
            yield self.further(ways, key)

    def further(self, ways: list[Way], key: str) -> list[Way]:
        """The ways to read a value within one that may be read in these, each of them once."""
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
        """The ways to satisfy a schema."""
        require(depth <= MAX_DEPTH, "schema", "refers to itself before any value; end the circle of $ref")
        self._spend(1)
        if schema is False:
            return []
        if not isinstance(schema, dict):  # it lets any value through
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
        """What must hold beside a schema's own words: of each list one."""
        if "$ref" in schema:
            yield [self._referred(schema["$ref"])]
        yield from ([part] for part in _list(schema.get("allOf")))
        yield from (_list(schema[name]) for name in ("anyOf", "oneOf") if name in schema)

    def _referred(self, reference: Any) -> Any:
        is_inner = isinstance(reference, str) and reference.startswith("#")
        remedy = "write what it names into the schema's $defs"
        require(is_inner, "schema", f"$ref {reference!r:.60} leads out of it; {remedy}")
        place: Any = self._root
        for part in reference[1:].split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(place, list) and key.isdigit() and int(key) < len(place):
                place = place[int(key)]
            elif isinstance(place, dict) and key in place:
                place = place[key]
            else:
                raise ParameterError("schema", f"$ref {shortened(reference)!r} names nothing in it; {remedy}")
        return place


def _check_ways(count: int) -> None:
    require(count <= MAX_WAYS, "schema", f"has a place of more than {MAX_WAYS:,} alternatives")


def _ids(parts: Iterable[Any]) -> tuple[int, ...]:
    """Parts of a schema by which they are told apart; they live as long as it does."""
    return tuple(map(id, parts))


def _num_parts(ways: list[Way]) -> int:
    """What ways take to go through: their schemas, and themselves."""
    return len(ways) + sum(map(len, ways))


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _parts(part: Any) -> list[Any]:
    return list(part.values()) if isinstance(part, dict) else part if isinstance(part, list) else []


def _children(way: Way, key: str) -> Iterator[Any]:
    """What the schemas of a way say of a value within theirs."""
    for schema in way:
        properties, items = schema.get("properties"), schema.get("items")
        first = _list(schema.get("prefixItems")) or _list(items)  # the latter as older drafts have it
        if isinstance(properties, dict) and key in properties:
            yield properties[key]
        elif key.isdigit() and int(key) < len(first):
            yield first[int(key)]
        elif key.isdigit() and isinstance(items, dict):
            yield items
        elif isinstance(schema.get("additionalProperties"), dict):
            yield schema["additionalProperties"]


def _keys(ways: list[Way]) -> set[str]:
    """Names of values within one that may be read in these ways, and one of those that it does not name."""
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
    """The values of the first list that all others have, too."""
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
    """All integers between two bounds; None: it has not both, or more lie there than anybody names."""
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
