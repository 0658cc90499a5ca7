"""Options and output of the commands that score the rows of a data set."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import typer

from logprobe.analysis.io.sources import Format, check_columns, find_sources, read_rows, total_bytes
from logprobe.cli.options import JsonOption, ModelFlags
from logprobe.cli.tables import print_facts, summary_lines
from logprobe.errors import InputError, require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from logprobe.analysis.datasets.run import Workers
    from logprobe.analysis.datasets.settings import RaySettings, RowSettings
    from logprobe.analysis.io.sources import BadRow, Source
    from logprobe.analysis.progress import Advance

    Arrange: TypeAlias = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]

MAX_BAD_ROWS = 20  # maximum number of bad rows named on standard error; the side file names all of them
RAY_POOL: Final = "logprobe.integrations.ray:RayPool"
"""Class that is imported only for `--engine ray`."""

_input = partial(typer.Option, rich_help_panel="Input")
_output = partial(typer.Option, rich_help_panel="Output")

FILES_HELP: Final = "Data: txt, jsonl, csv, Parquet, folders, glob patterns; -: standard input."
FilesArgument = Annotated[list[str] | None, typer.Argument(metavar="FILE", help=FILES_HELP)]
LinesOption = Annotated[bool, _input("--lines", help="Treat each line of a text file as a row.")]
FormatOption = Annotated[
    Format | None, _input("--format", help="Format of the files; by default, from their names.")
]
TextColumnOption = Annotated[str, _input("--text-column", help="Column with the texts.")]
KeepColumnsOption = Annotated[
    tuple[str, ...],
    _output(
        "--keep-columns", help="Column to copy to the output (values other than text as JSON); repeatable."
    ),
]
LimitOption = Annotated[int | None, _input("--limit", min=1, help="Use only this many texts.")]
ResumeOption = Annotated[bool, _output("--resume", help="Continue a run that was interrupted or killed.")]
ForceOption = Annotated[bool, _output("--force", help="Overwrite the output if it exists.")]


def read_texts(
    files: list[str], column: str, *, kind: Format | None, by_line: bool, limit: int | None
) -> list[str]:
    """Return the texts in one column of the files, at most `limit` of them.

    Raises:
        InputError: a file cannot be read, or a row has no text.
    """
    texts = []
    for row in islice(read_rows(find_sources(files, kind=kind, by_line=by_line), [column]), limit):
        text = row.values.get(column)
        if row.problem is not None or not isinstance(text, str):
            raise InputError(f"{row.place}: {row.problem or f'column {column!r} is not a string'}")
        texts.append(text)
    return texts


@dataclass(frozen=True, kw_only=True)
class InputFlags:
    """Files with rows, and the columns that every task has."""

    files: FilesArgument = None
    format: FormatOption = None
    lines: LinesOption = False
    text_column: TextColumnOption = "text"
    keep_columns: KeepColumnsOption = ()

    def sources(self, columns: Sequence[str]) -> list[Source]:
        """Find the input files, and check that each file has the columns.

        Raises:
            InputError: a file cannot be read, or lacks a column.
        """
        sources = find_sources(self.files or [], kind=self.format, by_line=self.lines)
        check_columns(sources, columns)
        return sources

    @property
    def columns(self) -> dict[str, Any]:
        """The columns, as fields of a task's settings."""
        return {"text_column": self.text_column, "keep_columns": self.keep_columns}


@dataclass(frozen=True, kw_only=True)
class DataFlags(InputFlags):
    """Files with rows, and the output of a run over them."""

    output: Annotated[
        str | None, _output("--output", "-o", help="Write the results to a .parquet or .jsonl file.")
    ] = None
    resume: ResumeOption = False
    force: ForceOption = False
    summary: Annotated[bool, _output("--summary", help="Print only the summary.")] = False
    as_json: JsonOption = False

    def run(
        self,
        settings: RowSettings,
        model: ModelFlags,
        cluster: RaySettings | None = None,
        *,
        arrange: Arrange | None = None,
    ) -> None:
        """Write the rows to a file or print them as JSON lines, then print the summary.

        Rows are printed as they are scored. With `arrange`, they are printed at the end, in the order in
        which `arrange` returns them.

        Raises:
            Exit: a row was bad; the exit code is 1.
        """
        from logprobe.analysis.datasets.tasks import schema_of

        schema_of(settings)  # validate before loading a model
        for flag, is_given in (("--resume", self.resume), ("--force", self.force)):
            if is_given and not self.output:
                raise typer.BadParameter("requires --output; set it, or leave this out", param_hint=flag)
        sources = self.sources(settings.rows.columns)
        with _open_workers(model, sources, settings, cluster) as workers:
            self._print(workers, arrange)

    def _print(self, workers: Workers, arrange: Arrange | None) -> None:
        from logprobe.analysis.datasets.run import DatasetRun
        from logprobe.analysis.io.files import json_line

        named = iter(range(MAX_BAD_ROWS))

        def print_bad(bad: BadRow) -> None:
            if next(named, None) is not None:
                typer.echo(bad, err=True)

        def print_row(row: dict[str, Any]) -> None:
            typer.echo(json_line(row))

        prints_rows = not (self.output or self.summary)
        waiting: list[dict[str, Any]] = []
        on_row = print_row if arrange is None else waiting.append
        with shown_run(workers.sources, self.output) as advance:
            run = DatasetRun(workers, advance=advance)
            if self.output:
                summary = run.to_file(self.output, resume=self.resume, force=self.force)
            else:
                summary = run.stream(on_row if prints_rows else None, print_bad)
        if run.was_finished:
            say_finished(self.output)
        if arrange is not None:
            for row in arrange(waiting):
                print_row(row)
        if self.as_json:
            typer.echo(json.dumps(asdict(summary)))
        else:
            print_facts(summary_lines(summary), err=prints_rows)
        fail_for_bad_rows(summary.num_bad, f"{self.output}.errors.jsonl" if self.output else "standard error")


@contextmanager
def shown_run(
    sources: Sequence[Source], output: str | None, journal: str | None = None
) -> Iterator[Advance | None]:
    """Show a progress bar during a run; after an interrupt, print whether the run can be resumed.

    Args:
        sources: the input files.
        output: output path as given by the user; None if no rows are stored.
        journal: path of the journal, if it differs from `output`.
    """
    from logprobe.analysis.io.journal import parts_folder
    from logprobe.analysis.progress import byte_bar

    try:
        with byte_bar(total_bytes(sources), shown=True, unit="rows") as advance:
            yield advance
    except KeyboardInterrupt:
        if output:
            has_rows = parts_folder(Path(journal or output)).exists()
            what = "use --resume to continue after the stored rows" if has_rows else "no rows were stored"
            typer.echo(f"{output}: interrupted; {what}", err=True)
        raise


def say_finished(output: str | None) -> None:
    """Print that the run to resume had already finished."""
    typer.echo(f"{output}: the run has already finished; nothing to do", err=True)


def fail_for_bad_rows(num_bad: int, where: str) -> None:
    """Exit with code 1 if any row was bad; `where` says where the bad rows are listed."""
    if num_bad:
        typer.echo(f"error: {num_bad} bad rows; see {where}", err=True)
        raise typer.Exit(1)


@contextmanager
def _open_workers(
    model: ModelFlags, sources: Sequence[Source], settings: RowSettings, cluster: RaySettings | None
) -> Iterator[Workers]:
    """Yield the workers that score rows: a model in this process, or Ray actors that load it themselves.

    Raises:
        ModelError: the model cannot be loaded.
        ParameterError: Ray is not installed, or a setting is invalid.
    """
    if cluster is None:
        from logprobe.analysis.datasets.run import OneModel

        with model.open() as llm:
            yield OneModel(llm, sources, settings)
        return
    require(find_spec("ray") is not None, "engine", "'ray' requires Ray; pip install 'logprobe[ray]'")
    from logprobe.llm import LLM

    new_pool = resolve_name(RAY_POOL)
    yield new_pool(partial(LLM, **vars(model)), **asdict(cluster)).workers(sources, settings)
