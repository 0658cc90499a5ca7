"""One loaded model for one command, with talk on standard error that a person can read."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from logprobe.errors import ParameterError
from logprobe.models import DEFAULT_MODEL, resolve

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logprobe.llm import LLM

ModelOption = Annotated[
    str, typer.Option("--model", help="A known name, a local folder, a .gguf file, or a Hugging Face id.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]

__all__ = ["DEFAULT_MODEL", "JsonOption", "ModelOption", "flags_for", "open_llm"]


@contextmanager
def open_llm(model: str) -> Iterator[LLM]:
    """Load a model, and let it go afterwards.

    Raises:
        ModelError: the model cannot be had or used.
    """
    resolve(model)  # a name that does not exist is told before anything heavy is imported
    typer.echo(f"loading {model} …", err=True)
    from logprobe.llm import LLM

    with quiet_transformers():
        llm = LLM(model)
    with llm:
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


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' progress bar and advice from standard error while a model loads."""
    from transformers.utils import logging as transformers_logging

    logging: Any = transformers_logging  # its functions carry no types
    verbosity, has_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bar:
            logging.enable_progress_bar()
