"""`logprobe words`: surprisal by word, sentence, token or character."""

from __future__ import annotations

import csv
import json
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import typer

from logprobe.analysis.datasets.settings import DataSettings
from logprobe.analysis.io.files import check_place, replacing, writing
from logprobe.analysis.io.sources import BadRow, Row, Source, check_apart, read_rows
from logprobe.cli.data import InputFlags, fail_for_bad_rows
from logprobe.cli.inputs import TextOption, holds_rows, source_of
from logprobe.cli.options import BosOption, ModelFlags
from logprobe.cli.tables import MISSING, table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from logprobe.analysis.datasets.rows import CheckedRow

_words = partial(typer.Option, rich_help_panel="Surprisal")
By = Literal["word", "sentence", "token", "char"]
Write: TypeAlias = "Callable[[list[dict[str, Any]]], None]"


def words(
    *,
    data: InputFlags,
    text: TextOption = None,
    by: Annotated[By, _words(help="Unit of a row.")] = "word",
    boundary: Annotated[
        Literal["end"] | None,
        _words(help="end: a word's surprisal includes the probability that the word ends there."),
    ] = None,
    unit: Annotated[Literal["nats", "bits"], _words(help="Unit of surprisals and entropies.")] = "nats",
    bos: BosOption = None,
    window: Annotated[
        int | None, _words(help="Tokens per window of a long text; by default the model's context.")
    ] = None,
    stride: Annotated[
        int | None, _words(help="Tokens from one window's start to the next; by default half a window.")
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV instead of a table.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines instead of a table.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write to this file: .csv as CSV, .jsonl as JSON lines, others as a table, unless --csv or "
            "--json is given.",
        ),
    ] = None,
    model: ModelFlags,
) -> None:
    """Print the surprisal of each word.

    Prints (or writes to a file) one line per word, with its surprisal, entropy and tokens. The input is a
    text, or a data set with a text in each row (files such as .jsonl, --lines, --format). Rows
    that cannot be read are reported on standard error, and the exit code is then 1.

    Examples:
        logprobe words story.txt -o words.csv
        logprobe words items.csv --text-column sentence --keep-columns item --boundary end --unit bits --csv
        logprobe words --text "The horse raced past the barn fell."
    """
    from logprobe.analysis.datasets.rows import batches
    from logprobe.analysis.datasets.tasks import check_kept
    from logprobe.analysis.texts import ROW_COLUMNS

    if as_csv and as_json:
        raise typer.BadParameter("cannot be combined with --json", param_hint="--csv")
    if output is not None:
        check_place(output)
    if output is not None and output.suffix == ".parquet":
        raise typer.BadParameter("cannot be Parquet; name a .csv or .jsonl file", param_hint="--output")
    suffix = "" if output is None or as_csv or as_json else output.suffix
    as_csv, as_json = as_csv or suffix == ".csv", as_json or suffix == ".jsonl"
    settings = DataSettings(**data.columns)
    check_kept(settings, ["row", by, *ROW_COLUMNS])
    rows = _rows_of(data, settings, text, output)
    num_bad = 0
    with model.open() as llm, _opened(output) as file:
        write = _csv_writer(file) if as_csv else partial(_write_json if as_json else _write_table, file)
        for batch in batches(rows):
            good = [row for row in batch if not isinstance(row, BadRow)]
            found = llm.surprisal(
                [row.texts[0] for row in good],
                bos=bos,
                window=window,
                stride=stride,
                boundary=boundary,
                unit=unit,
            )
            for row, scored in zip(good, found, strict=True):
                write([{"row": row.index, **row.kept, **values} for values in scored.rows(by)])
            for bad in batch:
                if isinstance(bad, BadRow):
                    typer.echo(bad, err=True)
                    num_bad += 1
    fail_for_bad_rows(num_bad, "standard error")


def _rows_of(
    data: InputFlags, settings: DataSettings, text: str | None, output: Path | None
) -> Iterator[CheckedRow]:
    """Return the texts to score; files, their columns and the output are checked before it returns."""
    from logprobe.analysis.datasets.rows import checked

    files = data.files or []
    is_data = data.lines or data.format or data.keep_columns or len(files) > 1 or any(map(holds_rows, files))
    if is_data and not files:
        raise typer.BadParameter(
            "missing; --lines, --format and --keep-columns apply to files only", param_hint="FILE"
        )
    if is_data and text is None:
        sources = data.sources(settings.columns)
        check_apart(sources, [output] if output else [])
        rows = read_rows(sources, settings.columns)
        return (checked(row, settings) for row in rows)
    named = [Source(name=files[0], format="txt")] if files else []
    check_apart(named, [output] if output else [])
    source = source_of(files[0] if files else None, text)
    values = {settings.text_column: "".join(source.parts)}
    return iter([checked(Row(index=0, source="text", line=1, num_bytes=0, values=values), settings)])


@contextmanager
def _opened(output: Path | None) -> Iterator[IO[str]]:
    if output is None:
        yield sys.stdout
        return
    # A run that fails must not replace the file of an earlier run.
    with (
        writing(output),
        replacing(output) as unfinished,
        unfinished.open("w", encoding="utf-8", newline="") as file,
    ):
        yield file


def _csv_writer(file: IO[str]) -> Write:
    writer = csv.writer(file, lineterminator="\n")
    has_header = False

    def write(rows: list[dict[str, Any]]) -> None:
        nonlocal has_header
        if rows and not has_header:
            writer.writerow(rows[0])
            has_header = True
        writer.writerows(row.values() for row in rows)  # None becomes an empty cell

    return write


def _write_json(file: IO[str], rows: list[dict[str, Any]]) -> None:
    for row in rows:
        typer.echo(json.dumps(row), file=file)


def _write_table(file: IO[str], rows: list[dict[str, Any]]) -> None:
    if rows:
        cells = [[_cell(value) for value in row.values()] for row in rows]
        is_left = [isinstance(value, str) for value in rows[0].values()]
        typer.echo(table([list(rows[0]), *cells], is_left) + "\n", file=file)


def _cell(value: Any) -> str:
    if value is None:
        return MISSING
    return f"{value:.4f}" if isinstance(value, float) else str(value)
