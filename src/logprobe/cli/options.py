"""Flags made from a settings class: flag, field and environment variable share one name and one text."""

from __future__ import annotations

import inspect
import json
import re
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from logprobe.config import EngineConfig
from logprobe.errors import ParameterError
from logprobe.ignored_kwargs import ENGINE
from logprobe.models import DEFAULT_MODEL, KNOWN_MODELS, resolve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from logprobe.ignored_kwargs import Keyword
    from logprobe.llm import LLM

S = TypeVar("S")


def complete_model(incomplete: str) -> list[str]:
    """The known models that begin so, for the shell."""
    return [name for name in KNOWN_MODELS if name.startswith(incomplete)]


MODEL_HELP = "A known name, a local folder, a .gguf file, or a Hugging Face id."
ModelOption = Annotated[str, typer.Option("--model", help=MODEL_HELP, autocompletion=complete_model)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]

__all__ = [
    "DEFAULT_MODEL",
    "ENGINE_FLAGS",
    "MODEL_HELP",
    "JsonOption",
    "ModelOption",
    "complete_model",
    "flags_for",
    "open_llm",
    "settings_from",
    "spread_names",
    "takes_engine",
    "takes_ignored",
    "takes_settings",
    "value_in",
    "with_flags",
]


def say_loading(model: str) -> None:
    """Print that a model is loaded, a known one with its quantisation, on standard error."""
    known = KNOWN_MODELS.get(model)
    title = "" if known is None else f" ({known.title})"
    typer.echo(f"loading {model}{title} …", err=True)


@contextmanager
def open_llm(model: str, **settings: Any) -> Iterator[LLM]:
    """Load a model, and let it go afterwards; `settings` are those of `EngineConfig`.

    Raises:
        ModelError: the model cannot be had or used.
        BadParameter: a setting that cannot be used.
    """
    with flags_for():
        EngineConfig(model=model, **settings)
    resolve(model)  # a name that does not exist is refused before anything heavy is imported
    say_loading(model)
    from logprobe.llm import LLM

    with LLM(model, **settings) as llm:
        yield llm


@contextmanager
def flags_for(**flags: str) -> Iterator[None]:
    """Turn a parameter's error into wrong use of the flag that gave it (parameter name = flag)."""
    try:
        yield
    except ParameterError as error:
        flag = flags.get(error.parameter, f"--{error.parameter.replace('_', '-')}")
        message = str(error).removeprefix(f"{error.parameter}: ")
        raise typer.BadParameter(message, param_hint=flag) from error


_ENTRY = re.compile(r"^    (\w+): (.*(?:\n     +.*)*)", re.MULTILINE)


def takes_settings(
    *classes: type, without: frozenset[str] = frozenset(), only: frozenset[str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one flag for each field of the classes; it gets them as keywords.

    Each is read from `LOGPROBE_<FIELD>` too. A command keeps the arguments that it names itself. `only` are
    the fields that become flags; None: all but those `without`.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        flags = [flag for cls in classes for flag in _flags_of(cls) if flag.name not in without]
        return with_flags(command, [flag for flag in flags if only is None or flag.name in only])

    return decorate


def takes_ignored(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command a hidden flag for each keyword of another program that it has no flag for.

    `value_in` reads its value, and `EngineConfig` ignores or refuses it.
    """
    known = inspect.signature(command).parameters
    flags = [_ignored_flag(name, keyword) for name, keyword in ENGINE.items() if name not in known]
    return with_flags(command, flags)


def _ignored_flag(name: str, keyword: Keyword) -> inspect.Parameter:
    values = keyword.accepted or ()
    is_switch = bool(values) and all(isinstance(value, bool) for value in values)
    return _flag(name, bool | None if is_switch else str | None, None, typer.Option(hidden=True))


def value_in(value: str | bool) -> Any:
    """What a flag without a type of its own says: a number or another value of JSON, or else its text."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def with_flags(command: Callable[..., None], made: list[inspect.Parameter]) -> Callable[..., None]:
    """Give a command parameters after its own, in the place of the keywords that it takes unnamed."""
    own = [
        parameter.replace(annotation=annotation)
        for parameter, annotation in _own_parameters(command)
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    signature = inspect.Signature([*own, *made])
    command.__signature__ = signature  # type: ignore[attr-defined]  # what typer reads
    command.__annotations__ = {name: one.annotation for name, one in signature.parameters.items()}
    return command


ENGINE_FLAGS = frozenset({"device", "dtype", "kv_bytes", "weights"})
"""What every command that loads a model takes of `EngineConfig`."""

takes_engine = takes_settings(EngineConfig, only=ENGINE_FLAGS)


def settings_from(cls: type[S], flags: Mapping[str, Any]) -> S:
    """Settings made of those flags that `takes_settings` gave a command which are fields of the class."""
    own = {field.name: flags[field.name] for field in fields(cls) if field.name in flags}  # type: ignore[arg-type]
    return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in own.items()})


def _own_parameters(command: Callable[..., None]) -> Iterator[tuple[inspect.Parameter, Any]]:
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        yield parameter, hints[name]


def _flags_of(cls: type) -> Iterator[inspect.Parameter]:
    helps = {name: " ".join(text.split()) for name, text in _ENTRY.findall(inspect.getdoc(cls) or "")}
    hints = get_type_hints(cls)
    for field in fields(cls):
        own = field.metadata.get("type", hints[field.name])
        kind = list[str] if isinstance(field.default, tuple) else own
        default = list(field.default) if isinstance(field.default, tuple) else field.default
        flag = field.metadata.get("flag")
        variable = f"LOGPROBE_{(flag or field.name).strip('-').replace('-', '_').upper()}"
        option = typer.Option(*([flag] if flag else []), help=_sentence(helps[field.name]), envvar=variable)
        yield _flag(field.name, kind, default, option)


def _flag(name: str, kind: Any, default: Any, option: Any) -> inspect.Parameter:
    annotation = Annotated[kind, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


PROCESSORS_FLAG = "--logits-processors"


def spread_names(arguments: Sequence[str]) -> list[str]:
    """`--logits-processors A B` with the flag before each name, as the parser wants it; the rest as it is."""
    spread: list[str] = []
    num_named = -1  # names since the flag; -1: not in its list
    for word in arguments:
        is_next = num_named > 0 and _is_processor(word)
        spread += [PROCESSORS_FLAG, word] if is_next else [word]
        goes_on = num_named == 0 or is_next
        num_named = 0 if word == PROCESSORS_FLAG else num_named + 1 if goes_on else -1
    return spread


def _is_processor(word: str) -> bool:
    from logprobe.processors.registry import available_processors

    is_flag = word.startswith("-")
    return not is_flag and (":" in word or "," in word or word in available_processors())
