"""The root command, which converts errors and interrupts in all commands to messages and exit codes.

The exit code is 0 for success, 1 if the command failed, 2 for invalid usage, and 130 after an interrupt.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import logging
import os
import sys
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NoReturn

import typer

from logprobe import __version__
from logprobe.cli.command import Command
from logprobe.cli.options import few_collections, with_groups
from logprobe.errors import BatchError, LogprobeError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# Where each command, or group of commands, is defined. Only what is run is imported: all of them take 60 ms.
COMMANDS: Final = {
    "score": "logprobe.cli.score:score",
    "words": "logprobe.cli.words:words",
    "pairs": "logprobe.cli.pairs:pairs",
    "dataset": "logprobe.cli.dataset:dataset",
    "classify": "logprobe.cli.labels:classify",
    "judge": "logprobe.cli.labels:judge",
    "rerank": "logprobe.cli.labels:rerank",
    "generate": "logprobe.cli.generate:generate",
    "uncertainty": "logprobe.cli.uncertainty:uncertainty",
    "lens": "logprobe.cli.lens:lens",
    "compare": "logprobe.cli.compare:compare",
    "distil": "logprobe.cli.distil:distil",
    "audit": "logprobe.cli.audit:audit",
    "verify": "logprobe.cli.verify:verify",
    "info": "logprobe.cli.info:info",
    "chat": "logprobe.cli.chat:chat",
    "serve": "logprobe.cli.serve:serve",
    "models": "logprobe.cli.models:app",
    "processors": "logprobe.cli.info:app",
}


def make_app(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """Return the root command with the named commands; all other commands are not imported."""
    app = typer.Typer(
        name="logprobe",
        rich_markup_mode=None,
        no_args_is_help=True,
        context_settings={"max_content_width": 100, "help_option_names": ["--help", "-h"]},
    )
    app.callback()(root)
    for name in names:
        command = resolve_name(COMMANDS[name])
        if isinstance(command, typer.Typer):
            app.add_typer(command)
        else:
            app.command(cls=_class_of(name))(with_groups(command))
    return app


def _class_of(name: str) -> type[Command]:
    if name != "serve":
        return Command
    from logprobe.cli.serve import ServeCommand

    return ServeCommand


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"logprobe {__version__}")
        raise typer.Exit


def root(
    context: typer.Context,
    *,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        typer.Option(help="Minimum level of messages on standard error.", envvar="LOGPROBE_LOG_LEVEL"),
    ] = "warning",
    version: Annotated[  # noqa: ARG001 - its callback prints it
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Exact token log-probabilities from open-weights language models."""
    if context.invoked_subcommand != "serve":  # which has its own format, and the same variable
        logging.basicConfig(format="%(levelname)s: %(message)s")
        logging.getLogger("logprobe").setLevel(log_level.upper())


def command() -> NoReturn:
    """Run the command line on the process's arguments, and exit with its code."""
    ended = [1]  # the exit code if an exception escapes
    # After a command that loaded a model, the interpreter frees its modules for 0.6 to 1.1 s (10 runs on 2
    # cores); this exit takes 0.03 s. It is registered before a command starts, and so runs after the exit
    # functions of all libraries that the command imports.
    atexit.register(_exit_now, ended)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Escape characters that the terminal's encoding does not have, instead of failing.
            stream.reconfigure(errors="backslashreplace")
    ended[0] = run()
    sys.exit(ended[0])


def _exit_now(ended: list[int]) -> None:
    # If the reader of a pipe has gone or the disk is full, earlier writes have already reported it.
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(ended[0])


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line on `arguments` (by default, the process's arguments); return the exit code."""
    words = sys.argv[1:] if arguments is None else arguments
    # If the first word is an option or not a command, the parser needs all commands.
    names = words[:1] if words and words[0] in COMMANDS else COMMANDS
    with few_collections():
        root_command = typer.main.get_command(make_app(names))
    try:
        code: int | None = root_command.main(args=arguments, prog_name="logprobe", standalone_mode=False)
    except LogprobeError as error:
        _say_error(_only_error(error))
        return 1
    except typer.TyperException as error:
        _say_wrong_use(error)
        return error.exit_code
    except OSError as error:
        reason = error.strerror or error
        _say_error(f"{error.filename or 'standard output'}: {reason}; free disk space, or use another file")
        return 1
    except (KeyboardInterrupt, typer.Abort):
        return 130
    return code or 0


def _only_error(error: LogprobeError) -> LogprobeError:
    """Return the request's error if `error` is the `BatchError` of a single request, otherwise `error`."""
    if isinstance(error, BatchError) and len(error.outputs) == 1:
        return next(iter(error.errors.values()))
    return error


def _say_error(error: object) -> None:
    typer.echo(f"error: {' '.join(str(error).split())}", err=True)


def _say_wrong_use(error: typer.TyperException) -> None:
    context: Any = getattr(error, "ctx", None)
    if getattr(error, "possibilities", None):  # of an option that does not exist
        shown = {
            flag
            for option in context.command.params
            if not getattr(option, "hidden", False)
            for flag in option.opts
        }
        error.possibilities = [flag for flag in error.possibilities if flag in shown]  # type: ignore[attr-defined]
    message = error.format_message()
    if "\n" in message:  # a group without a command: the message is its help
        typer.echo(message, err=True)
        return
    remedy = f"; see `{context.command_path} --help`" if context is not None else ""
    _say_error(f"{message.rstrip('.')}{remedy}")
