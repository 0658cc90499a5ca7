"""Read a data set from files, score its rows, and write them to one file, in bounded memory and resumably.

Data flow: `io.sources` → `rows` → `tasks` → `io.journal`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from logprobe._arrow import pa
from logprobe.analysis import measures
from logprobe.analysis.datasets.rows import batches, checked
from logprobe.analysis.datasets.settings import HITS, DataSettings
from logprobe.analysis.datasets.tasks import schema_of, task_of
from logprobe.analysis.io.journal import AnsweredRows, Journal, advancing, files_written, source_of_numbers
from logprobe.analysis.io.sources import BadRow, check_apart, find_sources, identity_of, read_rows
from logprobe.analysis.score import joined
from logprobe.analysis.scorer import in_flight
from logprobe.analysis.statistics import Mean, Moments
from logprobe.errors import LogprobeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from logprobe.analysis.datasets.rows import CheckedRow, Question
    from logprobe.analysis.datasets.settings import RowSettings
    from logprobe.analysis.datasets.tasks import Asked
    from logprobe.analysis.io.sources import Format, Source
    from logprobe.analysis.progress import Advance
    from logprobe.analysis.score import Score
    from logprobe.analysis.scorer import Scorer

NUM_BINS = 10  # bins of the calibration error
LABELLED = ("label", "mean_logprob", *measures.DETECTIONS)
_WANTED = {"logprob", "num_tokens", "num_bytes", "confidence", *HITS}


class ScoredBatch(AnsweredRows, frozen=True, kw_only=True, tag=True):
    """Output rows of a batch."""

    rows: list[dict[str, Any]]  # one per row: values by column

    def table(self, schema: pa.Schema) -> pa.Table:
        """Return the rows as a table."""
        return pa.Table.from_pylist(self.rows, schema)


class RowScorer:
    """Scores rows in batches; an error in one row does not affect the others.

    Raises:
        ParameterError: the model cannot run with `settings`.
    """

    def __init__(self, llm: Scorer, settings: RowSettings) -> None:
        self._llm = llm
        self._task = task_of(llm, settings)

    def source_of_numbers(self) -> dict[str, str | None]:
        """Return the names of the model and its current weights."""
        return source_of_numbers(self._llm)

    def score(self, batch: Sequence[CheckedRow]) -> ScoredBatch:
        """Score each row, or record the row's error in the result.

        Raises:
            LogprobeError: the engine failed.
        """
        asked = [self._asked(row) for row in batch]
        good = [row for row in asked if not isinstance(row, BadRow)]
        scores = self._task.score([pair for _, (parts, _) in good for part in parts for pair in part])
        info = next((score.record.info for score in scores if score.record is not None), None)
        remaining = iter(scores)
        return ScoredBatch(
            end=batch[-1].index + 1,
            num_rows=len(batch),
            num_bytes=sum(row.num_bytes for row in batch),
            rows=[
                {"row": question.index, "source": question.source, **question.kept}
                | values([_as_one([next(remaining) for _ in part]) for part in parts])
                for question, (parts, values) in good
            ],
            bad=[row for row in asked if isinstance(row, BadRow)],
            source=source_of_numbers(self._llm, info),
            info=info,
        )

    def _asked(self, row: CheckedRow) -> tuple[Question, Asked] | BadRow:
        if isinstance(row, BadRow):
            return row
        try:
            return row, self._task.asked(row)
        except LogprobeError as error:
            return BadRow.of(row, error)


def _as_one(scores: Sequence[Score]) -> Score:
    """Join the scores of a text's windows; the task sets the byte counts later, with `Score.counted_by`."""
    return scores[0] if len(scores) == 1 else joined(scores, b"")


class Workers(Protocol):
    """Scores the rows of the input files, with one model in this process or several in other processes."""

    @property
    def sources(self) -> Sequence[Source]:
        """The input files."""

    @property
    def settings(self) -> RowSettings:
        """The settings of the run."""

    def source_of_numbers(self) -> dict[str, str | None]:
        """Return the names of the model and its weights, as far as they are known before the first row."""

    def scored(self, *, skip: int) -> Iterator[ScoredBatch]:
        """Yield the scored rows in batches and in order, without the first `skip` rows.

        Raises:
            InputError: a file cannot be read.
            LogprobeError: the engine failed.
        """
        ...


@runtime_checkable
class Pool(Protocol):
    """Several models in other processes, such as `integrations.ray.RayPool`."""

    def workers(self, sources: Sequence[Source], settings: RowSettings) -> Workers:
        """Return workers that score the rows of `sources`."""
        ...


def question_batches(
    sources: Sequence[Source], settings: RowSettings, *, skip: int
) -> Iterator[list[CheckedRow]]:
    """Yield the validated rows of all files in batches that one call scores, without the first `skip` rows.

    Raises:
        InputError: a file cannot be read.
    """
    reading = settings.rows
    rows = islice(read_rows(sources, reading.columns), skip, None)
    return batches(checked(row, reading) for row in rows)


class OneModel:
    """Scores rows with a model in this process; raises the errors of `RowScorer`."""

    def __init__(self, llm: Scorer, sources: Sequence[Source], settings: RowSettings) -> None:
        self.sources = sources
        self.settings = settings
        self._scorer = RowScorer(llm, settings)
        self.source_of_numbers = self._scorer.source_of_numbers

    def scored(self, *, skip: int) -> Iterator[ScoredBatch]:
        """Implement `Workers.scored`; the next batch is prepared while the engine works on another."""
        return in_flight(self._scorer.score, question_batches(self.sources, self.settings, skip=skip))


class DatasetRun:
    """Scores the rows of the input files, and calls `advance(num_bytes, num_rows)` for every batch."""

    def __init__(self, workers: Workers, *, advance: Advance | None = None) -> None:
        self._workers = workers
        self._advance = advance
        self.was_finished = False  # True if the run to resume was already complete

    def to_file(self, path: str | Path, *, resume: bool = False, force: bool = False) -> Summary:
        """Write every row's results to a Parquet or jsonl file, and bad rows to a side file.

        Resuming a finished run does nothing and returns its summary.

        Raises:
            InputError: an input cannot be read, the output exists, another process writes the output, or the
                run to resume had other settings, another model or other weights.
            OutputError: the output cannot be written, or is also an input; completed parts are kept for
                `resume`.
            LogprobeError: the engine failed; completed parts are kept for `resume`.
        """
        workers = self._workers
        check_apart(workers.sources, files_written(Path(path)))
        # A resumed run must share everything that affects the values or the order of rows.
        settings = identity_of(workers.sources, resume=resume)
        settings |= workers.source_of_numbers() | asdict(workers.settings)
        schema = schema_of(workers.settings)
        with Journal(path, schema, settings, Summary, resume=resume, force=force) as journal:
            self.was_finished = journal.summary is not None
            return journal.summary or journal.complete(self._scored(skip=journal.num_done), DataTally())

    def stream(
        self, on_row: Callable[[dict[str, Any]], None] | None, on_bad: Callable[[BadRow], None]
    ) -> Summary:
        """Pass each row's results to `on_row` and each bad row to `on_bad` as soon as they are computed.

        Raises:
            LogprobeError: the engine failed.
        """
        tally, schema, num_bad = DataTally(), schema_of(self._workers.settings), 0
        for batch in self._scored(skip=0):
            for bad in batch.bad:
                on_bad(bad)
            if on_row is not None:
                for row in batch.rows:
                    on_row(row)
            num_bad += len(batch.bad)
            tally.add(batch.table(schema))
        return tally.summary(num_bad)

    def _scored(self, *, skip: int) -> Iterator[ScoredBatch]:
        return advancing(self._workers.scored(skip=skip), self._advance)


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
    """Score the rows of files into one Parquet or jsonl file, in bounded memory.

    Args:
        llm: the model, or a `RayPool` of models on a cluster.
        inputs: txt, jsonl, csv and Parquet files, folders of such files, glob patterns, or `-` for standard
            input.
        output: a name that ends in `.parquet` or `.jsonl`; bad rows are written to the same name with
            `.errors.jsonl` appended.
        settings: `DataSettings` (the default) to score each row; `LabelSettings`, `JudgeSettings` or
            `RerankSettings` to classify, grade or rank each row instead.
        kind: format of the inputs; None infers each file's format from its suffix.
        by_line: for txt files, make each line a row instead of the whole file.
        resume: continue a run that was stopped or killed; no row is lost or duplicated. A finished run is
            not repeated.
        force: replace an existing output.

    Raises:
        InputError: an input cannot be read, the output exists, or the run to resume had other settings.
        ParameterError: a setting is invalid.
        OutputError: the output cannot be written, or is also an input.
    """
    sources = find_sources(inputs, kind=kind, by_line=by_line)
    asked = settings or DataSettings()
    workers = llm.workers(sources, asked) if isinstance(llm, Pool) else OneModel(llm, sources, asked)
    return DatasetRun(workers).to_file(output, resume=resume, force=force)


# -- summary -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Summary of a scored data set; figures that do not apply are None."""

    num_rows: int  # rows scored
    num_bad: int  # bad rows, which were written to the side file or reported on standard error
    num_tokens: int | None = None
    num_bytes: int | None = None
    logprob: float | None = None  # sum over all rows, nats
    logprob_a_row: Mean | None = None
    perplexity: float | None = None  # per token, over all rows
    bits_per_byte: float | None = None
    acc: Mean | None = None  # accuracy of the choice with the highest logprob
    acc_norm: Mean | None = None  # accuracy with logprobs per character, as in lm-evaluation-harness
    acc_bytes: Mean | None = None  # accuracy with logprobs per byte
    # Expected calibration error, in 10 bins, of the softmax over the choices' logprobs.
    calibration_error: float | None = None
    auc: dict[str, float | None] | None = None  # by measure; a value is None if all labels are equal


class DataTally:
    """Accumulates summary figures; for the AUC, keeps every value of each measure of labeled texts."""

    def __init__(self) -> None:
        self._num_rows = 0
        self._sums = dict.fromkeys(("logprob", "num_tokens", "num_bytes"), 0.0)
        self._moments = {name: Moments() for name in ("logprob", *HITS)}
        self._bins = np.zeros((3, NUM_BINS))  # (3, bins): counts, sums of confidence, sums of hits
        self._names: set[str] = set()
        self._labelled: dict[str, list[NDArray[np.float64]]] = {name: [] for name in LABELLED}

    def add(self, table: pa.Table) -> None:
        """Add the rows of a table."""
        self._num_rows += len(table)
        self._names |= set(table.column_names)
        columns = {name: _numbers(table, name) for name in table.column_names if name in _WANTED}
        for name in self._sums.keys() & columns.keys():
            self._sums[name] += float(columns[name].sum())
        for name in self._moments.keys() & columns.keys():
            self._moments[name].add(columns[name])
        if "label" in self._names and len(table):
            for name, values in self._labelled.items():
                values.append(_numbers(table, name))
        if {"confidence", "acc"} <= columns.keys() and len(table):
            bins = measures.calibration(columns["confidence"], columns["acc"], num_bins=NUM_BINS)
            weights = np.stack([bins.counts, bins.confidence * bins.counts, bins.accuracy * bins.counts])
            self._bins += np.nan_to_num(weights)

    def summary(self, num_bad: int) -> Summary:
        """Return the summary of all rows added."""
        figures: dict[str, Any] = {name: self._moments[name].result() for name in HITS}
        if "logprob" in self._names:
            tokens, num_bytes = int(self._sums["num_tokens"]), int(self._sums["num_bytes"])
            figures |= {
                "num_tokens": tokens,
                "num_bytes": num_bytes,
                "logprob": self._sums["logprob"],
                "logprob_a_row": self._moments["logprob"].result(),
                "perplexity": measures.perplexity(self._sums["logprob"], tokens),
                "bits_per_byte": measures.bits_per_byte(self._sums["logprob"], num_bytes),
            }
        if self._bins[0].sum():
            gaps = np.abs(self._bins[1] - self._bins[2]).sum()
            figures["calibration_error"] = float(gaps / self._bins[0].sum())
        if self._labelled["label"]:
            columns = {name: np.concatenate(values) for name, values in self._labelled.items()}
            labels = columns.pop("label")
            figures["auc"] = {
                name: measures.roc_auc(values[~np.isnan(values)], labels[~np.isnan(values)] == 1)
                for name, values in columns.items()
            }
        return Summary(num_rows=self._num_rows, num_bad=num_bad, **figures)


def _numbers(table: pa.Table, name: str) -> NDArray[np.float64]:
    return np.asarray(table.column(name).to_numpy(), np.float64)
