"""`logprobe serve`: serve models with an OpenAI-compatible HTTP API."""

from __future__ import annotations

import json
import tomllib
from dataclasses import make_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from logprobe.cli.command import Command
from logprobe.cli.options import (
    DEFAULT_MODEL,
    MODEL_HELP,
    EngineFlags,
    complete_model,
    field_names,
    say_loading,
)
from logprobe.config import EngineConfig
from logprobe.errors import nearest_name, require
from logprobe.ignored_kwargs import ENGINE
from logprobe.models import resolve
from logprobe.server import ServerSettings
from logprobe.server.settings import OWN_SETTINGS, FurtherModel

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from logprobe.ignored_kwargs import Keyword


class ServeCommand(Command):
    """A command whose flags can also be set by environment variables, such as `LOGPROBE_DRAIN_S`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        option: Any
        for option in self.params:
            flag = option.opts[0]
            if flag.startswith("--") and not getattr(option, "hidden", False):
                option.show_envvar = False
                option.envvar = f"LOGPROBE_{flag.removeprefix('--').replace('-', '_').upper()}"

    def make_parser(self, ctx: Any) -> Any:
        """Create the parser, in which several processors may follow one flag, as in FastDeploy and vLLM."""
        parser: Any = super().make_parser(ctx)
        option = parser._long_opt["--logits-processors"]  # noqa: SLF001 - see internals.py
        take_one = option.process

        def take_all(value: str, state: Any) -> None:
            take_one(value, state)
            while state.rargs and _is_processor(state.rargs[0]):
                take_one(state.rargs.pop(0), state)

        option.process = take_all
        return parser


def _is_processor(word: str) -> bool:
    """Return True if a word after a processor is another processor, not a flag or the model."""
    from logprobe.processors.registry import available_processors

    return word[:1] != "-" and (":" in word or "," in word or word in available_processors())


def _ignored(keyword: Keyword) -> Any:
    values = keyword.accepted or ()
    is_switch = bool(values) and all(isinstance(value, bool) for value in values)
    return Annotated[bool | None if is_switch else str | None, typer.Option(hidden=True)]


_OWN = {*field_names(EngineFlags), *field_names(ServerSettings)}
IgnoredFlags = make_dataclass(
    "IgnoredFlags",
    [
        (name, _ignored(keyword), None)
        for name, keyword in ENGINE.items()
        if name.replace("_", "-") not in _OWN
    ],
    kw_only=True,
)
"""Hidden flags of other servers, which `EngineConfig` ignores or rejects."""


def _read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Use a file's entries as defaults for flags that neither the command line nor the environment sets."""
    if path is None:
        return None
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise typer.BadParameter(f"cannot read {path} as TOML: {reason}", param_hint="--config") from error
    tables = entries.pop("models", {})
    if not (isinstance(tables, dict) and all(isinstance(table, dict) for table in tables.values())):
        raise typer.BadParameter(f"{path}: models must be tables [models.NAME]", param_hint="--config")
    context.default_map = {flag.name: value for flag, value in _flags_in(entries, str(path), context)}
    own = {"model_option", *OWN_SETTINGS, *EngineConfig().keywords()}
    context.obj = {}  # the tables, with values parsed as those of flags
    for name, table in tables.items():
        where = f"{path} [models.{name}]"
        chosen = list(_flags_in(table, where, context))
        for flag, _ in chosen:
            if flag.name not in own:
                what = (
                    f"{flag.opts[0].removeprefix('--')} applies to the whole server; set it at the top level"
                )
                raise typer.BadParameter(f"{where}: {what}", param_hint="--config")
        context.obj[name] = {flag.name: flag.process_value(context, value) for flag, value in chosen}
    return path


def _flags_in(entries: Mapping[str, Any], where: str, context: typer.Context) -> Iterator[tuple[Any, Any]]:
    """Yield the flag for each entry in a table of the configuration file, with the entry's value."""
    command: Any = context.command
    params = {param.name: param for param in command.params if param.name != "config"}
    flags = {
        flag.removeprefix("--"): param
        for param in params.values()
        for flag in param.opts
        if flag.startswith("--")
    }
    for entry, value in entries.items():
        name = entry.replace("_", "-")
        if name not in flags:
            near = nearest_name(name, [flag for flag, param in flags.items() if not param.hidden], 0.6)
            hint = f"; did you mean {near}?" if near else "; entries are named as the flags"
            raise typer.BadParameter(f"{where}: unknown entry {entry!r:.60}{hint}", param_hint="--config")
        yield flags[name], value


def serve(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Argument(help=MODEL_HELP, show_default=DEFAULT_MODEL, autocompletion=complete_model)
    ] = None,
    *,
    model_option: Annotated[
        str | None, typer.Option("--model", help="Same as the argument MODEL.", autocompletion=complete_model)
    ] = None,
    config: Annotated[  # noqa: ARG001 - its callback has read it
        Path | None,
        typer.Option(
            help="TOML file with values of flags, and a table [models.NAME] for each further model. Flags "
            "on the command line and environment variables take precedence.",
            is_eager=True,
            callback=_read_config,
        ),
    ] = None,
    settings: ServerSettings,
    engine: EngineFlags,
    ignored: IgnoredFlags,  # type: ignore[valid-type]  # a dataclass that is made from a table
) -> None:
    """Serve models with an OpenAI-compatible HTTP API.

    Every flag can also be set by an environment variable, for example --drain-s by LOGPROBE_DRAIN_S. Spaces
    in a variable separate the values of a repeated flag. On SIGTERM or Ctrl-C, the server finishes requests
    in progress before it exits.

    Examples:
        logprobe serve smollm2 --port 8000
        logprobe serve --config server.toml
        LOGPROBE_API_KEY=... logprobe serve ./model --host 0.0.0.0 --max-num-seqs 32
    """
    source = context.get_parameter_source("model_option")
    model = _model_of(model, model_option, is_typed=source is not None and source.name == "COMMANDLINE")
    if not settings.served_model_name:
        settings = replace(settings, model_name=model)
    given = {name: value_in(value) for name, value in vars(ignored).items() if value is not None}
    engine_config = EngineConfig(model=model, **vars(engine), **given)
    further = _further(settings, context.obj or {})
    for name in (model, *(one.config.model for one in further.values())):
        resolve(name)  # reject an unknown name before slow imports
    say_loading(model)
    from logprobe.server.app import serve as run

    run(engine_config, settings, further=further, ready=_say_ready)


def _further(settings: ServerSettings, tables: Mapping[str, dict[str, Any]]) -> dict[str, FurtherModel]:
    """Return the further models from --also-model and from the tables in the configuration file."""
    named = dict(setting.split("=", 1) for setting in settings.also_model)
    require(len(named) == len(settings.also_model), "also_model", "a name is used twice; choose another")
    twice = ", ".join(sorted(named.keys() & tables.keys()))
    require(not twice, "also_model", f"{twice} is also a table of the --config file; choose another name")
    chosen: dict[str, dict[str, Any]] = {name: {"model_option": model} for name, model in named.items()}
    return {name: _further_model(name, values, settings) for name, values in {**chosen, **tables}.items()}


def _further_model(name: str, values: dict[str, Any], settings: ServerSettings) -> FurtherModel:
    model = values.pop("model_option", None)
    require(model is not None, "config", f"the table [models.{name}] has no model; set model")
    own = {key: _frozen(value) for key, value in values.items()}
    limits = {key: own.pop(key) for key in OWN_SETTINGS if key in own}
    return FurtherModel.of(name, EngineConfig(model=model, **own), settings, **limits)


def _model_of(argument: str | None, option: str | None, *, is_typed: bool) -> str:
    """Return the model to serve; the command line takes precedence over the environment.

    `is_typed` is True if `option` comes from the command line.

    Raises:
        ParameterError: argument and option name different models.
    """
    is_one = argument is None or not is_typed or argument == option
    require(is_one, "model_option", f"is {option!r}, but the argument is {argument!r}; set only one of them")
    return argument or option or DEFAULT_MODEL


def _say_ready(url: str) -> None:
    typer.echo(f"listening on {url}", err=True)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def value_in(value: str | bool) -> Any:
    """Parse the value of an untyped flag: as JSON if it is valid JSON, otherwise as text."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value
