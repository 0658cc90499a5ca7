"""`logprobe info` and `logprobe processors`: describe the installation and the logits processors."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

import typer

from logprobe import __version__
from logprobe.cli.command import Command
from logprobe.cli.options import JsonOption, LoadFlags, complete_model, open_llm
from logprobe.cli.tables import print_facts
from logprobe.models import KNOWN_MODELS
from logprobe.models.cache import home
from logprobe.processors.registry import available_processors, describe_processor

LIBRARIES = ("torch", "transformers", "tokenizers", "numpy")


def info(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Also load this model, and print which decoder runs it.", autocompletion=complete_model
        ),
    ] = None,
    *,
    as_json: JsonOption = False,
    loading: LoadFlags,
) -> None:
    """Describe the installation, or how a model runs on it.

    Prints versions, devices, kernels, threads and the cache folder; for a model, also its decoder.

    Examples:
        logprobe info
        logprobe info smollm2 --json
    """
    values = facts() if model is None else facts() | model_facts(model, **vars(loading))
    if as_json:
        typer.echo(json.dumps(values))
        return
    print_facts([[name, _line(value)] for name, value in values.items()])


def facts() -> dict[str, Any]:
    """Return the facts about the installation that `info` prints."""
    from logprobe.kernels import kernel_info
    from logprobe.kernels.info import native_library
    from logprobe.kernels.threads import num_threads

    native = native_library()
    return {
        "logprobe": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **{library: _version(library) for library in LIBRARIES},
        "devices": ["cpu", *_gpus()],
        "kernels": kernel_info(),
        "native": native
        and {
            "variant": native.variant,
            "version": __version__,
            "compiler": native.compiler,
            "digest": native.digest,
        },
        "threads": num_threads(),
        "cache": str(home()),
    }


def _version(library: str) -> str | None:
    try:
        return version(library)
    except PackageNotFoundError:
        return None


def _gpus() -> list[str]:
    """Return the names of the GPUs that torch finds; none without torch."""
    try:
        import torch
    except ImportError:
        return []
    return [torch.cuda.get_device_name(gpu) for gpu in range(torch.cuda.device_count())]


def model_facts(model: str, **engine: Any) -> dict[str, Any]:
    """Load a model; return its quantization, device, dtype, weights and decoder, and how it was verified.

    `engine` are fields of `EngineConfig`.
    """
    with open_llm(model, **engine) as llm:
        able = llm.engine.capabilities()
    known = KNOWN_MODELS.get(model)
    facts = {"model": able.model} if known is None else {"model": able.model, "title": known.title}
    if able.quantization is not None:
        facts["quantization"] = able.quantization
    facts |= {"device": able.device, "dtype": able.dtype, "weights": able.weights}
    if able.weight_version is not None:
        facts["weight_version"] = able.weight_version
    if able.layout is None:
        return facts
    kept = {name: value for name, value in asdict(able.layout).items() if value is not None}
    return facts | {"layers": able.layout.layers} | kept


def _line(value: Any) -> str:
    if value is None:
        return "not installed"
    if isinstance(value, dict):
        return ", ".join(f"{key}: {_line(part)}" for key, part in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


app = typer.Typer(name="processors", help="List logits processors.", no_args_is_help=True)


@app.command("list", cls=Command)
def list_(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Built-in names, entry points or module.path:ClassName; default: all known names."
        ),
    ] = None,
    *,
    as_json: JsonOption = False,
) -> None:
    """List logits processors with their arguments; with --json, as JSON Schema.

    Examples:
        logprobe processors list
        logprobe processors list my_module:MyProcessor --json
    """
    processors = [describe_processor(name) for name in names or available_processors()]
    if as_json:
        typer.echo(json.dumps(processors, indent=2))
        return
    for processor in processors:
        keys = ", ".join(processor["args"].get("properties", {})) if processor["args"] else "any argument"
        typer.echo(f"{processor['name']} ({keys})\n    {processor['doc']}")
