"""Flags made from a settings class: flag, field and environment variable share one name and one text.

Before it: the frozen settings of the engine and the server. After it: commands that take all of them.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_ENTRY = re.compile(r"^    (\w+): (.*(?:\n     +.*)*)", re.MULTILINE)


def takes_settings(
    *classes: type, without: frozenset[str] = frozenset()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one flag for each field of the classes; it gets them as keywords.

    Each is read from `LOGPROBE_<FIELD>` too. A command keeps the arguments that it names itself.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [
            parameter.replace(annotation=annotation)
            for parameter, annotation in _own_parameters(command)
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        made = [flag for cls in classes for flag in _flags_of(cls) if flag.name not in without]
        signature = inspect.Signature([*own, *made])
        command.__signature__ = signature  # type: ignore[attr-defined]  # what typer reads
        command.__annotations__ = {one.name: one.annotation for one in signature.parameters.values()}
        return command

    return decorate


def _own_parameters(command: Callable[..., None]) -> Iterator[tuple[inspect.Parameter, Any]]:
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        yield parameter, hints[name]


def _flags_of(cls: type) -> Iterator[inspect.Parameter]:
    told = {name: " ".join(text.split()) for name, text in _ENTRY.findall(inspect.getdoc(cls) or "")}
    hints = get_type_hints(cls)
    for field in fields(cls):
        kind = list[str] if isinstance(field.default, tuple) else hints[field.name]
        default = list(field.default) if isinstance(field.default, tuple) else field.default
        option = typer.Option(help=_sentence(told[field.name]), envvar=f"LOGPROBE_{field.name.upper()}")
        yield inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[kind, option],
        )


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
