"""Write a teacher's most likely tokens for a data set to a folder, in bounded memory and resumably.

Data flow: `io.sources` → `rows` → `formats` → `io.journal`, whose parts become the folder's files.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from logprobe._arrow import pa  # noqa: TC001 - msgspec reads the field
from logprobe.analysis.distillation.formats import COMPRESSION_FILE, compression_config, schema_of, table_of
from logprobe.analysis.distillation.rows import SequenceReader, in_calls, scored, teacher_rows
from logprobe.analysis.distillation.settings import FORMATS, DistilSettings
from logprobe.analysis.io.files import write_durably
from logprobe.analysis.io.journal import AnsweredRows, Journal, advancing, files_written, source_of_numbers
from logprobe.analysis.io.sources import BadRow, check_apart, find_sources, identity_of, read_rows
from logprobe.analysis.scorer import in_flight
from logprobe.errors import require

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from logprobe.analysis.distillation.rows import TeacherRow, TokenSequence
    from logprobe.analysis.distillation.settings import TrainingFormat
    from logprobe.analysis.io.sources import Format, Source
    from logprobe.analysis.progress import Advance
    from logprobe.analysis.scorer import Scorer

# An entry is one of the k likeliest tokens at one position.
ENTRIES_A_GROUP, GROUPS_A_SHARD = 1 << 22, 1 << 4  # entries per row group, and row groups per file
ENTRIES_A_ROW = 1 << 10  # added to a row's number of entries to account for its token ids
DATA: Final = "data"
JOURNAL: Final = "data.parquet"
MASSES: Final = ("num_positions", "lost_mass", "max_lost_mass")


@dataclass(frozen=True, slots=True, kw_only=True)
class DistilSummary:
    """Summary of the data that a teacher produced."""

    num_rows: int  # rows written; each assistant turn of a conversation is one row
    num_bad: int  # data set rows written to the side file
    num_positions: int  # target positions
    lost_mass: float | None  # mean probability outside the top k, over positions; None without positions
    max_lost_mass: float | None  # maximum over positions


class DistilledBatch(AnsweredRows, frozen=True, kw_only=True):
    """Output rows of a batch."""

    rows: pa.Table

    def table(self, schema: pa.Schema) -> pa.Table:
        """Return the rows, which already have `schema`."""
        del schema
        return self.rows


class DistilRun:
    """Writes a teacher's rows for the given files, and calls `advance(num_bytes, num_rows)` for every batch.

    Raises:
        ParameterError: the model cannot run with these settings.
    """

    def __init__(
        self,
        llm: Scorer,
        sources: Sequence[Source],
        settings: DistilSettings,
        kind: TrainingFormat = "parquet",
        *,
        advance: Advance | None = None,
    ) -> None:
        self._llm, self._sources, self._settings, self._kind = llm, sources, settings, kind
        self._advance = advance
        self._reader = SequenceReader(llm, settings)
        self._vocabulary_size: int = llm.engine.capabilities().vocab_size
        self._top = min(settings.top, self._vocabulary_size)
        has_turns = settings.messages_column is not None
        self._schema = schema_of(kind, self._vocabulary_size, has_turns=has_turns)
        self.was_finished = False  # True if the run to resume was already complete

    def to_folder(self, path: str | Path, *, resume: bool = False, force: bool = False) -> DistilSummary:
        """Write all rows to Parquet files in a folder, and bad rows to a side file.

        Raises:
            InputError: an input cannot be read, the output exists, another process writes the output, or the
                run to resume had other settings, another model or other weights.
            OutputError: the output cannot be written, or is also an input; completed parts are kept for
                `resume`.
            LogprobeError: the engine failed; completed parts are kept for `resume`.
        """
        folder = Path(path)
        check_apart(self._sources, [folder / DATA, folder / "run.json", *files_written(folder / JOURNAL)])
        # A resumed run must share everything that affects the values or the order of rows.
        settings = identity_of(self._sources, resume=resume) | {"format": self._kind}
        settings |= source_of_numbers(self._llm) | asdict(self._settings)
        with Journal(
            folder / JOURNAL,
            self._schema,
            settings,
            DistilSummary,
            folder=folder,
            resume=resume,
            force=force,
        ) as journal:
            self.was_finished = journal.summary is not None
            tally = DistilTally(self._top)
            write = partial(self._write_files, journal, tally, folder, is_forced=force)
            batches = self._batches(skip=journal.num_done)
            return journal.summary or journal.complete(batches, tally, write, columns=list(MASSES))

    def _write_files(
        self, journal: Journal[DistilSummary], tally: DistilTally, folder: Path, *, is_forced: bool
    ) -> None:
        """Remove the files of an earlier run, and write the folder's files from the journal's parts."""
        run_file = folder / "run.json"
        if is_forced or run_file.exists():
            for file in (*(folder / DATA).glob("train-*-of-*.parquet"), folder / COMPRESSION_FILE, run_file):
                file.unlink(missing_ok=True)  # run.json, which marks the folder as complete, is last
        journal.share(folder / DATA, tally.shards())
        if self._kind == "distillkit":
            text = compression_config(self._vocabulary_size, self._top)
            write_durably(folder / COMPRESSION_FILE, lambda path: path.write_text(text))

    def _batches(self, *, skip: int) -> Iterator[DistilledBatch]:
        rows = islice(read_rows(self._sources, [self._settings.column]), skip, None)
        asked = in_calls((self._reader.read(row) for row in rows), self._top)
        return advancing(in_flight(self._distil, asked), self._advance)

    def _distil(self, batch: list[TokenSequence | BadRow]) -> DistilledBatch:
        sequences = [one for one in batch if not isinstance(one, BadRow)]
        bad = [one for one in batch if isinstance(one, BadRow)]
        scores = scored(self._llm, sequences, self._top) if sequences else []
        info = None
        rows: list[TeacherRow] = []
        for sequence, score in zip(sequences, scores, strict=True):
            assert score.record is not None
            info = score.record.info
            rows += teacher_rows(sequence, score.record)
        last = batch[-1]
        return DistilledBatch(
            end=(last.index if isinstance(last, BadRow) else last.row.index) + 1,
            num_rows=len(batch),
            num_bytes=sum(row.num_bytes for row in bad) + sum(one.row.num_bytes for one in sequences),
            rows=table_of(rows, self._kind, self._vocabulary_size) if rows else self._schema.empty_table(),
            bad=bad,
            source=source_of_numbers(self._llm, info),
            info=info,
        )


class DistilTally:
    """Accumulates the summary and assigns rows to files, based only on each row's number of positions."""

    def __init__(self, top: int) -> None:
        self._top = top
        self._num_rows = self._num_positions = self._num_entries = 0
        self._lost_mass, self._max_lost_mass = 0.0, 0.0
        self._groups: list[tuple[int, int]] = []  # number and first row of each row group

    def add(self, masses: pa.Table) -> None:
        """Add the next rows."""
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
        """Return the summary of all rows added."""
        is_some = self._num_positions > 0
        return DistilSummary(
            num_rows=self._num_rows,
            num_bad=num_bad,
            num_positions=self._num_positions,
            lost_mass=self._lost_mass / self._num_positions if is_some else None,
            max_lost_mass=self._max_lost_mass if is_some else None,
        )

    def shards(self) -> list[list[int]]:
        """Return one list per file: the run's cumulative row count at the end of each row group in it."""
        ends = [*(first for _, first in self._groups[1:]), self._num_rows]
        groups = zip((number for number, _ in self._groups), ends, strict=False)
        by_shard = groupby(groups, lambda group: group[0] // GROUPS_A_SHARD)
        return [[end for _, end in shard] for _, shard in by_shard] or [[]]


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
    """Write a teacher's most likely tokens for each row of the inputs, in a format for training a student.

    Args:
        llm: the teacher.
        inputs: txt, jsonl, csv and Parquet files, folders of such files, glob patterns, or `-` for standard
            input.
        output: a folder for the rows (`data/train-*.parquet`), the run's settings and summary (`run.json`),
            and bad rows (`data.parquet.errors.jsonl`).
        format: `parquet`, `distillkit` or `axolotl`.
        settings: columns to read, and the number of tokens to keep at each position.
        kind: format of the inputs; None infers each file's format from its suffix.
        by_line: for txt files, make each line a row instead of the whole file.
        resume: continue a run that was stopped or killed; no row is lost or duplicated.
        force: replace an existing output.

    Raises:
        InputError: an input cannot be read, the output exists, or the run to resume had other settings.
        ParameterError: a setting or the format is invalid.
        OutputError: the output cannot be written, or is also an input.
    """
    require(format in FORMATS, "format", f"must be one of {', '.join(FORMATS)}, got {format!r}")
    sources = find_sources(inputs, kind=kind, by_line=by_line)
    run = DistilRun(llm, sources, settings or DistilSettings(), format)
    return run.to_folder(output, resume=resume, force=force)
