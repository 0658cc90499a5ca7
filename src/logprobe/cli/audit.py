"""`logprobe audit`: check the numbers of an endpoint, or of stored rollouts, against exact ones."""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from logprobe.cli.data import ColumnOption, FormatOption, LimitOption, LinesOption, read_texts
from logprobe.cli.options import (
    ENGINE_FLAGS,
    MODEL_HELP,
    JsonOption,
    complete_model,
    flags_for,
    open_llm,
    takes_settings,
)
from logprobe.cli.tables import console
from logprobe.cli.verdicts import print_report, print_rollouts
from logprobe.config import EngineConfig
from logprobe.errors import InputError, OutputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from logprobe.analysis.auditing.report import AuditReport

KEY_VARIABLE: Final = "OPENAI_API_KEY"
# Of parameters that are called otherwise here.
FLAGS: Final = {"url": "URL", "api_key": "--api-key-env", "texts": "--data", "model": "--endpoint-model"}
STORED: Final = ".parquet"
# Parameters of the command that only one of the two kinds takes.
OF_ENDPOINTS: Final = (
    *("endpoint_model", "data", "text_column", "lines", "format", "limit", "api_key_env", "timeout_s"),
    *("before", "quick", "conformance", "plot"),
)
OF_ROLLOUTS: Final = ("trainer", "temperature", "top_k", "top_p", "min_p")
ENDPOINT_HELP: Final = (
    "An OpenAI-compatible server, as http://host:8000, or what a sampler stored of its samples."
)


@takes_settings(EngineConfig, only=ENGINE_FLAGS | {"engine", "engine_options"})
def audit(
    context: typer.Context,
    endpoint: Annotated[str, typer.Argument(metavar="URL|ROLLOUTS.parquet", help=ENDPOINT_HELP)],
    trainer: Annotated[
        str | None,
        typer.Argument(
            metavar="TRAINER.parquet", help="The same samples with a trainer's numbers, in place of --model."
        ),
    ] = None,
    *,
    model: Annotated[
        str | None,
        typer.Option(help=f"Computes the exact numbers. {MODEL_HELP}", autocompletion=complete_model),
    ] = None,
    endpoint_model: Annotated[
        str | None, typer.Option(help="The endpoint's name for it; by default the one model that it lists.")
    ] = None,
    lora: Annotated[
        str | None,
        typer.Option(metavar="NAME=FOLDER", help="Audit LoRA weights: the endpoint's name, the folder."),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(help="Prompts: txt, jsonl, csv, Parquet, folders, patterns; instead of ours."),
    ] = None,
    text_column: ColumnOption = "text",
    lines: LinesOption = False,
    format: FormatOption = None,  # noqa: A002 - the flag's name
    limit: LimitOption = None,
    api_key_env: Annotated[
        str | None, typer.Option(help=f"The environment variable of the key; by default {KEY_VARIABLE}.")
    ] = None,
    timeout_s: Annotated[
        float, typer.Option(help="Seconds of one request, waits for a full server included.")
    ] = 60.0,
    before: Annotated[
        Path | None,
        typer.Option(help="A report of before a change: what should have changed, and what not."),
    ] = None,
    max_nats: Annotated[float, typer.Option(help="How far a number may be from the exact one.")] = 1e-3,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer prompts and circumstances.")] = False,
    conformance: Annotated[
        bool, typer.Option("--conformance", help="Exit with 1 for a fault in API conformance, too.")
    ] = False,
    temperature: Annotated[
        float | None, typer.Option(help="That rollouts were drawn with; by default as they say themselves.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Likewise.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Likewise.")] = None,
    min_p: Annotated[float | None, typer.Option(help="Likewise.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the numbers to a PNG (extra plot).")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the report, for --before.")
    ] = None,
    as_json: JsonOption = False,
    **engine: Any,
) -> None:
    """Check log-probabilities against the same rows computed exactly.

    Two verdicts on a server. Numbers, PASS or FAIL: of which distribution they are, how far off, whether they
    stay the same beside other requests, in streams and over lengths. API conformance: a list of faults, such
    as fields that are accepted and ignored. Of rollouts that a sampler stored: how far a trainer's numbers of
    the same tokens are from them, and what to apply.
    Exit code 1 if the numbers fail: a fault in them, or a number further off than --max-nats.
    """
    for path in (output, plot):
        if path is not None and not path.absolute().parent.is_dir():  # before minutes of requests
            raise OutputError(f"{path}: there is no such folder; make it first")
    if plot is not None and find_spec("matplotlib") is None:
        raise typer.BadParameter("needs matplotlib; pip install 'logprobe[plot]'", param_hint="--plot")
    is_stored = endpoint.endswith(STORED)
    if is_stored:
        _refuse(context, OF_ENDPOINTS, "is of endpoints alone")
    else:
        _refuse(context, OF_ROLLOUTS, "goes with rollouts alone")
    if trainer is not None:
        _refuse(context, ("model", "lora"), "goes with no TRAINER.parquet, which has the numbers")
    elif model is None:
        raise typer.BadParameter("name the model that computes the exact numbers", param_hint="--model")
    named = _named_folder(lora)
    report: Any
    if is_stored:
        from logprobe.analysis.rollouts import compare_rollouts

        drawn: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        with flags_for(rollouts="ROLLOUTS.parquet", other="--model"), _opened(model, named, engine) as llm:
            report = compare_rollouts(endpoint, trainer or llm, **drawn)
        is_right, show = report.is_right(max_nats), partial(print_rollouts, report, max_nats)
    else:
        from logprobe.analysis.auditing.endpoint import Endpoint
        from logprobe.analysis.auditing.run import audit as run

        asked: dict[str, Any] = {
            "model": endpoint_model,
            "texts": read_texts(data, text_column, kind=format, by_line=lines, limit=limit) if data else None,
            "before": None if before is None else _read_report(before),
            "max_nats": max_nats,
            "quick": quick,
        }
        with flags_for(**FLAGS):
            server = Endpoint(endpoint, api_key=_key(api_key_env), timeout_s=timeout_s)
            with _opened(model, named, engine) as llm, _bar() as progress:
                report = run(server, llm, lora=named[0], progress=progress, **asked)
        is_right = report.numbers == "PASS" and not (conformance and report.faults("conformance"))
        show = partial(print_report, report)
        _write(plot, report.plot)
    values = json.dumps(report.to_dict())
    _write(output, lambda path: path.write_text(values, encoding="utf-8"))
    if as_json:
        typer.echo(values)
    else:
        show()
    if not is_right:
        raise typer.Exit(1)


def _refuse(context: typer.Context, names: Iterable[str], why: str) -> None:
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            hint = "TRAINER.parquet" if name == "trainer" else f"--{name.replace('_', '-')}"
            raise typer.BadParameter(why, param_hint=hint)


@contextmanager
def _opened(model: str | None, named: tuple[str | None, str], engine: Mapping[str, Any]) -> Iterator[Any]:
    """Load the model, with LoRA weights if they are named; None if no model is needed."""
    if model is None:
        yield None
        return
    name, folder = named
    with open_llm(model, **engine) as llm:
        if name is not None:
            llm.add_lora(name, folder)
        yield llm if name is None else llm.with_lora(name)


def _named_folder(lora: str | None) -> tuple[str | None, str]:
    name, separator, folder = (lora or "").partition("=")
    if lora is not None and not (name and separator and folder):
        raise typer.BadParameter(f"{lora!r} is not NAME=FOLDER", param_hint="--lora")
    return name or None, folder


def _key(variable: str | None) -> str | None:
    """Return the endpoint's key, from the variable that was named, which must be set, or the usual one."""
    key = os.environ.get(variable or KEY_VARIABLE) or None
    if variable is not None and key is None:
        # The name is not repeated: some take the flag for the key itself.
        raise typer.BadParameter("names no environment variable that is set", param_hint="--api-key-env")
    return key


def _read_report(path: Path) -> AuditReport:
    from logprobe.analysis.auditing.report import AuditReport

    try:
        return AuditReport.from_dict(json.loads(path.read_bytes()))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: is not a report that -o wrote ({error})") from error


def _write(path: Path | None, write: Callable[[Path], object]) -> None:
    if path is None:
        return
    try:
        write(path)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror or error})") from error


@contextmanager
def _bar() -> Iterator[Callable[[int, int, str], None] | None]:
    """Show a progress bar of requests on standard error; yield None if that is not a terminal."""
    screen = console(stderr=True)
    if not screen.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=screen, transient=True) as bar:
        task = bar.add_task("asking", total=None)

        def advance(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=f"{done}/{total} {what}")

        yield advance
