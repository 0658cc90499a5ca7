"""`logprobe audit`: check an endpoint's or stored rollouts' log-probabilities against exact ones."""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from logprobe.cli.command import naming
from logprobe.cli.data import FormatOption, LimitOption, LinesOption, TextColumnOption, read_texts
from logprobe.cli.options import MODEL_HELP, JsonOption, LoadFlags, complete_model, open_llm
from logprobe.cli.tables import console
from logprobe.cli.verdicts import print_conformance, print_report, print_rollouts
from logprobe.errors import InputError, OutputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from logprobe.analysis.auditing.report import AuditReport

KEY_VARIABLE: Final = "OPENAI_API_KEY"
# Flags for parameters that have another name in Python.
FLAGS: Final = {"url": "URL", "api_key": "--api-key-env", "texts": "--data", "model": "--endpoint-model"}
STORED: Final = ".parquet"
# Parameters that apply only to endpoints, or only to rollouts.
OF_ENDPOINTS: Final = (
    *("endpoint_model", "data", "text_column", "lines", "format", "limit", "api_key_env", "timeout_s"),
    *("before", "quick", "conformance", "plot"),
)
OF_NUMBERS: Final = (
    *("lora", "data", "text_column", "lines", "format", "limit", "before", "quick", "plot", "max_nats"),
)
OF_ROLLOUTS: Final = ("trainer", "temperature", "top_k", "top_p", "min_p")
ENDPOINT_HELP: Final = (
    "An OpenAI-compatible server, such as http://host:8000, or a sampler's stored rollouts."
)


_prompts = partial(typer.Option, rich_help_panel="Input")
_endpoint = partial(typer.Option, rich_help_panel="Endpoint")
_rollouts = partial(typer.Option, rich_help_panel="Rollouts")
_model = partial(typer.Option, rich_help_panel="Model")
_output = partial(typer.Option, rich_help_panel="Output")


@dataclass(frozen=True, kw_only=True)
class AuditModelFlags(LoadFlags):
    """Options of the model that computes the exact log-probabilities."""

    engine: Annotated[str, _model(help="native, or vllm (extra vllm).")] = "native"
    engine_options: Annotated[str | None, _model(help="vLLM's engine options as JSON.")] = None


def audit(
    context: typer.Context,
    endpoint: Annotated[str, typer.Argument(metavar="URL|ROLLOUTS.parquet", help=ENDPOINT_HELP)],
    trainer: Annotated[
        str | None,
        typer.Argument(
            metavar="TRAINER.parquet",
            help="The same samples with a trainer's log-probabilities, instead of --model.",
        ),
    ] = None,
    *,
    model: Annotated[
        str | None,
        _model(help=f"Model for the exact log-probabilities. {MODEL_HELP}", autocompletion=complete_model),
    ] = None,
    endpoint_model: Annotated[
        str | None, _endpoint(help="Name of the model at the endpoint; by default, the one listed there.")
    ] = None,
    lora: Annotated[
        str | None,
        _model(metavar="NAME=FOLDER", help="LoRA adapter to audit: its name at the endpoint and its folder."),
    ] = None,
    data: Annotated[
        list[str] | None,
        _prompts(
            help="Prompts: txt, jsonl, csv, Parquet, folders, glob patterns; default: built-in prompts."
        ),
    ] = None,
    text_column: TextColumnOption = "text",
    lines: LinesOption = False,
    format: FormatOption = None,  # noqa: A002 - the flag's name
    limit: LimitOption = None,
    api_key_env: Annotated[
        str | None, _endpoint(help=f"Environment variable with the API key; by default {KEY_VARIABLE}.")
    ] = None,
    timeout_s: Annotated[
        float, _endpoint(help="Timeout of a request in seconds, including waits while the server is busy.")
    ] = 60.0,
    before: Annotated[
        Path | None,
        _endpoint(help="Earlier report of the same endpoint (see --output), to find what changed."),
    ] = None,
    max_nats: Annotated[float, _output(help="Maximum error of a log-probability, in nats.")] = 1e-3,
    quick: Annotated[bool, _endpoint("--quick", help="Test fewer prompts and conditions.")] = False,
    conformance: Annotated[
        bool, _endpoint("--conformance", help="Check the API's fields, texts and bytes, not the numbers.")
    ] = False,
    temperature: Annotated[
        float | None,
        _rollouts(help="Temperature of the rollouts; by default, as stored in the file, else 1."),
    ] = None,
    top_k: Annotated[
        int | None, _rollouts(help="top_k of the rollouts; by default, as stored in the file, else 0 (all).")
    ] = None,
    top_p: Annotated[
        float | None, _rollouts(help="top_p of the rollouts; by default, as stored in the file, else 1.")
    ] = None,
    min_p: Annotated[
        float | None, _rollouts(help="min_p of the rollouts; by default, as stored in the file, else 0.")
    ] = None,
    plot: Annotated[
        Path | None, _output(help="Plot the log-probabilities to a PNG file (extra plot).")
    ] = None,
    output: Annotated[
        Path | None, _output("--output", "-o", help="Write the report as JSON, e.g. for a later --before.")
    ] = None,
    as_json: JsonOption = False,
    loading: AuditModelFlags,
) -> None:
    """Check the log-probabilities of a server or of rollouts.

    The exact log-probabilities are computed by a local model. For a server, the verdict is PASS or FAIL. The
    report states which distribution the log-probabilities are from, how large their errors are, whether they
    are the same in repeated, cached, concurrent and streamed requests, and whether they are right at all
    prompt lengths. With --conformance, the API is checked instead of the numbers, for fields that are
    accepted but ignored, and for tokens that have the text or bytes of other tokens.

    For stored rollouts, the sampler's log-probabilities are compared with a trainer's log-probabilities of
    the same tokens, from --model or TRAINER.parquet. The report says which correction to apply.

    The exit code is 1 if the numbers fail, that is, if they have a fault or an error larger than --max-nats.
    With --conformance, the exit code is 1 for any fault.

    Examples:
        logprobe audit http://127.0.0.1:8000 --model smollm2 -o report.json
        logprobe audit http://127.0.0.1:8000 --model smollm2 --conformance
        logprobe audit rollouts.parquet --model ./step-100 --temperature 0.8 --top-p 0.95
        logprobe audit rollouts.parquet trainer.parquet
    """
    engine = vars(loading)
    for path in (output, plot):
        if path is not None and not path.absolute().parent.is_dir():  # check before minutes of requests
            raise OutputError(f"{path}: the folder does not exist; create it first")
    if plot is not None and find_spec("matplotlib") is None:
        raise typer.BadParameter("requires matplotlib; pip install 'logprobe[plot]'", param_hint="--plot")
    is_stored = endpoint.endswith(STORED)
    if is_stored:
        _refuse(context, OF_ENDPOINTS, "applies only to endpoints")
    else:
        _refuse(context, OF_ROLLOUTS, "applies only to rollouts")
    if trainer is not None:
        _refuse(context, ("model", "lora"), "cannot be combined with TRAINER.parquet")
    elif model is None:
        raise typer.BadParameter("missing; name the model for the exact numbers", param_hint="--model")
    named = _named_folder(lora)
    report: Any
    from logprobe.analysis.auditing.endpoint import Endpoint

    if is_stored:
        from logprobe.analysis.rollouts import compare_rollouts

        drawn: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        with naming(rollouts="ROLLOUTS.parquet", other="--model"), _opened(model, named, engine) as llm:
            report = compare_rollouts(endpoint, trainer or llm, **drawn)
        is_right, show = report.is_right(max_nats), partial(print_rollouts, report, max_nats)
    elif conformance:
        _refuse(context, OF_NUMBERS, "does not apply to --conformance")
        from logprobe.analysis.auditing.conformance import check_conformance

        with naming(**FLAGS):
            server = Endpoint(endpoint, api_key=_key(api_key_env), timeout_s=timeout_s)
            with _opened(model, named, engine) as llm, _status() as progress:
                report = check_conformance(server, llm, model=endpoint_model, progress=progress)
        is_right, show = not report.faults, partial(print_conformance, report)
    else:
        from logprobe.analysis.auditing.run import audit as run

        asked: dict[str, Any] = {
            "model": endpoint_model,
            "texts": read_texts(data, text_column, kind=format, by_line=lines, limit=limit) if data else None,
            "before": None if before is None else _read_report(before),
            "max_nats": max_nats,
            "quick": quick,
        }
        with naming(**FLAGS):
            server = Endpoint(endpoint, api_key=_key(api_key_env), timeout_s=timeout_s)
            with _opened(model, named, engine) as llm, _status() as progress:
                report = run(server, llm, lora=named[0], progress=progress, **asked)
        is_right, show = report.numbers == "PASS", partial(print_report, report)
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
    """Yield the model, with a LoRA adapter if one is named; None if `model` is None."""
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
        raise typer.BadParameter(f"must be NAME=FOLDER, got {lora!r}", param_hint="--lora")
    return name or None, folder


def _key(variable: str | None) -> str | None:
    """Return the API key from the named environment variable, which must be set.

    Without a name, the default variable is read, which need not be set.
    """
    key = os.environ.get(variable or KEY_VARIABLE) or None
    if variable is not None and key is None:
        # The message does not repeat the name, because some users pass the key itself to this flag.
        raise typer.BadParameter("this environment variable is not set", param_hint="--api-key-env")
    return key


def _read_report(path: Path) -> AuditReport:
    from logprobe.analysis.auditing.report import AuditReport

    try:
        return AuditReport.from_dict(json.loads(path.read_bytes()))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error}); use another file") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: is not a report written with -o ({error})") from error


def _write(path: Path | None, write: Callable[[Path], object]) -> None:
    if path is None:
        return
    try:
        write(path)
    except OSError as error:
        raise OutputError(
            f"{path}: cannot be written ({error.strerror or error}); use another path"
        ) from error


@contextmanager
def _status() -> Iterator[Callable[[int, str], None]]:
    """Show the number of requests and the current check on standard error, if it is a terminal."""
    with console(stderr=True).status("starting") as status:
        yield lambda done, what: status.update(f"{done} requests, {what}")
