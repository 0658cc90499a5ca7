"""Decide if a chat template is cheap to render or must be rendered in a subprocess (`rendering`).

A template is a program that ships with the model. If a template uses only the node types below, without
nested loops, then rendering visits each node at most once per message and doubles the size of a text only a
few times. Such a template renders in milliseconds and may run on the event loop.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_CHARS: Final = 1 << 15
MAX_NODES: Final = 1024
MAX_SUMS: Final = 8  # concatenations of two texts; each can double the size of a variable
_NODES: Final = frozenset(
    {
        "Template",
        "Output",
        "TemplateData",
        "Const",
        "Name",
        "Getattr",
        "Getitem",
        "Slice",
        "For",
        "If",
        "CondExpr",
        "Compare",
        "Operand",
        "And",
        "Or",
        "Not",
        "Add",
        "Sub",
        "Neg",
        "Concat",
        "Filter",
        "Test",
        "Call",
        "List",
        "Tuple",
        "Dict",
        "Pair",
        "Keyword",
        "Assign",
        "NSRef",
        "Break",
        "Continue",
    }
)
_FILTERS: Final = frozenset(
    {"trim", "length", "count", "upper", "lower", "first", "last", "tojson", "string"}
)
_FUNCTIONS: Final = frozenset({"raise_exception", "namespace"})
_METHODS: Final = frozenset({"strip", "lstrip", "rstrip", "startswith", "endswith", "get", "items", "keys"})


@functools.lru_cache(maxsize=16)
def is_cheap(template: str) -> bool:
    """Return True if rendering time and memory are bounded by the size of the conversation."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    if len(template) > MAX_CHARS:
        return False
    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    try:
        tree = environment.parse(template)  # parsing does not evaluate anything
        nodes = [tree, *_descendants(tree)]
    except (TemplateError, RecursionError):
        return False
    sums = [node for node in nodes if _kind(node) in {"Add", "Concat"} and _num_texts(node) > 1]
    return len(nodes) <= MAX_NODES and len(sums) <= MAX_SUMS and all(map(_is_cheap_node, nodes))


def _is_cheap_node(node: Any) -> bool:
    kind = _kind(node)
    if kind == "For":
        return not node.recursive and all(_kind(inner) != "For" for inner in _descendants(node))
    if kind == "Filter":
        return node.name in _FILTERS and not (node.args or node.kwargs or node.dyn_args or node.dyn_kwargs)
    if kind == "Call":
        called = node.node
        is_function = _kind(called) == "Name" and called.name in _FUNCTIONS
        return is_function or (_kind(called) == "Getattr" and called.attr in _METHODS)
    if kind == "Mod":  # allowed for loop counters only: on a string, % is a format, whose width is unbounded
        return _kind(node.left) == "Getattr" and getattr(node.left.node, "name", "") == "loop"
    # a namespace attribute keeps its value across iterations
    if kind == "Assign" and _kind(node.target) == "NSRef":
        return all(_kind(inner) not in {"Add", "Concat"} for inner in _descendants(node))
    return kind in _NODES


def _num_texts(node: Any) -> int:
    """Count the operands of an addition or concatenation that are not constants."""
    parts = node.nodes if _kind(node) == "Concat" else [node.left, node.right]
    return sum(any(_kind(inner) == "Name" for inner in [part, *_descendants(part)]) for part in parts)


def _descendants(node: Any) -> Iterator[Any]:
    waiting = [*node.iter_child_nodes()]
    while waiting:
        inner = waiting.pop()
        yield inner
        waiting.extend(inner.iter_child_nodes())


def _kind(node: Any) -> str:
    return type(node).__name__
