"""What the commands on data sets share: their flags, who scores the rows, and how rows come out."""

from __future__ import annotations

import inspect
import json
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import partial
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias, get_type_hints

import typer

from logprobe.analysis.io.sources import Format, check_columns, find_sources, read_rows, total_bytes
from logprobe.cli.options import (
    DEFAULT_MODEL,
    ENGINE_FLAGS,
    JsonOption,
    ModelOption,
    flags_for,
    open_llm,
    with_flags,
)
from logprobe.cli.tables import print_facts, summary_lines
from logprobe.errors import InputError, require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from logprobe.analysis.datasets.run import Workers
    from logprobe.analysis.datasets.settings import RaySettings, RowSettings
    from logprobe.analysis.io.sources import BadRow, Source
    from logprobe.analysis.progress import Advance

    Arrange: TypeAlias = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]

MAX_BAD_ROWS = 20  # that are named on standard error; a side file has all
RAY_POOL: Final = "logprobe.integrations.ray:RayPool"
"""Imported when `--engine ray` asks for it."""

_Files = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="FILE", help="A text, or data: txt, jsonl, csv, Parquet, folders, patterns; - is stdin."
    ),
]
_Output = Annotated[
    str | None, typer.Option("--output", "-o", help="Write each row's numbers to a .parquet or .jsonl file.")
]
_Summary = Annotated[bool, typer.Option("--summary", help="Print the totals alone.")]
LinesOption = Annotated[bool, typer.Option("--lines", help="Each line of a text file is a row.")]
FormatOption = Annotated[
    Format | None, typer.Option("--format", help="What the files are, whatever their names.")
]
ColumnOption = Annotated[str, typer.Option("--text-column", help="The column of the texts.")]
LimitOption = Annotated[int | None, typer.Option("--limit", min=1, help="Take so many texts.")]
ResumeOption = Annotated[
    bool, typer.Option("--resume", help="Go on with a run that was stopped, even killed.")
]
ForceOption = Annotated[bool, typer.Option("--force", help="Write the output anew if it exists.")]


def read_texts(
    files: list[str], column: str, *, kind: Format | None, by_line: bool, limit: int | None
) -> list[str]:
    """The texts of one column, the first so many.

    Raises:
        InputError: a file that cannot be read, or a row without a text.
    """
    texts = []
    for row in islice(read_rows(find_sources(files, kind=kind, by_line=by_line), [column]), limit):
        text = row.values.get(column)
        if row.problem is not None or not isinstance(text, str):
            raise InputError(f"{row.source}, line {row.line}: {row.problem or 'its text is no text'}")
        texts.append(text)
    return texts


@dataclass(frozen=True, kw_only=True)
class DataFlags:
    """The flags of every command on data sets, and what it does with them."""

    files: _Files = None
    output: _Output = None
    summary: _Summary = False
    lines: LinesOption = False
    format: FormatOption = None
    resume: ResumeOption = False
    force: ForceOption = False
    model: ModelOption = DEFAULT_MODEL
    as_json: JsonOption = False

    @classmethod
    def taken(cls, flags: dict[str, Any]) -> tuple[DataFlags, dict[str, Any]]:
        """These and the settings of `EngineConfig`, which are taken out of a command's flags."""
        own = cls(**{field.name: flags.pop(field.name) for field in fields(cls)})
        return own, {name: flags.pop(name) for name in ENGINE_FLAGS}

    def run(
        self,
        settings: RowSettings,
        cluster: RaySettings | None = None,
        *,
        arrange: Arrange | None = None,
        **loading: Any,
    ) -> None:
        """Write the rows to a file, or print them as JSON lines; then the summary.

        Rows that are printed come as they are scored, or all at the end as `arrange` has them.

        Raises:
            Exit: with 1 where a row was bad.
        """
        from logprobe.analysis.datasets.tasks import schema_of

        with flags_for():
            schema_of(settings)  # refused before a model is loaded
        sources = self.sources(settings.rows.columns)
        with _open_workers(self.model, sources, settings, cluster, **loading) as workers:
            self._print(workers, arrange)

    def sources(self, columns: Sequence[str]) -> list[Source]:
        """The files, of which each has the columns.

        Raises:
            InputError: a file that cannot be read, or that lacks one.
        """
        sources = find_sources(self.files or [], kind=self.format, by_line=self.lines)
        check_columns(sources, columns)
        return sources

    def _print(self, workers: Workers, arrange: Arrange | None) -> None:
        from logprobe.analysis.datasets.run import DatasetRun
        from logprobe.analysis.io.tables import json_line

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
    """Show a bar over the files of a run, and say after an interrupt what was kept and how to go on.

    Args:
        sources: the files.
        output: the name as it was given; None: nothing is kept.
        journal: the output whose parts are kept, where that is another.
    """
    from logprobe.analysis.io.journal import parts_folder
    from logprobe.analysis.progress import byte_bar

    try:
        with byte_bar(total_bytes(sources), shown=True, unit="rows") as advance, flags_for():
            yield advance
    except KeyboardInterrupt:
        if output:
            has_rows = parts_folder(Path(journal or output)).exists()
            what = "give --resume to go on after the rows that were kept" if has_rows else "no row was kept"
            typer.echo(f"{output}: interrupted; {what}", err=True)
        raise


def say_finished(output: str | None) -> None:
    """Print that the run to resume had ended."""
    typer.echo(f"{output}: the run is finished; nothing was left to do", err=True)


def fail_for_bad_rows(num_bad: int, where: str) -> None:
    """End the command with 1 where a row was bad; `where` has all of them."""
    if num_bad:
        typer.echo(f"error: {num_bad} bad rows; see {where}", err=True)
        raise typer.Exit(1)


def takes_data(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the flags of `DataFlags`, which come as keywords."""
    hints = get_type_hints(DataFlags, include_extras=True)
    made = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=hints[field.name],
        )
        for field in fields(DataFlags)
    ]
    return with_flags(command, made)


@contextmanager
def _open_workers(
    model: str, sources: Sequence[Source], settings: RowSettings, cluster: RaySettings | None, **loading: Any
) -> Iterator[Workers]:
    """What scores the rows: a model of this process, or the actors of a cluster, which load it themselves.

    `loading` are settings of `EngineConfig`.

    Raises:
        ModelError: the model cannot be had or used here.
        ParameterError: Ray is not installed, or a setting cannot be used.
    """
    if cluster is None:
        from logprobe.analysis.datasets.run import OneModel

        with open_llm(model, **loading) as llm:
            with flags_for():
                workers = OneModel(llm, sources, settings)
            yield workers
        return
    with flags_for():
        is_there = find_spec("ray") is not None
        require(is_there, "engine", "'ray' needs Ray; pip install 'logprobe[ray]'")
    from logprobe.llm import LLM

    new_pool = resolve_name(RAY_POOL)
    yield new_pool(partial(LLM, model, **loading), **asdict(cluster)).workers(sources, settings)
