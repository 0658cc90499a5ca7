"""Whether the source of a function is one that was read.

A fast module takes the place of one of transformers' own only where what the latter does is known: its
`forward`, and the functions that it calls by name, have to be those of `forms`, word for word (names of
classes, annotations, comments and decorators aside). Another release of transformers with other source runs
its own modules, right and slower, until its source has been read.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Form(Protocol):
    """A module that was read."""

    @property
    def forward(self) -> str:
        """Its source."""


FormT = TypeVar("FormT", bound=Form)


def form_of(module: object, forms: Iterable[FormT]) -> FormT | None:
    """The form of a module by its source; None where it was not read."""
    forward = getattr(type(module), "forward", None)
    return next((form for form in forms if callable(forward) and has_form(forward, [form.forward])), None)


def parts_of(module: nn.Module) -> dict[str, nn.Module]:
    """The parts of a module by name, but for dropouts, which do nothing where nothing is trained."""
    return {name: part for name, part in module.named_children() if type(part) is not nn.Dropout}


def has_form(function: Callable[..., Any], forms: Iterable[str]) -> bool:
    """Whether the source of a function is one of `forms`."""
    own = _own_form(inspect.unwrap(function))
    return own is not None and own in {_form(form) for form in forms}


def calls_form(function: Callable[..., Any], name: str, forms: Iterable[str]) -> bool:
    """Whether the function that another one calls by a global name is of one of `forms`."""
    called = inspect.unwrap(function).__globals__.get(name)
    return callable(called) and has_form(called, forms)


def mentions(what: type | Callable[..., Any], words: str) -> bool:
    """Whether the source of a class or function, where there is one, holds some words."""
    return words in _source(what)


@functools.cache
def _source(what: type | Callable[..., Any]) -> str:
    try:
        return inspect.getsource(what)
    except (OSError, TypeError):  # no source on this machine
        return ""


@functools.cache
def _own_form(function: Callable[..., Any]) -> str | None:
    try:
        return _form(inspect.getsource(function))
    except (OSError, TypeError):  # no source on this machine
        return None


@functools.cache
def _form(source: str) -> str:
    """The syntax of a function without what changes nothing: its comments, annotations and decorators."""
    [function] = ast.parse(textwrap.dedent(source)).body
    assert isinstance(function, ast.FunctionDef)
    function.decorator_list, function.returns = [], None
    for node in ast.walk(function):
        if isinstance(node, ast.arg):
            node.annotation = None
    function = _Unannotated().visit(function)
    if ast.get_docstring(function) is not None:
        del function.body[0]
    return ast.dump(function)


class _Unannotated(ast.NodeTransformer):
    """`x: int = 1` as `x = 1`."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        """Drop the annotation of an assignment."""
        if node.value is None:
            return node
        return ast.Assign(targets=[node.target], value=node.value)
