"""`logprobe distil`: write a teacher's most likely tokens for a data set, in trainers' file formats."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Annotated

import typer

from logprobe.analysis.distillation.settings import DistilSettings, TrainingFormat
from logprobe.analysis.io.sources import Format, check_columns, find_sources
from logprobe.cli.command import naming
from logprobe.cli.data import (
    FILES_HELP,
    ForceOption,
    LinesOption,
    ResumeOption,
    TextColumnOption,
    fail_for_bad_rows,
    say_finished,
    shown_run,
)
from logprobe.cli.options import BosOption, JsonOption, ModelFlags
from logprobe.cli.tables import print_figures

_input = partial(typer.Option, rich_help_panel="Input")
_output = partial(typer.Option, rich_help_panel="Output")


def distil(
    files: Annotated[list[str], typer.Argument(metavar="FILE", help=FILES_HELP)],
    *,
    input_format: Annotated[
        Format | None, _input(help="Format of the input files; by default, from their names.")
    ] = None,
    lines: LinesOption = False,
    text_column: TextColumnOption = "text",
    messages_column: Annotated[
        str | None,
        _input(help="Column with a conversation, instead of a text; each assistant message becomes a row."),
    ] = None,
    output: Annotated[str, _output("--output", "-o", help="Output folder.")],
    format: Annotated[TrainingFormat, _output(help="Format of the output files.")] = "parquet",  # noqa: A002 - the flag's name
    resume: ResumeOption = False,
    force: ForceOption = False,
    logprobs: Annotated[
        int, typer.Option("--logprobs", help="Number of most likely tokens kept at each position.")
    ] = 64,
    bos: BosOption = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="Truncate texts to this many tokens; by default, a text longer than the context is a bad "
            "row."
        ),
    ] = None,
    as_json: JsonOption = False,
    model: ModelFlags,
) -> None:
    """Write a teacher's most likely tokens for each position of a data set.

    The files are training data for a student, in the format of a trainer (--format). The output folder
    contains Parquet files, which `datasets.load_dataset` opens, and run.json. The total probability of the
    tokens that are not kept is reported for each row and for the whole data set. The exit code is 1 if a row
    was bad.

    Examples:
        logprobe distil texts.jsonl --logprobs 64 -o teacher
        logprobe distil chats.jsonl --messages-column messages --format axolotl -o teacher-axolotl
    """
    with naming(top="--logprobs"):
        settings = DistilSettings(
            top=logprobs,
            text_column=text_column,
            messages_column=messages_column,
            bos=bos,
            max_tokens=max_tokens,
        )
    sources = find_sources(files, kind=input_format, by_line=lines)
    check_columns(sources, [settings.column])
    with model.open() as llm:
        from logprobe.analysis.distillation.run import JOURNAL, DistilRun

        with shown_run(sources, output, f"{output}/{JOURNAL}") as advance:
            run = DistilRun(llm, sources, settings, format, advance=advance)
            summary = run.to_folder(output, resume=resume, force=force)
    if run.was_finished:
        say_finished(output)
    print_figures(asdict(summary), as_json=as_json)
    fail_for_bad_rows(summary.num_bad, f"{output}/{JOURNAL}.errors.jsonl")
