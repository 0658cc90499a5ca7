"""A data set's teacher rows from files to a folder, in bounded memory, and resumed where it was stopped.

Its way: `data.sources` → `rows` → `formats` → `data.journal`, of whose parts the folder's files are made.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import pyarrow as pa

from logprobe.analysis.datasets.journal import FORCE, Journal, naming, write_durably
from logprobe.analysis.datasets.rows import BadRow, source_of_numbers
from logprobe.analysis.datasets.sources import STDIN, find_sources, read_rows
from logprobe.analysis.distillation.formats import COMPRESSION_FILE, compression_config, schema_of, table_of
from logprobe.analysis.distillation.rows import SequenceReader, batches, scored, teacher_rows
from logprobe.analysis.distillation.settings import FORMATS, DistilSettings
from logprobe.analysis.scorer import in_flight
from logprobe.errors import InputError, require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from logprobe.analysis.datasets.sources import Format, Source
    from logprobe.analysis.distillation.rows import TeacherRow, TokenSequence
    from logprobe.analysis.distillation.settings import TrainingFormat
    from logprobe.analysis.scorer import Scorer
    from logprobe.records.info import LogprobsInfo

BYTES_A_PART = 1 << 26
BAD_A_PART = 1 << 13  # rows, none of which costs the model time
SECONDS_A_PART = 20.0
ENTRIES_A_GROUP, GROUPS_A_SHARD = 1 << 22, 1 << 4  # of a file's group of rows, and of the file
ENTRIES_A_ROW = 1 << 10  # that it counts for beside those of its positions: for its ids
RUN_FILE: Final = "run.json"
DATA: Final = "data"
JOURNAL: Final = "data.parquet"
MASSES: Final = ("num_positions", "lost_mass", "max_lost_mass")


@dataclass(frozen=True, slots=True, kw_only=True)
class DistilSummary:
    """What a teacher's data came to."""

    num_rows: int  # written; a conversation's turns are a row each
    num_bad: int  # rows of the data set, in the side file
    num_positions: int  # that a student learns from
    lost_mass: float | None  # mean over positions of what the k best leave out; None of no position
    max_lost_mass: float | None


class _FinishedRun(msgspec.Struct, frozen=True):
    """What `RUN_FILE` holds."""

    settings: dict[str, Any]
    summary: DistilSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class DistilledBatch:
    """What a batch of rows came to."""

    end: int  # one past the index of its last row
    num_rows: int  # of the data set
    num_bytes: float  # of the files, for progress
    table: pa.Table
    bad: list[BadRow]
    source: dict[str, str | None]
    info: LogprobsInfo | None


class DistilRun:
    """Writes a teacher's rows on some files; every batch that ends is told to `advance` as (bytes, rows).

    Raises:
        ParameterError: settings that this model cannot follow.
    """

    def __init__(
        self,
        llm: Scorer,
        sources: Sequence[Source],
        settings: DistilSettings,
        kind: TrainingFormat = "parquet",
        *,
        advance: Callable[[int, int], None] | None = None,
    ) -> None:
        self._llm, self._sources, self._settings, self._kind = llm, sources, settings, kind
        self._advance = advance
        self._reader = SequenceReader(llm, settings)
        self._vocabulary_size: int = llm.engine.capabilities().vocab_size
        self._top = min(settings.top, self._vocabulary_size)
        self.was_finished = False  # the run that was to be resumed: nothing was left to do

    def to_folder(self, path: str | Path, *, resume: bool = False, force: bool = False) -> DistilSummary:
        """Write all rows to a folder's Parquet files, bad rows to a side file.

        Raises:
            InputError: a file that cannot be read, an output that exists or that another process writes,
                other settings than the run resumed, or numbers of other weights than those before them.
            OutputError: it cannot be written; what was written is kept for `resume`.
            LogprobeError: the engine failed; likewise.
        """
        folder = Path(path)
        if resume and any(source.name == STDIN for source in self._sources):
            raise InputError("standard input: cannot be read again; save it to a file to resume from it")
        has_turns = self._settings.messages_column is not None
        schema = schema_of(self._kind, self._vocabulary_size, has_turns=has_turns)
        with Journal(folder / JOURNAL, schema, self._identity(), resume=resume, force=force) as journal:
            # Under the journal's lock: another run may have ended a moment ago.
            is_new = journal.is_new and not force
            if is_new and (finished := self._finished(folder, resume=resume)) is not None:
                journal.remove_parts()
                self.was_finished = True
                return finished
            self._write(journal)
            outline = _Outline(self._top)
            for table in journal.groups(
                list(MASSES)
            ):  # by parts, last bits would depend on how long each took
                outline.add(table)
            summary = outline.summary(journal.num_bad())
            if force or (folder / RUN_FILE).exists():
                _clear(folder)  # not before all new rows are in the journal
            journal.share(folder / DATA, outline.shards())
            if self._kind == "distillkit":
                _write_text(folder / COMPRESSION_FILE, compression_config(self._vocabulary_size, self._top))
            run = {"settings": self._identity(), "summary": asdict(summary)}
            _write_text(folder / RUN_FILE, json.dumps(run, indent=2) + "\n")
            journal.remove_parts()
        return summary

    def _finished(self, folder: Path, *, resume: bool) -> DistilSummary | None:
        """What a run came to that is finished; None where there is something to do."""
        file = folder / RUN_FILE
        if not file.exists():
            return None
        if not resume:
            raise InputError(f"{folder}: exists; give {FORCE} to write it anew, or another name")
        try:
            run = msgspec.json.decode(file.read_bytes(), type=_FinishedRun)
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(
                f"{file}: is no record of a run ({error}); give {FORCE}, or another name"
            ) from error
        now = json.loads(json.dumps(self._identity()))
        other = sorted(name for name in now if run.settings.get(name) != now[name])
        if other:
            remedy = f"repeat its settings, or give {FORCE}"
            raise InputError(f"{folder}: the run to resume had another {', '.join(other)}; {remedy}")
        return run.summary

    def _write(self, journal: Journal) -> None:
        tables: list[pa.Table] = []
        bad: list[BadRow] = []
        since, batch, info = time.monotonic(), None, None
        for batch in self._batches(skip=journal.num_done):
            journal.agree(batch.source)
            tables.append(batch.table)
            bad += batch.bad
            info = batch.info or info  # a batch may hold bad rows alone
            is_full = sum(table.nbytes for table in tables) >= BYTES_A_PART or len(bad) >= BAD_A_PART
            if is_full or time.monotonic() - since >= SECONDS_A_PART:
                journal.write_table(batch.end, pa.concat_tables(tables), bad, info)
                tables, bad, since = [], [], time.monotonic()
        if batch is not None and (tables or bad):
            journal.write_table(batch.end, pa.concat_tables(tables), bad, info)

    def _batches(self, *, skip: int) -> Iterator[DistilledBatch]:
        rows = islice(read_rows(self._sources, [self._settings.column]), skip, None)
        asked = batches((self._reader.read(row) for row in rows), self._top)
        for batch in in_flight(self._distil, asked):
            if self._advance is not None:
                self._advance(int(batch.num_bytes), batch.num_rows)
            yield batch

    def _distil(self, batch: list[TokenSequence | BadRow]) -> DistilledBatch:
        sequences = [one for one in batch if not isinstance(one, BadRow)]
        bad = [one for one in batch if isinstance(one, BadRow)]
        scores = scored(self._llm, sequences, self._top) if sequences else []
        source, info = source_of_numbers(self._llm), None
        rows: list[TeacherRow] = []
        for sequence, score in zip(sequences, scores, strict=True):
            assert score.record is not None
            info = score.record.info
            rows += teacher_rows(sequence, score.record)
        if info is not None:
            # Others may have taken over since.
            source |= {"weight_version": info.weight_version, "lora_version": info.lora_version}
        has_turns = self._settings.messages_column is not None
        schema = schema_of(self._kind, self._vocabulary_size, has_turns=has_turns)
        last = batch[-1]
        return DistilledBatch(
            end=(last.index if isinstance(last, BadRow) else last.row.index) + 1,
            num_rows=len(batch),
            num_bytes=sum(row.num_bytes for row in bad) + sum(one.row.num_bytes for one in sequences),
            table=table_of(rows, self._kind, self._vocabulary_size) if rows else schema.empty_table(),
            bad=bad,
            source=source,
            info=info,
        )

    def _identity(self) -> dict[str, Any]:
        """What a resumed run must share: everything that changes a row or its place."""
        inputs = [[source.name, source.format, source.by_line, source.num_bytes] for source in self._sources]
        own = {"inputs": inputs, "format": self._kind}
        return own | source_of_numbers(self._llm) | asdict(self._settings)


class _Outline:
    """What the rows come to, and how they share in files: a function of their numbers of positions alone."""

    def __init__(self, top: int) -> None:
        self._top = top
        self._num_rows = self._num_positions = self._num_entries = 0
        self._lost_mass, self._max_lost_mass = 0.0, 0.0
        self._groups: list[tuple[int, int]] = []  # of each its number by entries, and its first row

    def add(self, masses: pa.Table) -> None:
        """The rows that come next."""
        counts, means, largest = (masses.column(name).to_numpy() for name in MASSES)
        entries = self._num_entries + np.cumsum(counts * self._top + ENTRIES_A_ROW)
        numbers = entries // ENTRIES_A_GROUP
        before = self._groups[-1][0] if self._groups else -1
        firsts = np.flatnonzero(np.diff(numbers, prepend=before))
        self._groups += zip(numbers[firsts].tolist(), (self._num_rows + firsts).tolist(), strict=True)
        self._num_rows += len(counts)
        self._num_positions += int(counts.sum())
        self._num_entries = int(entries[-1])
        self._lost_mass += float(np.sum(counts * means))
        self._max_lost_mass = max(self._max_lost_mass, float(largest.max()))

    def summary(self, num_bad: int) -> DistilSummary:
        is_some = self._num_positions > 0
        return DistilSummary(
            num_rows=self._num_rows,
            num_bad=num_bad,
            num_positions=self._num_positions,
            lost_mass=self._lost_mass / self._num_positions if is_some else None,
            max_lost_mass=self._max_lost_mass if is_some else None,
        )

    def shards(self) -> list[list[int]]:
        """Where the groups of rows of each file end."""
        ends = [*(first for _, first in self._groups[1:]), self._num_rows]
        groups = zip((number for number, _ in self._groups), ends, strict=False)
        by_shard = groupby(groups, lambda group: group[0] // GROUPS_A_SHARD)
        return [[end for _, end in shard] for _, shard in by_shard] or [[]]


def _clear(folder: Path) -> None:
    """Remove what an earlier run wrote, and nothing else; last what says that it is whole."""
    files = *(folder / DATA).glob("train-*-of-*.parquet"), folder / COMPRESSION_FILE, folder / RUN_FILE
    with naming(folder):
        for file in files:
            file.unlink(missing_ok=True)


def _write_text(path: Path, text: str) -> None:
    with naming(path):
        write_durably(path, lambda unfinished: unfinished.write_text(text, encoding="utf-8"))


def distil(
    llm: Scorer,
    inputs: str | Path | Sequence[str | Path],
    output: str | Path,
    *,
    format: TrainingFormat = "parquet",  # noqa: A002 - the flag's name
    settings: DistilSettings | None = None,
    kind: Format | None = None,
    by_line: bool = False,
    resume: bool = False,
    force: bool = False,
) -> DistilSummary:
    """Write a teacher's most likely tokens on the rows of files as a student's trainer reads them.

    Args:
        llm: the teacher.
        inputs: txt, jsonl, csv and Parquet files, folders of them, patterns, or `-` for standard input.
        output: a folder: `data/train-*.parquet`, what the run was and came to (`run.json`), and bad rows
            (`data.parquet.errors.jsonl`).
        format: `parquet`, `distillkit` or `axolotl`.
        settings: what is learnt, and how many tokens are kept.
        kind: the inputs' format where their names do not say it.
        by_line: a txt file's rows are its lines, not the whole of it.
        resume: go on with a run that was stopped, even killed; no row is lost or doubled.
        force: write the output anew if it exists.

    Raises:
        InputError: a file that cannot be read, an output that exists, other settings than the run resumed.
        ParameterError: settings that cannot be used.
        OutputError: the output cannot be written.
    """
    require(format in FORMATS, "format", f"must be one of {', '.join(FORMATS)}, got {format!r}")
    names = [inputs] if isinstance(inputs, str | os.PathLike) else inputs
    sources = find_sources([os.fspath(name) for name in names], kind=kind, by_line=by_line)
    run = DistilRun(llm, sources, settings or DistilSettings(), format)
    return run.to_folder(output, resume=resume, force=force)
