"""`logprobe processors`: which logits processors an engine can be started with, and what they take."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from logprobe.cli.session import JsonOption  # noqa: TC001 - typer reads the annotation at run time
from logprobe.processors.registry import available_processors, describe_processor

app = typer.Typer(name="processors", help="List logits processors.", no_args_is_help=True)


@app.command("list")
def list_(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Built-ins, entry points or module.path:ClassName; all that are known by name."),
    ] = None,
    *,
    as_json: JsonOption = False,
) -> None:
    """List logits processors with their arguments; with --json as JSON Schema."""
    found = [describe_processor(name) for name in names or available_processors()]
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    for one in found:
        keys = ", ".join(one["args"].get("properties", {})) if one["args"] else "any argument"
        typer.echo(f"{one['name']} ({keys})\n    {one['doc']}")
