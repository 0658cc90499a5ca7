"""`logprobe distil`: write a teacher's most likely tokens on a data set, in trainers' file formats."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from logprobe.analysis.distillation.settings import DistilSettings, TrainingFormat
from logprobe.analysis.io.sources import Format, check_columns, find_sources
from logprobe.cli.data import (
    ForceOption,
    LinesOption,
    ResumeOption,
    fail_for_bad_rows,
    say_finished,
    shown_run,
)
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
from logprobe.cli.tables import print_figures

_Files = Annotated[
    list[str],
    typer.Argument(
        metavar="FILE",
        help="Data: txt, jsonl, csv, Parquet, folders, glob patterns; -: standard input.",
    ),
]
_Output = Annotated[str, typer.Option("--output", "-o", help="Output folder.")]
_Format = Annotated[TrainingFormat, typer.Option("--format", help="Format of the output files.")]
_Input = Annotated[
    Format | None,
    typer.Option("--input-format", help="Format of the input files; by default, from their names."),
]


@takes_engine
@takes_settings(DistilSettings)
def distil(
    files: _Files,
    *,
    output: _Output,
    format: _Format = "parquet",  # noqa: A002 - the flag's name
    input_format: _Input = None,
    lines: LinesOption = False,
    resume: ResumeOption = False,
    force: ForceOption = False,
    model: ModelOption = DEFAULT_MODEL,
    as_json: JsonOption = False,
    **flags: Any,
) -> None:
    """Write a teacher's most likely tokens on a data set.

    The files are training data for a student, in the formats of several trainers. The output folder contains
    Parquet files, which `datasets.load_dataset` opens, and run.json. The probability mass of the tokens that
    are not kept is reported for each row and for the whole data set. Exit code 1 if a row was bad.
    """
    engine = {name: flags.pop(name) for name in ENGINE_FLAGS}
    with flags_for():
        settings = settings_from(DistilSettings, flags)
    sources = find_sources(files, kind=input_format, by_line=lines)
    check_columns(sources, [settings.column])
    with open_llm(model, **engine) as llm:
        from logprobe.analysis.distillation.run import JOURNAL, DistilRun

        with shown_run(sources, output, f"{output}/{JOURNAL}") as advance:
            run = DistilRun(llm, sources, settings, format, advance=advance)
            summary = run.to_folder(output, resume=resume, force=force)
    if run.was_finished:
        say_finished(output)
    print_figures(asdict(summary), as_json=as_json)
    fail_for_bad_rows(summary.num_bad, f"{output}/{JOURNAL}.errors.jsonl")
