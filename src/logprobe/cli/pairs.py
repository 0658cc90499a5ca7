"""`logprobe pairs`: accuracy on minimal pairs."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from typing import Annotated

import typer

from logprobe.analysis.datasets.settings import DataSettings
from logprobe.analysis.io.sources import BadRow, Row, check_columns, find_sources, read_rows
from logprobe.cli.command import naming
from logprobe.cli.data import FormatOption, fail_for_bad_rows
from logprobe.cli.options import JsonOption, ModelFlags

_columns = partial(typer.Option, rich_help_panel="Input")


def pairs(
    *,
    files: Annotated[
        list[str], typer.Argument(metavar="FILE", help="Pairs: jsonl, csv, Parquet; -: standard input.")
    ],
    format: FormatOption = None,  # noqa: A002 - the flag's name
    good_column: Annotated[
        str, _columns(help="Column with the text that should be more likely.")
    ] = "sentence_good",
    bad_column: Annotated[str, _columns(help="Column with the other text.")] = "sentence_bad",
    category_column: Annotated[str | None, _columns(help="Column with the category.")] = None,
    bos: Annotated[
        bool,
        typer.Option("--bos/--no-bos", help="Start each text with BOS (EOS if there is no BOS), or not."),
    ] = True,
    as_json: JsonOption = False,
    model: ModelFlags,
) -> None:
    """Evaluate a model on minimal pairs.

    Prints how often the good text of a pair is more likely than the bad one, overall and by category, with
    standard errors. The default column names are those of BLiMP. Pairs that cannot be read are left out and
    reported on standard error; the exit code is then 1.

    Examples:
        logprobe pairs blimp.jsonl --category-column UID
    """
    from logprobe.analysis.datasets.rows import checked

    named = [good_column, bad_column, *([category_column] if category_column else [])]
    sources = find_sources(files, kind=format)
    check_columns(sources, named)
    good: list[Row] = []
    num_bad = 0
    for row in read_rows(sources, named):
        texts = [checked(row, DataSettings(text_column=name)) for name in (good_column, bad_column)]
        wrong = next((text for text in texts if isinstance(text, BadRow)), None)
        if wrong is None:
            good.append(row)
        else:
            num_bad += 1
            typer.echo(wrong, err=True)
    with model.open() as llm, naming(pairs="FILE"):
        found = llm.minimal_pairs(
            [(row.values[good_column], row.values[bad_column]) for row in good],
            [str(row.values[category_column]) for row in good] if category_column else None,
            bos=bos,
        )
    accuracies = {"accuracy": found.accuracy, "by_category": found.by_category}
    typer.echo(json.dumps(accuracies, default=asdict) if as_json else str(found))
    fail_for_bad_rows(num_bad, "standard error")
