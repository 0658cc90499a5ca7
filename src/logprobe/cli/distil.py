"""`logprobe distil`: a teacher's most likely tokens on a data set, in the files that trainers read."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from logprobe.analysis.datasets.sources import Format, check_columns, find_sources
from logprobe.analysis.distillation.settings import DistilSettings, TrainingFormat
from logprobe.cli.data import says_how_to_resume
from logprobe.cli.options import (
    DEFAULT_MODEL,
    ENGINE_FLAGS,
    JsonOption,
    ModelOption,
    flags_for,
    open_llm,
    settings_from,
    takes_engine,
    takes_settings,
)
from logprobe.cli.tables import print_facts

if TYPE_CHECKING:
    from logprobe.analysis.distillation.run import DistilSummary

_Files = Annotated[
    list[str],
    typer.Argument(metavar="FILE", help="Data: txt, jsonl, csv, Parquet, folders, patterns; - is stdin."),
]
_Output = Annotated[str, typer.Option("--output", "-o", help="The folder that is written.")]
_Format = Annotated[TrainingFormat, typer.Option("--format", help="Whose files are written.")]
_Input = Annotated[
    Format | None, typer.Option("--input-format", help="What the files are, whatever their names.")
]
_Lines = Annotated[bool, typer.Option("--lines", help="Each line of a text file is a row.")]
_Resume = Annotated[bool, typer.Option("--resume", help="Go on with a run that was stopped, even killed.")]
_Force = Annotated[bool, typer.Option("--force", help="Write the output anew if it exists.")]


@takes_engine
@takes_settings(DistilSettings)
def distil(
    files: _Files,
    *,
    output: _Output,
    format: _Format = "parquet",  # noqa: A002 - the flag's name
    input_format: _Input = None,
    lines: _Lines = False,
    resume: _Resume = False,
    force: _Force = False,
    model: ModelOption = DEFAULT_MODEL,
    as_json: JsonOption = False,
    **flags: Any,
) -> None:
    """Write a teacher's most likely tokens on a data set, as a student's trainer reads them.

    The folder gets Parquet files, which `datasets.load_dataset` opens, and run.json. What the tokens that are
    kept leave out of the distributions is told for each row, and for all. Exit code 1 where a row was bad.
    """
    engine = {name: flags.pop(name) for name in ENGINE_FLAGS}
    with flags_for():
        settings = settings_from(DistilSettings, flags)
    sources = find_sources(files, kind=input_format, by_line=lines)
    check_columns(sources, [settings.column])
    sizes = [source.num_bytes for source in sources]
    num_bytes = None if None in sizes else sum(size or 0 for size in sizes)
    with open_llm(model, **engine) as llm:
        from logprobe.analysis.distillation.run import JOURNAL, DistilRun
        from logprobe.analysis.progress import byte_bar

        bar = byte_bar(num_bytes, shown=True, unit="rows")
        with says_how_to_resume(output, f"{output}/{JOURNAL}"), bar as advance, flags_for():
            run = DistilRun(llm, sources, settings, format, advance=advance)
            summary = run.to_folder(output, resume=resume, force=force)
    if run.was_finished:
        typer.echo(f"{output}: the run is finished; nothing was left to do", err=True)
    _print(summary, output, as_json=as_json)


def _print(summary: DistilSummary, output: str, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(asdict(summary)))
    else:
        facts = {name: value for name, value in asdict(summary).items() if value is not None}
        print_facts(
            [
                (name, f"{value:.6g}" if isinstance(value, float) else str(value))
                for name, value in facts.items()
            ]
        )
    if summary.num_bad:
        where = f"{output}/data.parquet.errors.jsonl"
        typer.echo(f"error: {summary.num_bad} bad rows; see {where}", err=True)
        raise typer.Exit(1)
