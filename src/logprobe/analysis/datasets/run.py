"""A data set scored from files to a file, in bounded memory, and resumed where it was stopped.

Its way: `sources` → `rows` → `journal` → `summary`.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import pyarrow as pa

from logprobe.analysis.datasets.journal import Journal
from logprobe.analysis.datasets.rows import RowScorer, batches, checked, schema_of
from logprobe.analysis.datasets.settings import DataSettings
from logprobe.analysis.datasets.sources import STDIN, find_sources, read_rows
from logprobe.analysis.datasets.summary import Summary, Tally
from logprobe.analysis.scorer import in_flight
from logprobe.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from logprobe.analysis.datasets.rows import BadRow, CheckedRow, ScoredBatch
    from logprobe.analysis.datasets.settings import RowSettings
    from logprobe.analysis.datasets.sources import Format, Source
    from logprobe.analysis.scorer import Scorer

ROWS_A_PART = 1024
SECONDS_A_PART = 20.0


class Workers(Protocol):
    """Who scores the rows of some files: a model in this process, or many elsewhere."""

    @property
    def sources(self) -> Sequence[Source]:
        """The files."""

    @property
    def settings(self) -> RowSettings:
        """What they are asked."""

    def source_of_numbers(self) -> dict[str, str | None]:
        """The model and its weights, as far as they are known before the first row."""

    def scored(self, *, skip: int) -> Iterator[ScoredBatch]:
        """All rows but the first `skip`, in order, in batches.

        Raises:
            InputError: a file that cannot be read.
            LogprobeError: the engine failed.
        """
        ...


@runtime_checkable
class Pool(Protocol):
    """Many models elsewhere, such as `integrations.ray.RayPool`."""

    def workers(self, sources: Sequence[Source], settings: RowSettings) -> Workers:
        """What scores the rows of some files."""
        ...


def question_batches(
    sources: Sequence[Source], settings: RowSettings, *, skip: int
) -> Iterator[list[CheckedRow]]:
    """The checked rows of all files but the first `skip`, as many at a time as one call scores.

    Raises:
        InputError: a file that cannot be read.
    """
    reading = settings.rows
    rows = islice(read_rows(sources, reading.columns), skip, None)
    return batches(checked(row, reading) for row in rows)


class OneModel:
    """Scores rows with a model of this process.

    Raises:
        ParameterError: settings that this model cannot follow.
    """

    def __init__(self, llm: Scorer, sources: Sequence[Source], settings: RowSettings) -> None:
        self.sources = sources
        self.settings = settings
        self._scorer = RowScorer(llm, settings)

    def source_of_numbers(self) -> dict[str, str | None]:
        """The model and its weights."""
        return self._scorer.source_of_numbers()

    def scored(self, *, skip: int) -> Iterator[ScoredBatch]:
        """As `Workers.scored`; the next batch is made ready while the engine works on one."""
        return in_flight(self._scorer.score, question_batches(self.sources, self.settings, skip=skip))


class DatasetRun:
    """Scores the rows of some files; every batch that ends is told to `advance` as (bytes, rows)."""

    def __init__(self, workers: Workers, *, advance: Callable[[int, int], None] | None = None) -> None:
        self._workers = workers
        self._advance = advance
        self.was_finished = False  # the run that was to be resumed: nothing was left to do

    def to_file(self, path: str | Path, *, resume: bool = False, force: bool = False) -> Summary:
        """Write every row's numbers to a Parquet or jsonl file, bad rows to a side file.

        To resume a run that is finished does nothing, and gives the summary that it had.

        Raises:
            InputError: a file that cannot be read, an output that exists or that another process writes,
                other settings than the run resumed, or numbers of another model or other weights than those
                before them.
            OutputError: it cannot be written; what was written is kept for `resume`.
            LogprobeError: the engine failed; likewise.
        """
        workers = self._workers
        if resume and any(source.name == STDIN for source in workers.sources):
            raise InputError("standard input: cannot be read again; save it to a file to resume from it")
        schema = schema_of(workers.settings)
        with Journal(path, schema, self._identity(), resume=resume, force=force) as journal:
            if journal.summary is not None:
                self.was_finished = True
                return journal.summary
            self._write(journal)
            tally = Tally()
            for table in journal.groups():  # by parts, last bits would depend on how long each took
                tally.add(table)
            summary = tally.summary(journal.num_bad())
            journal.finish(summary)
        return summary

    def _write(self, journal: Journal) -> None:
        rows: list[dict[str, Any]] = []
        bad: list[BadRow] = []
        since = time.monotonic()
        batch, info = None, None
        for batch in self._scored(skip=journal.num_done):
            journal.agree(batch.source)
            rows += batch.rows
            bad += batch.bad
            info = batch.info or info  # a batch may hold bad rows alone
            if len(rows) + len(bad) >= ROWS_A_PART or time.monotonic() - since >= SECONDS_A_PART:
                journal.write(batch.end, rows, bad, info)
                rows, bad, since = [], [], time.monotonic()
        if batch is not None and (rows or bad):
            journal.write(batch.end, rows, bad, info)

    def stream(
        self, on_row: Callable[[dict[str, Any]], None] | None, on_bad: Callable[[BadRow], None]
    ) -> Summary:
        """Hand each row's numbers and each bad row on as they come; nothing is kept.

        Raises:
            LogprobeError: the engine failed.
        """
        tally, schema, num_bad = Tally(), schema_of(self._workers.settings), 0
        for batch in self._scored(skip=0):
            for bad in batch.bad:
                on_bad(bad)
            if on_row is not None:
                for row in batch.rows:
                    on_row(row)
            num_bad += len(batch.bad)
            tally.add(pa.Table.from_pylist(batch.rows, schema))
        return tally.summary(num_bad)

    def _scored(self, *, skip: int) -> Iterator[ScoredBatch]:
        for batch in self._workers.scored(skip=skip):
            if self._advance is not None:
                self._advance(int(batch.num_bytes), batch.num_rows)
            yield batch

    def _identity(self) -> dict[str, Any]:
        """What a resumed run must share: everything that changes a row or its place."""
        workers = self._workers
        inputs = [
            [source.name, source.format, source.by_line, source.num_bytes] for source in workers.sources
        ]
        return {"inputs": inputs} | workers.source_of_numbers() | asdict(workers.settings)


def score_dataset(
    llm: Scorer | Pool,
    inputs: str | Path | Sequence[str | Path],
    output: str | Path,
    *,
    settings: RowSettings | None = None,
    kind: Format | None = None,
    by_line: bool = False,
    resume: bool = False,
    force: bool = False,
) -> Summary:
    """Score the rows of files, folders and patterns into one Parquet or jsonl file, in bounded memory.

    Args:
        llm: the model, or a `RayPool` of models on a cluster.
        inputs: txt, jsonl, csv and Parquet files, folders of them, patterns, or `-` for standard input.
        output: a name that ends in `.parquet` or `.jsonl`; bad rows go to the same name with
            `.errors.jsonl` after it.
        settings: which columns hold what, and how rows are read; `LabelSettings`, `JudgeSettings` or
            `RerankSettings`: what is asked of each.
        kind: the inputs' format where their names do not say it.
        by_line: a txt file's rows are its lines, not the whole of it.
        resume: go on with a run that was stopped, even killed; no row is lost or doubled. One that is
            finished stays as it is.
        force: write the output anew if it exists.

    Raises:
        InputError: a file that cannot be read, an output that exists, other settings than the run resumed.
        ParameterError: settings that cannot be used.
        OutputError: the output cannot be written.
    """
    names = [inputs] if isinstance(inputs, str | os.PathLike) else inputs
    sources = find_sources([os.fspath(name) for name in names], kind=kind, by_line=by_line)
    asked = settings or DataSettings()
    workers = llm.workers(sources, asked) if isinstance(llm, Pool) else OneModel(llm, sources, asked)
    return DatasetRun(workers).to_file(output, resume=resume, force=force)
