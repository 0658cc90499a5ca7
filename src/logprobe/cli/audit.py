"""`logprobe audit`: check the numbers of an endpoint, or of stored rollouts, against exact ones."""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
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
MAX_NATS: Final = 1e-3
TIMEOUT_S: Final = 60.0
# Of parameters that are called otherwise here.
FLAGS: Final = {
    "url": "URL",
    "api_key": "--api-key-env",
    "texts": "--data",
    "model": "--endpoint-model",
}
STORED: Final = ".parquet"
# Parameters of the command that only one of the two kinds takes.
OF_ENDPOINTS: Final = (
    *("endpoint_model", "data", "text_column", "lines", "format", "limit", "api_key_env", "timeout_s"),
    *("before", "quick", "conformance", "plot"),
)
OF_ROLLOUTS: Final = ("trainer", "temperature", "top_k", "top_p", "min_p")

_Endpoint = Annotated[
    str,
    typer.Argument(
        metavar="URL|ROLLOUTS.parquet",
        help="An OpenAI-compatible server, as http://host:8000, or what a sampler stored of its samples.",
    ),
]
_Trainer = Annotated[
    str | None,
    typer.Argument(
        metavar="TRAINER.parquet", help="The same samples with a trainer's numbers, in place of --model."
    ),
]
_Model = Annotated[
    str | None,
    typer.Option("--model", help=f"Computes the exact numbers. {MODEL_HELP}", autocompletion=complete_model),
]
_EndpointModel = Annotated[
    str | None, typer.Option(help="The endpoint's name for it; by default the one model that it lists.")
]
_Lora = Annotated[
    str | None,
    typer.Option(
        "--lora", metavar="NAME=FOLDER", help="Audit LoRA weights: the endpoint's name, the folder."
    ),
]
_Data = Annotated[
    list[str] | None,
    typer.Option("--data", help="Prompts: txt, jsonl, csv, Parquet, folders, patterns; instead of ours."),
]
_KeyVariable = Annotated[
    str | None, typer.Option(help=f"The environment variable of the key; by default {KEY_VARIABLE}.")
]
_Before = Annotated[
    Path | None, typer.Option(help="A report of before a change: what should have changed, and what not.")
]
_MaxNats = Annotated[float, typer.Option(help="How far a number may be from the exact one.")]
_Timeout = Annotated[float, typer.Option(help="Seconds of one request, waits for a full server included.")]
_Conformance = Annotated[
    bool, typer.Option("--conformance", help="Exit with 1 for a fault in API conformance, too.")
]
_Quick = Annotated[bool, typer.Option("--quick", help="Fewer prompts and circumstances.")]
_Plot = Annotated[Path | None, typer.Option(help="Draw the numbers to a PNG (extra plot).")]
_Output = Annotated[Path | None, typer.Option("--output", "-o", help="Write the report, for --before.")]
_Temperature = Annotated[
    float | None, typer.Option(help="That rollouts were drawn with; by default as they say themselves.")
]
_TopK = Annotated[int | None, typer.Option(help="Likewise.")]
_TopP = Annotated[float | None, typer.Option(help="Likewise.")]
_MinP = Annotated[float | None, typer.Option(help="Likewise.")]


@takes_settings(EngineConfig, only=ENGINE_FLAGS | {"engine", "engine_options"})
def audit(
    context: typer.Context,
    endpoint: _Endpoint,
    trainer: _Trainer = None,
    *,
    model: _Model = None,
    endpoint_model: _EndpointModel = None,
    lora: _Lora = None,
    data: _Data = None,
    text_column: ColumnOption = "text",
    lines: LinesOption = False,
    format: FormatOption = None,  # noqa: A002 - the flag's name
    limit: LimitOption = None,
    api_key_env: _KeyVariable = None,
    timeout_s: _Timeout = TIMEOUT_S,
    before: _Before = None,
    max_nats: _MaxNats = MAX_NATS,
    quick: _Quick = False,
    conformance: _Conformance = False,
    temperature: _Temperature = None,
    top_k: _TopK = None,
    top_p: _TopP = None,
    min_p: _MinP = None,
    plot: _Plot = None,
    output: _Output = None,
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
        _check_writable(path)
    if plot is not None and find_spec("matplotlib") is None:  # before minutes of requests
        raise typer.BadParameter("needs matplotlib; pip install 'logprobe[plot]'", param_hint="--plot")
    if endpoint.endswith(STORED):
        _refuse(context, OF_ENDPOINTS, "is of endpoints alone")
        if trainer is not None:
            _refuse(context, ("model", "lora"), "goes with no TRAINER.parquet, which has the numbers")
        drawn = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        names = {"rollouts": "ROLLOUTS.parquet", "other": "--model"}
        with flags_for(**names), _opened(None if trainer else _given(model), lora, engine) as llm:
            is_right = _audit_rollouts(
                endpoint, trainer or llm, drawn, max_nats, output=output, as_json=as_json
            )
    else:
        _refuse(context, OF_ROLLOUTS, "goes with rollouts alone")
        texts = read_texts(data, text_column, kind=format, by_line=lines, limit=limit) if data else None
        asked: dict[str, Any] = {
            "model": endpoint_model,
            "texts": texts,
            "before": None if before is None else _read_report(before),
            "max_nats": max_nats,
            "quick": quick,
        }
        report = _audited(endpoint, _key(api_key_env), timeout_s, _given(model), lora, asked, engine)
        _show(report, output, plot, as_json=as_json)
        is_right = report.numbers == "PASS" and not (conformance and report.faults("conformance"))
    if not is_right:
        raise typer.Exit(1)


def _audited(
    url: str,
    api_key: str | None,
    timeout_s: float,
    model: str,
    lora: str | None,
    asked: Mapping[str, Any],
    engine: Mapping[str, Any],
) -> AuditReport:
    from logprobe.analysis.auditing.endpoint import Endpoint
    from logprobe.analysis.auditing.run import audit as run

    with flags_for(**FLAGS):
        endpoint = Endpoint(url, api_key=api_key, timeout_s=timeout_s)  # refused before a model is loaded
        with _opened(model, lora, engine) as llm, _bar() as progress:
            return run(endpoint, llm, lora=_named_folder(lora)[0], progress=progress, **asked)


# -- what comes in -------------------------------------------------------------------------------------------


def _refuse(context: typer.Context, names: Iterable[str], why: str) -> None:
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            hint = "TRAINER.parquet" if name == "trainer" else f"--{name.replace('_', '-')}"
            raise typer.BadParameter(why, param_hint=hint)


def _given(model: str | None) -> str:
    if model is None:
        raise typer.BadParameter("name the model that computes the exact numbers", param_hint="--model")
    return model


@contextmanager
def _opened(model: str | None, lora: str | None, engine: Mapping[str, Any]) -> Iterator[Any]:
    """The model, with LoRA weights where they are named; None where no model is needed."""
    name, folder = _named_folder(lora)
    if model is None:
        yield None
        return
    with open_llm(model, **engine) as llm:
        if name is not None:
            llm.add_lora(name, folder)
        yield llm if name is None else llm.with_lora(name)


def _named_folder(lora: str | None) -> tuple[str | None, str]:
    name, separator, folder = (lora or "").partition("=")
    if lora is not None and not (name and separator and folder):
        raise typer.BadParameter(f"{lora!r} is no NAME=FOLDER", param_hint="--lora")
    return name or None, folder


def _key(variable: str | None) -> str | None:
    """The key for the endpoint: of the variable that was named, which must be there, or of the usual one."""
    if variable is None:
        return os.environ.get(KEY_VARIABLE) or None
    key = os.environ.get(variable)
    if not key:
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
        raise InputError(f"{path}: is no report that -o wrote ({error})") from error


def _check_writable(path: Path | None) -> None:
    """Refuse a file that cannot be, before minutes of requests."""
    if path is not None and not path.absolute().parent.is_dir():
        raise OutputError(f"{path}: there is no such folder; make it first")


# -- what goes out -------------------------------------------------------------------------------------------


@contextmanager
def _bar() -> Iterator[Callable[[int, int, str], None] | None]:
    """A bar over requests on standard error; None where nobody sees it."""
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


def _show(report: AuditReport, output: Path | None, plot: Path | None, *, as_json: bool) -> None:
    values = json.dumps(report.to_dict())
    _write(output, lambda path: path.write_text(values, encoding="utf-8"))
    _write(plot, report.plot)
    if as_json:
        typer.echo(values)
    else:
        print_report(report)


def _write(path: Path | None, write: Callable[[Path], object]) -> None:
    if path is None:
        return
    try:
        write(path)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror or error})") from error


# -- rollouts ------------------------------------------------------------------------------------------------


def _audit_rollouts(
    path: str,
    trainer: Any,
    drawn: Mapping[str, Any],
    max_nats: float,
    *,
    output: Path | None,
    as_json: bool,
) -> bool:
    """Compare what a sampler stored with a trainer, show it, and say whether it is right."""
    from logprobe.analysis.rollouts import compare_rollouts

    report = compare_rollouts(path, trainer, **drawn)
    values = json.dumps(report.to_dict())
    _write(output, lambda path: path.write_text(values, encoding="utf-8"))
    if as_json:
        typer.echo(values)
    else:
        print_rollouts(report, max_nats)
    return report.is_right(max_nats)
