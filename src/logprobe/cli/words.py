"""`logprobe score --by` (one row per word, sentence, token or character) and `logprobe pairs`."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from logprobe.analysis.datasets.settings import DataSettings
from logprobe.analysis.io.sources import BadRow, Format, Row, check_columns, find_sources, read_rows
from logprobe.cli.data import fail_for_bad_rows
from logprobe.cli.options import DEFAULT_MODEL, JsonOption, ModelOption, flags_for, open_llm, takes_engine
from logprobe.cli.tables import MISSING, table
from logprobe.errors import require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from logprobe.analysis.datasets.rows import CheckedRow
    from logprobe.cli.data import DataFlags
    from logprobe.cli.inputs import TextSource
    from logprobe.llm import LLM

ByOption = Annotated[
    Literal["word", "sentence", "token", "char"] | None,
    typer.Option("--by", help="Print one row per word, sentence, token or character."),
]
CsvOption = Annotated[bool, typer.Option("--csv", help="With --by: print the rows as CSV.")]
BoundaryOption = Annotated[
    Literal["end", "token"] | None,
    typer.Option(
        "--boundary",
        help="end (with --by): include the probability that a word ends in its surprisal. token (for rows "
        "with a context): split tokens that span the boundary as lm-evaluation-harness does.",
    ),
]
UnitOption = Annotated[
    Literal["nats", "bits"], typer.Option("--unit", help="With --by: unit of surprisals and entropies.")
]
# Settings that --by supports. All other settings request values that the rows of --by do not have.
_ALLOWED = frozenset({"text_column", "keep_columns", "bos", "window", "stride"})


def print_units(
    data: DataFlags,
    settings: DataSettings,
    source: TextSource | None,
    *,
    as_csv: bool,
    loading: dict[str, Any],
    **asked: Any,
) -> None:
    """Print one row per unit of a text, or of each row of the files (`source` None).

    `asked` are `by`, `boundary` and `unit`.

    Raises:
        BadParameter: a setting is not supported with --by.
        Exit: with 1, a row was bad.
    """
    from logprobe.analysis.datasets.rows import batches
    from logprobe.analysis.datasets.tasks import check_kept
    from logprobe.analysis.texts import ROW_COLUMNS

    if as_csv and data.as_json:
        raise typer.BadParameter("cannot be combined with --json", param_hint="--csv")
    usual = vars(DataSettings())
    with flags_for():
        for name, value in vars(settings).items():
            # --window and --stride set truncation="window"; --by reads long texts in windows anyway.
            is_window = (name, value) == ("truncation", "window")
            is_fit = name in _ALLOWED or value == usual[name] or is_window
            require(is_fit, name, "cannot be combined with --by")
        check_kept(settings, ["row", asked["by"], *ROW_COLUMNS])
        for name in ("output", "summary", "resume", "force"):
            require(not getattr(data, name), name, "cannot be combined with --by; redirect standard output")
    rows = _rows_of(data, settings, source)
    write = _csv_writer() if as_csv else _write_json if data.as_json else _write_table
    num_bad = 0
    with open_llm(data.model, **loading) as llm, flags_for(texts="FILE"):
        for batch in batches(rows):
            num_bad += _print_batch(llm, batch, settings, asked, write)
    fail_for_bad_rows(num_bad, "standard error")


def _rows_of(data: DataFlags, settings: DataSettings, source: TextSource | None) -> Iterator[CheckedRow]:
    """Return the texts to score; files and their columns are checked before this function returns."""
    from logprobe.analysis.datasets.rows import checked

    if source is not None:
        values = {settings.text_column: "".join(source.parts())}
        own = DataSettings(text_column=settings.text_column)
        return iter([checked(Row(index=0, source="text", line=1, num_bytes=0, values=values), own)])
    found = read_rows(data.sources(settings.columns), settings.columns)
    return (checked(row, settings) for row in found)


def _print_batch(
    llm: LLM,
    batch: list[CheckedRow],
    settings: DataSettings,
    asked: dict[str, Any],
    write: Callable[..., None],
) -> int:
    """Print the rows for a batch of texts, and return the number of bad texts."""
    good = [row for row in batch if not isinstance(row, BadRow)]
    by = asked["by"]
    ways = {name: getattr(settings, name) for name in ("bos", "window", "stride")}
    ways |= {name: asked[name] for name in ("boundary", "unit")}
    for question, scored in zip(good, llm.surprisal([row.texts[0] for row in good], **ways), strict=True):
        write([{"row": question.index, **question.kept, **row} for row in scored.rows(by)])
    for bad in batch:
        if isinstance(bad, BadRow):
            typer.echo(bad, err=True)
    return len(batch) - len(good)


def _csv_writer() -> Callable[[list[dict[str, Any]]], None]:
    writer = csv.writer(sys.stdout, lineterminator="\n")
    has_header = False

    def write(rows: list[dict[str, Any]]) -> None:
        nonlocal has_header
        if rows and not has_header:
            writer.writerow(rows[0])
            has_header = True
        writer.writerows(row.values() for row in rows)  # None becomes an empty cell

    return write


def _write_json(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        typer.echo(json.dumps(row))


def _write_table(rows: list[dict[str, Any]]) -> None:
    if rows:
        cells = [[_cell(value) for value in row.values()] for row in rows]
        is_left = [isinstance(value, str) for value in rows[0].values()]
        typer.echo(table([list(rows[0]), *cells], is_left) + "\n")


def _cell(value: Any) -> str:
    if value is None:
        return MISSING
    return f"{value:.4f}" if isinstance(value, float) else str(value)


# -- minimal pairs -------------------------------------------------------------------------------------------

_Files = Annotated[
    list[str], typer.Argument(metavar="FILE", help="Pairs: jsonl, csv, Parquet; -: standard input.")
]
_Good = Annotated[str, typer.Option("--good-column", help="Column with the text that should be more likely.")]
_Bad = Annotated[str, typer.Option("--bad-column", help="Column with the other text.")]
_Category = Annotated[str | None, typer.Option("--category-column", help="Column with the category.")]
_Bos = Annotated[
    bool, typer.Option("--bos/--no-bos", help="Start texts with BOS (EOS if the model has no BOS), or not.")
]
_Kind = Annotated[
    Format | None, typer.Option("--format", help="Format of the files; by default, from their names.")
]


@takes_engine
def pairs(
    *,
    files: _Files,
    good_column: _Good = "sentence_good",
    bad_column: _Bad = "sentence_bad",
    category_column: _Category = None,
    bos: _Bos = True,
    kind: _Kind = None,
    model: ModelOption = DEFAULT_MODEL,
    as_json: JsonOption = False,
    **loading: Any,
) -> None:
    """Evaluate a model on minimal pairs.

    Prints how often the good text of a pair is more likely than the bad one, overall and by category, with
    standard errors. The default column names are those of BLiMP. Pairs that cannot be read are reported on
    standard error and left out; the exit code is then 1.
    """
    from logprobe.analysis.datasets.rows import checked

    named = [good_column, bad_column, *([category_column] if category_column else [])]
    sources = find_sources(files, kind=kind)
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
    with open_llm(model, **loading) as llm, flags_for(pairs="FILE"):
        found = llm.minimal_pairs(
            [(row.values[good_column], row.values[bad_column]) for row in good],
            [str(row.values[category_column]) for row in good] if category_column else None,
            bos=bos,
        )
    accuracies = {"accuracy": found.accuracy, "by_category": found.by_category}
    typer.echo(json.dumps(accuracies, default=asdict) if as_json else str(found))
    fail_for_bad_rows(num_bad, "standard error")
