"""A data set scored from files to a file, in bounded memory, and resumed where it was stopped.

Before it: the command line, Python callers. Its way: `sources` → `rows` → `output` → `summary`.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from logprobe.errors import InputError
from logprobe.scoring.data.output import Journal
from logprobe.scoring.data.rows import BadRow, RowScorer, batches, schema_of
from logprobe.scoring.data.settings import DataSettings
from logprobe.scoring.data.sources import STDIN, find_sources, read_rows
from logprobe.scoring.data.summary import Summary, Tally
from logprobe.scoring.scorer import in_flight

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from logprobe.scoring.data.sources import Format, Row, Source
    from logprobe.scoring.scorer import Scorer

ROWS_A_PART = 1024
SECONDS_A_PART = 20.0

Scored = tuple[list["Row"], list[dict[str, Any] | BadRow]]


class DatasetRun:
    """Scores the rows of some files; every part that ends is told to `advance` as (bytes, rows).

    Raises:
        InputError: a file that cannot be read, an output that exists, other settings than the run resumed.
        ParameterError: settings that cannot be used.
    """

    def __init__(
        self,
        llm: Scorer,
        sources: Sequence[Source],
        settings: DataSettings,
        *,
        advance: Callable[[int, int], None] | None = None,
    ) -> None:
        self._scorer = RowScorer(llm, settings)
        self._sources = sources
        self._settings = settings
        self._advance = advance
        self._model: str = llm.engine.capabilities().model
        self._weights: str = f"{llm.engine.capabilities().dtype} {llm.engine.capabilities().weights}"

    def to_file(self, path: str | Path, *, resume: bool = False, force: bool = False) -> Summary:
        """Write every row's numbers to a Parquet or jsonl file, bad rows to a side file.

        Raises:
            OutputError: it cannot be written; what was written is kept for `resume`.
            LogprobeError: the engine failed; likewise.
        """
        if resume and any(source.name == STDIN for source in self._sources):
            raise InputError("standard input: cannot be read again; save it to a file to resume from it")
        journal = Journal(path, schema_of(self._settings), self._identity(), resume=resume, force=force)
        good: list[dict[str, Any]] = []
        bad: list[BadRow] = []
        since = time.monotonic()
        for rows, results in self._scored(skip=journal.num_done):
            good += [one for one in results if not isinstance(one, BadRow)]
            bad += [one for one in results if isinstance(one, BadRow)]
            if len(good) + len(bad) >= ROWS_A_PART or time.monotonic() - since >= SECONDS_A_PART:
                journal.write(rows[-1].index + 1, good, bad, self._scorer.info)
                good, bad, since = [], [], time.monotonic()
        if good or bad:
            journal.write(journal.num_done + len(good) + len(bad), good, bad, self._scorer.info)
        tally = Tally()
        for table in journal.tables():
            tally.add(table)
        summary = tally.summary(journal.num_bad())
        journal.finish()
        return summary

    def stream(
        self, on_row: Callable[[dict[str, Any]], None] | None, on_bad: Callable[[BadRow], None]
    ) -> Summary:
        """Hand each row's numbers and each bad row on as they come; nothing is kept.

        Raises:
            LogprobeError: the engine failed.
        """
        tally, schema, num_bad = Tally(), schema_of(self._settings), 0
        for _, results in self._scored(skip=0):
            good = [one for one in results if not isinstance(one, BadRow)]
            for one in results:
                if isinstance(one, BadRow):
                    num_bad += 1
                    on_bad(one)
                elif on_row is not None:
                    on_row(one)
            tally.add(pa.Table.from_pylist(good, schema))
        return tally.summary(num_bad)

    def _scored(self, skip: int) -> Iterator[Scored]:
        rows = islice(read_rows(self._sources, self._settings.columns), skip, None)

        def score(batch: list[Row]) -> Scored:
            return batch, self._scorer.score(batch)

        for batch, results in in_flight(score, batches(rows, self._settings)):
            if self._advance is not None:
                self._advance(int(sum(row.num_bytes for row in batch)), len(batch))
            yield batch, results

    def _identity(self) -> dict[str, Any]:
        """What a resumed run must share: everything that changes a row or its place."""
        inputs = [[source.name, source.format, source.by_line, source.num_bytes] for source in self._sources]
        return {"inputs": inputs, "model": self._model, "weights": self._weights} | asdict(self._settings)


def score_dataset(  # noqa: PLR0913 - keywords with defaults
    llm: Scorer,
    inputs: str | Sequence[str],
    output: str | Path,
    *,
    settings: DataSettings | None = None,
    kind: Format | None = None,
    by_line: bool = False,
    resume: bool = False,
    force: bool = False,
) -> Summary:
    """Score the rows of files, folders and patterns into one Parquet or jsonl file, in bounded memory.

    Args:
        llm: the model.
        inputs: txt, jsonl, csv and Parquet files, folders of them, patterns, or `-` for standard input.
        output: a name that ends in `.parquet` or `.jsonl`; bad rows go to the same name with
            `.errors.jsonl` after it.
        settings: which columns hold what, and how rows are read.
        kind: the inputs' format where their names do not say it.
        by_line: a txt file's rows are its lines, not the whole of it.
        resume: go on with a run that was stopped, even killed; no row is lost or doubled.
        force: write the output anew if it exists.

    Raises:
        InputError: a file that cannot be read, an output that exists, other settings than the run resumed.
        ParameterError: settings that cannot be used.
        OutputError: the output cannot be written.
    """
    names = [inputs] if isinstance(inputs, str) else inputs
    sources = find_sources(names, kind=kind, by_line=by_line)
    run = DatasetRun(llm, sources, settings or DataSettings())
    return run.to_file(output, resume=resume, force=force)
