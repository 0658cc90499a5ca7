"""Create flags from settings classes; flag and field have the same name and help."""

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
    """Return the known models whose names begin with `incomplete`, for shell completion."""
    return [name for name in KNOWN_MODELS if name.startswith(incomplete)]


MODEL_HELP = "Name of a known model, local folder, .gguf file, or Hugging Face repository id."
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
    """Print on standard error that a model is being loaded, with its title if it is a known model."""
    known = KNOWN_MODELS.get(model)
    title = "" if known is None else f" ({known.title})"
    typer.echo(f"loading {model}{title} …", err=True)


@contextmanager
def open_llm(model: str, **settings: Any) -> Iterator[LLM]:
    """Load a model, and close it afterwards; `settings` are fields of `EngineConfig`.

    Raises:
        ModelError: the model cannot be loaded.
        BadParameter: a setting is invalid.
    """
    with flags_for():
        EngineConfig(model=model, **settings)
    resolve(model)  # reject an unknown name before slow imports
    say_loading(model)
    from logprobe.llm import LLM

    with LLM(model, **settings) as llm:
        yield llm


@contextmanager
def flags_for(**flags: str) -> Iterator[None]:
    """Convert a `ParameterError` to a usage error about a flag; `flags` maps parameter names to flags."""
    try:
        yield
    except ParameterError as error:
        flag = flags.get(error.parameter, f"--{error.parameter.replace('_', '-')}")
        message = str(error).removeprefix(f"{error.parameter}: ")
        raise typer.BadParameter(message, param_hint=flag) from error


_ENTRY = re.compile(r"^    (\w+): (.*(?:\n     +.*)*)", re.MULTILINE)


def takes_settings(
    *classes: type,
    without: frozenset[str] = frozenset(),
    only: frozenset[str] | None = None,
    from_environment: bool = False,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add a flag for each field of the classes to a command, as keyword arguments.

    The command keeps its own parameters. The fields in `only` become flags or, if it is None, all fields except
    the ones in `without`. With `from_environment`, the variable `LOGPROBE_<FLAG>` sets a flag's default.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        flags = [
            flag for cls in classes for flag in _flags_of(cls, from_environment) if flag.name not in without
        ]
        return with_flags(command, [flag for flag in flags if only is None or flag.name in only])

    return decorate


def takes_ignored(command: Callable[..., None]) -> Callable[..., None]:
    """Add a hidden flag to a command for each keyword from another program for which it has no flag.

    `value_in` parses the value, and `EngineConfig` ignores or rejects it.
    """
    known = inspect.signature(command).parameters
    flags = [_ignored_flag(name, keyword) for name, keyword in ENGINE.items() if name not in known]
    return with_flags(command, flags)


def _ignored_flag(name: str, keyword: Keyword) -> inspect.Parameter:
    values = keyword.accepted or ()
    is_switch = bool(values) and all(isinstance(value, bool) for value in values)
    return _flag(name, bool | None if is_switch else str | None, None, typer.Option(hidden=True))


def value_in(value: str | bool) -> Any:
    """Parse the value of an untyped flag: as JSON if it is valid JSON, otherwise as text."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def with_flags(command: Callable[..., None], made: list[inspect.Parameter]) -> Callable[..., None]:
    """Replace the `**kwargs` in a command's signature by the parameters `made`, after its own parameters."""
    own = [
        parameter.replace(annotation=annotation)
        for parameter, annotation in _own_parameters(command)
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD
    ]
    signature = inspect.Signature([*own, *made])
    command.__signature__ = signature  # type: ignore[attr-defined]  # read by typer
    command.__annotations__ = {name: one.annotation for name, one in signature.parameters.items()}
    return command


ENGINE_FLAGS = frozenset({"device", "dtype", "kv_bytes", "weights"})
"""Fields of `EngineConfig` that are flags of every command that loads a model."""

takes_engine = takes_settings(EngineConfig, only=ENGINE_FLAGS)


def settings_from(cls: type[S], flags: Mapping[str, Any]) -> S:
    """Create settings from the flags that are fields of the class."""
    own = {field.name: flags[field.name] for field in fields(cls) if field.name in flags}  # type: ignore[arg-type]
    return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in own.items()})


def _own_parameters(command: Callable[..., None]) -> Iterator[tuple[inspect.Parameter, Any]]:
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        yield parameter, hints[name]


def _flags_of(cls: type, from_environment: bool) -> Iterator[inspect.Parameter]:
    helps = {name: " ".join(text.split()) for name, text in _ENTRY.findall(inspect.getdoc(cls) or "")}
    hints = get_type_hints(cls)
    for field in fields(cls):
        own = field.metadata.get("type", hints[field.name])
        kind = list[str] if isinstance(field.default, tuple) else own
        default = list(field.default) if isinstance(field.default, tuple) else field.default
        flag = field.metadata.get("flag")
        name = (flag or field.name).strip("-").replace("-", "_")
        variable = f"LOGPROBE_{name.upper()}" if from_environment else None
        option = typer.Option(*([flag] if flag else []), help=_sentence(helps[field.name]), envvar=variable)
        yield _flag(field.name, kind, default, option)


def _flag(name: str, kind: Any, default: Any, option: Any) -> inspect.Parameter:
    annotation = Annotated[kind, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


PROCESSORS_FLAG = "--logits-processors"


def spread_names(arguments: Sequence[str]) -> list[str]:
    """Repeat `--logits-processors` before each name that follows it, as the parser requires."""
    spread: list[str] = []
    num_named = -1  # number of names since the flag; -1 outside its list
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
