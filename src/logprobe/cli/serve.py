"""`logprobe serve`: a model behind OpenAI's HTTP interface."""

from __future__ import annotations

import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from logprobe.cli.options import (
    DEFAULT_MODEL,
    MODEL_HELP,
    complete_model,
    flags_for,
    takes_other_words,
    takes_settings,
    value_in,
)
from logprobe.config import EngineConfig
from logprobe.errors import nearest_name, require
from logprobe.models import resolve
from logprobe.server import ServerSettings

_Model = Annotated[
    str | None,
    typer.Argument(help=MODEL_HELP, show_default=DEFAULT_MODEL, autocompletion=complete_model),
]

_ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model", help="The same as the argument.", envvar="LOGPROBE_MODEL", autocompletion=complete_model
    ),
]


def _read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Let a file's entries stand where neither a flag nor the environment says anything."""
    if path is None:
        return None
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise typer.BadParameter(f"{path} cannot be read as TOML: {reason}", param_hint="--config") from error
    flags = {
        flag.removeprefix("--").replace("-", "_"): parameter.name
        for parameter in context.command.params
        for flag in parameter.opts
        if flag.startswith("--") and parameter.name != "config"
    }
    chosen = {}
    for entry, value in entries.items():
        name = entry.replace("-", "_")
        if name not in flags:
            near = nearest_name(name, flags, 0.6)
            hint = f"; did you mean {near}?" if near else ", which is named as the flags are"
            raise typer.BadParameter(f"{path} has no entry {entry!r:.60}{hint}", param_hint="--config")
        chosen[flags[name]] = value
    context.default_map = chosen
    return path


_Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="A TOML file of flags by their names; what is typed, and the environment, go before it.",
        envvar="LOGPROBE_CONFIG",
        is_eager=True,
        callback=_read_config,
    ),
]


@takes_other_words
@takes_settings(ServerSettings, EngineConfig, without=frozenset({"model"}))
def serve(
    context: typer.Context,
    model: _Model = None,
    model_option: _ModelOption = None,
    config: _Config = None,  # noqa: ARG001 - its callback has read it
    **flags: Any,
) -> None:
    """Serve a model over HTTP, with OpenAI's routes and exact log-probabilities.

    Every flag is read from the environment, too. SIGTERM lets requests in progress end.
    """
    own, engine = (
        {field.name: _frozen(flags[field.name]) for field in fields(kind) if field.name in flags}
        for kind in (ServerSettings, EngineConfig)
    )
    others = {name: flags[name] for name in flags.keys() - own.keys() - engine.keys()}
    words = {name: value_in(value) for name, value in others.items() if value is not None}
    with flags_for():
        source = context.get_parameter_source("model_option")
        model = _model_of(model, model_option, is_typed=source is not None and source.name == "COMMANDLINE")
        default_name = {} if own.get("served_model_name") else {"model_name": model}
        settings = ServerSettings(**default_name | _chosen(own))
        engine_config = EngineConfig(model=model, **engine | words)
    resolve(model)  # a name that does not exist is refused before anything heavy is imported
    typer.echo(f"loading {model} …", err=True)
    from logprobe.server.app import serve as run

    run(engine_config, settings, ready=_say_ready)


def _model_of(argument: str | None, option: str | None, *, is_typed: bool) -> str:
    """The model that is asked for: what is typed goes before the environment, and must be one."""
    is_one = argument is None or not is_typed or argument == option
    require(is_one, "model", f"is {option!r}, but the argument is {argument!r}; give one of them")
    return argument or option or DEFAULT_MODEL


def _say_ready(url: str) -> None:
    typer.echo(f"listening on {url}", err=True)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _chosen(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}
