"""`logprobe classify` and `logprobe rerank`: labels of texts, and documents for a query."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

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
from logprobe.cli.score import (
    FilesArgument,
    ForceOption,
    FormatOption,
    LinesOption,
    OutputOption,
    ResumeOption,
    SummaryOption,
    open_workers,
    print_data,
)
from logprobe.cli.tables import print_facts, table
from logprobe.scoring.data.settings import LabelSettings, RerankSettings
from logprobe.scoring.data.sources import find_sources

if TYPE_CHECKING:
    from logprobe.scoring.labels import Classification

_Text = Annotated[str | None, typer.Option("--text", help="The text itself, instead of files.")]
_Top = Annotated[int | None, typer.Option("--top", min=1, help="Print so many documents, the best.")]


@takes_engine
@takes_settings(LabelSettings)
def classify(
    files: FilesArgument = None,
    *,
    text: _Text = None,
    output: OutputOption = None,
    summary: SummaryOption = False,
    lines: LinesOption = False,
    format: FormatOption = None,  # noqa: A002 - the flag's name
    resume: ResumeOption = False,
    force: ForceOption = False,
    model: ModelOption = DEFAULT_MODEL,
    as_json: JsonOption = False,
    **flags: Any,
) -> None:
    """Say how likely each label is after each text, whole, and which is the likeliest.

    `logprobs` are the labels' own (nats), `mass` is the probability that the model says any of them, and
    `probs` are their shares of it. A mass near nothing says that the model would not have answered so.

    A text by --text gets a table. Files are read as `logprobe score` reads data sets: a row of numbers for
    each of their rows, as JSON lines or by -o to a file, lists in the order of the labels, bad rows in a
    side file; exit code 1 where a row was bad.
    """
    loading = {name: flags.pop(name) for name in ENGINE_FLAGS}
    with flags_for():
        settings = settings_from(LabelSettings, flags)
    if bool(files) == (text is not None):
        raise typer.BadParameter("give either files (- is standard input) or --text", param_hint="FILE")
    if text is None:
        sources = find_sources(files or [], kind=format, by_line=lines)
        with open_workers(model, sources, settings, None, **loading) as workers:
            print_data(workers, output, resume=resume, force=force, as_json=as_json, summary_only=summary)
        return
    if output is not None:
        raise typer.BadParameter("is for files of texts", param_hint="--output")
    with open_llm(model, **loading) as llm, flags_for(prompt="--text"):
        found: Any = llm.classify(
            settings.asked(text), settings.labels, correction=settings.correction, content_free=settings.empty
        )
    _print_found(found, as_json=as_json)


def _print_found(found: Classification, *, as_json: bool) -> None:
    from logprobe.scoring.data.journal import json_line
    from logprobe.scoring.data.label_rows import label_values

    if as_json:
        typer.echo(json_line({"labels": list(found.labels), **label_values(found)}))
        return
    shares = sorted(found.probabilities.items(), key=lambda entry: -entry[1])
    logprobs = dict(zip(found.labels, found.logprobs, strict=True))
    lines = [[repr(label), f"{share:.4f}", f"{logprobs[label]:.4f}"] for label, share in shares]
    typer.echo(table([["label", "share", "logprob"], *lines], is_left=[True, False, False]))
    typer.echo()
    print_facts([["mass", f"{found.mass:.4g}"], ["margin", f"{found.margin:.4f} nats"]])


@takes_engine
@takes_settings(RerankSettings)
def rerank(
    files: FilesArgument = None,
    *,
    top: _Top = None,
    output: OutputOption = None,
    summary: SummaryOption = False,
    lines: LinesOption = False,
    format: FormatOption = None,  # noqa: A002 - the flag's name
    resume: ResumeOption = False,
    force: ForceOption = False,
    model: ModelOption = DEFAULT_MODEL,
    as_json: JsonOption = False,
    **flags: Any,
) -> None:
    """Say how relevant each document is to a query, in [0, 1], by a model that answers yes or no.

    Documents are rows of files, as `logprobe score` reads data sets. For one query their rows are printed as
    JSON lines, the best first; with a query of their own, or by -o to a file, in their order. Bad rows are
    told, or go to a side file; exit code 1 where a row was bad.
    """
    loading = {name: flags.pop(name) for name in ENGINE_FLAGS}
    with flags_for():
        settings = settings_from(RerankSettings, flags)
    if not files:
        raise typer.BadParameter("documents are in files (- is standard input)", param_hint="FILE")
    if top is not None and (output is not None or settings.query is None):
        raise typer.BadParameter("is for the rows of one query that are printed", param_hint="--top")
    sources = find_sources(files, kind=format, by_line=lines)

    def best_first(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return sorted(rows, key=_place)[:top]

    with open_workers(model, sources, settings, None, **loading) as workers:
        print_data(
            workers,
            output,
            resume=resume,
            force=force,
            as_json=as_json,
            summary_only=summary,
            arrange=None if settings.query is None else best_first,
        )


def _place(row: dict[str, Any]) -> tuple[bool, float]:
    """By which rows are sorted, the best first; what is no number comes last."""
    relevance: float = row["relevance_score"]
    return math.isnan(relevance), -relevance
