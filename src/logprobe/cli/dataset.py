"""How `logprobe score` runs a data set: rows to a file or as JSON lines, then the summary.

Before it: the flags. After it: `scoring.data`.
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Final

import typer

from logprobe.cli.options import flags_for, open_llm
from logprobe.cli.tables import print_facts, summary_lines
from logprobe.errors import require

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from logprobe.scoring.data.questions import BadRow
    from logprobe.scoring.data.run import Workers
    from logprobe.scoring.data.settings import DataSettings, RaySettings
    from logprobe.scoring.data.sources import Source
    from logprobe.scoring.data.summary import Summary

RAY_POOL: Final = "logprobe.integrations.ray:RayPool"
"""Imported when `--engine ray` asks for it."""


@contextmanager
def open_workers(
    model: str, sources: Sequence[Source], settings: DataSettings, cluster: RaySettings | None, **loading: Any
) -> Iterator[Workers]:
    """What scores the rows: a model of this process, or the actors of a cluster, which load it themselves.

    `loading` are settings of `EngineConfig`.

    Raises:
        ModelError: the model cannot be had or used here.
        ParameterError: Ray is not installed, or a setting cannot be used.
    """
    if cluster is None:
        from logprobe.scoring.data.run import OneModel

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


class DataRun:
    """Scores a data set to a file, or prints its rows as JSON lines; then the summary."""

    def __init__(self, workers: Workers, *, as_json: bool, summary_only: bool) -> None:
        self._workers = workers
        self._as_json = as_json
        self._summary_only = summary_only
        self._num_told = 0

    def to_file(self, output: str, *, resume: bool, force: bool) -> None:
        """Write the rows to a file; exit with 1 where one was bad."""
        from logprobe.scoring.data.run import DatasetRun

        with self._bar() as advance, flags_for():
            run = DatasetRun(self._workers, advance=advance)
            summary = run.to_file(output, resume=resume, force=force)
        self._print_summary(summary, f"{output}.errors.jsonl", rows_are_the_result=False)

    def print(self) -> None:
        """Print the rows; exit with 1 where one was bad."""
        from logprobe.scoring.data.output import json_line
        from logprobe.scoring.data.run import DatasetRun

        def print_row(row: dict[str, Any]) -> None:
            typer.echo(json_line(row))

        with self._bar() as advance, flags_for():
            run = DatasetRun(self._workers, advance=advance)
            summary = run.stream(None if self._summary_only else print_row, self._tell)
        self._print_summary(summary, "standard error", rows_are_the_result=not self._summary_only)

    @contextmanager
    def _bar(self) -> Iterator[Any]:
        from logprobe.scoring.progress import byte_bar

        sizes = [source.num_bytes for source in self._workers.sources]
        num_bytes = None if None in sizes else sum(size or 0 for size in sizes)
        with byte_bar(num_bytes, shown=True, unit="rows") as advance:
            yield advance

    def _tell(self, bad: BadRow) -> None:
        self._num_told += 1
        if self._num_told <= 20:
            typer.echo(f"bad row: {bad.source}, line {bad.line}: {bad.problem}", err=True)

    def _print_summary(self, summary: Summary, where: str, *, rows_are_the_result: bool) -> None:
        if self._as_json:
            typer.echo(json.dumps(asdict(summary)))
        else:
            print_facts(summary_lines(summary), err=rows_are_the_result)
        if summary.num_bad:
            typer.echo(f"error: {summary.num_bad} bad rows; see {where}", err=True)
            raise typer.Exit(1)
