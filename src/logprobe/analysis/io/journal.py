"""Resumable output: results are stored in parts on disk, from which the output files are made at the end.

Each part is written to a temporary file next to the output, flushed to disk, and renamed, so the complete
parts survive if the run is killed. A part's name is the range of data set rows that it covers; a resumed run
continues after the last part.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, Self, TypeVar

import msgspec
from filelock import FileLock, Timeout

from logprobe._arrow import pa, pq
from logprobe.analysis.io.files import json_line, reading, write_durably, writing
from logprobe.analysis.io.sources import BadRow  # noqa: TC001 - msgspec reads the field
from logprobe.analysis.io.tables import INFO_KEY, parquet_writer
from logprobe.errors import InputError, OutputError
from logprobe.private_files import FOLDER_MODE, is_private
from logprobe.records.forms.finite import IMPOSSIBLE
from logprobe.records.forms.versions import Versioned, check_version
from logprobe.records.info import LogprobsInfo  # noqa: TC001 - msgspec reads the field

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from logprobe.analysis.progress import Advance
    from logprobe.analysis.scorer import Scorer

B = TypeVar("B", bound="AnsweredRows")
S = TypeVar("S")
S_co = TypeVar("S_co", covariant=True)
ROWS_A_PART, BYTES_A_PART, SECONDS_A_PART = 1 << 10, 1 << 26, 20.0  # the first limit reached ends a part
ROWS_A_GROUP, ROWS_A_PIECE = 1 << 14, 1 << 10
SUFFIXES = (".parquet", ".jsonl")
VERSION: Final = 1  # of `settings.json`, the parts, and `run.json`
# Names of Python parameters and command-line options in error messages.
RESUME: Final = "resume=True (--resume)"
FORCE: Final = "force=True (--force)"
BEGIN_ANEW: Final = f"use {FORCE} to start again"
LOCK_FILE = "lock"  # a file in the folder of the parts, locked by the process that writes the parts
# Settings of a run that may be unknown until the first rows are scored.
SOURCES_OF_NUMBERS = ("model", "weights", "weight_version", "lora", "lora_version")


class AnsweredRows(msgspec.Struct, frozen=True, kw_only=True):
    """Results of a batch of data set rows, with the model that computed them."""

    end: int  # one past the index of the batch's last row
    num_rows: int  # number of data set rows, including bad rows
    num_bytes: float  # number of input bytes, for the progress bar
    bad: list[BadRow]  # in the order of the data set
    source: dict[str, str | None]  # model and weights, from `source_of_numbers`
    info: LogprobsInfo | None  # None if no row was scored

    def table(self, schema: pa.Schema) -> pa.Table:
        """Return the output rows as a table with the columns of `schema`, in order."""
        raise NotImplementedError


def advancing(batches: Iterable[B], advance: Advance | None) -> Iterator[B]:
    """Yield batches of rows, calling `advance(num_bytes, num_rows)` before each batch."""
    for batch in batches:
        if advance is not None:
            advance(int(batch.num_bytes), batch.num_rows)
        yield batch


class Tally(Protocol[S_co]):
    """Accumulates summary figures over the rows of an output."""

    def add(self, table: pa.Table) -> None:
        """Add the next rows."""

    def summary(self, num_bad: int) -> S_co:
        """Return the summary of all rows added."""
        ...


def source_of_numbers(llm: Scorer, info: LogprobsInfo | None = None) -> dict[str, str | None]:
    """Return the name of a model and the versions of its weights.

    Versions in `info` take precedence, because the model's weights may have changed since.
    """
    facts = llm.engine.capabilities()
    source = {
        "model": facts.model,
        "weights": f"{facts.dtype} {facts.weights}",
        "weight_version": facts.weight_version,
        "lora": llm.lora,
    }
    if info is not None:
        source |= {"weight_version": info.weight_version, "lora_version": info.lora_version}
    return source


class FinishedRun(msgspec.Struct, Generic[S], frozen=True, kw_only=True):
    """Record of a finished run, stored in its `run.json`."""

    version: int
    settings: dict[str, Any]
    summary: S
    num_bytes: int | None = None  # size of the output file; None for a folder


class UnfinishedRun(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a run whose parts are being written, stored in `settings.json` beside the parts."""

    version: int
    settings: dict[str, Any]


class Journal(Generic[S]):
    """The parts of one output; only one process at a time writes them.

    The parts cover the first `num_done` data set rows. Use the journal as a context manager: on exit, the
    lock on the parts is released.

    Args:
        path: output file.
        schema: columns of the output.
        settings: settings that a resumed run must share.
        summary_type: class of the run's summary.
        folder: folder for the output files (`share`) and the `run.json`. If None, the parts are joined into
            one file at `path`, with `<path>.run.json` next to it.
        resume: continue an earlier run. If that run had finished, the attribute `summary` is its summary;
            otherwise `summary` is None.
        force: replace an existing output.

    Raises:
        InputError: the output has an unknown suffix, already exists, or is being written by another process,
            or the run to resume had other settings.
        OutputError: the output cannot be written.
    """

    def __init__(
        self,
        path: str | Path,
        schema: pa.Schema,
        settings: dict[str, Any],
        summary_type: type[S],
        *,
        folder: Path | None = None,
        resume: bool,
        force: bool,
    ) -> None:
        self.path = Path(path)
        if self.path.suffix not in SUFFIXES:
            raise InputError(f"{path}: must end in {' or '.join(SUFFIXES)}")
        if folder is None and self.path.is_dir():  # found before the rows are scored
            raise OutputError(f"{path}: cannot be written, because it is a folder; name a file")
        if folder is not None and folder.exists() and not folder.is_dir():
            raise OutputError(f"{folder}: cannot be written, because it is a file; name a folder")
        self._schema = schema
        self._settings: dict[str, Any] = json.loads(json.dumps(settings))
        self._summary_type = summary_type
        self._is_file = folder is None
        self._run_file = folder / "run.json" if folder else self._beside("run.json")
        self._output = self._run_file if folder else self.path  # exists once the run has finished
        self._parts = parts_folder(self.path)
        self._done = self._beside("parts.done")
        self._settings_file = self._parts / "settings.json"
        self._lock = FileLock(self._parts / LOCK_FILE)
        self.summary: S | None = None
        self.num_done = 0
        self._is_new = False  # this journal created the folder of the parts
        try:
            with writing(self.path, _MAKE_ROOM):
                self._open(resume=resume, force=force)
                self.num_done = _end_of(self._all_parts())
        except BaseException:
            self._close(discard=self._is_new)
            raise

    def _beside(self, suffix: str) -> Path:
        return self.path.with_name(f"{self.path.name}.{suffix}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._close(discard=kind is not None)

    def _close(self, *, discard: bool) -> None:
        """Release the lock; with `discard`, first delete the parts' folder unless a part is complete."""
        if discard and self._lock.is_locked and not any(self._parts.glob("*.parquet")):
            shutil.rmtree(self._parts, ignore_errors=True)
        self._lock.release()

    def _open(self, *, resume: bool, force: bool) -> None:
        if not self._parts.exists():
            if not force and self._output.exists():
                self.summary = self._finished_summary(resume=resume)
                return
            self._parts.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):  # another run has just begun
                self._parts.mkdir(FOLDER_MODE)
                self._is_new = True
        if not self._is_new and not is_private(self._parts):
            raise InputError(
                f"{self._parts}: is owned or writable by other users; remove it, or run chmod -R go-w"
            )
        self._acquire()
        if self._is_new and not force and self._output.exists():  # created since the first check
            shutil.rmtree(self._parts)
        self._check_lock()
        if not self._is_new and not force:
            self._check_resumes(resume=resume)
            for unfinished in self._parts.glob("*.tmp"):  # left by a killed run
                unfinished.unlink()
            return
        for file in self._parts.iterdir():
            if file.name != LOCK_FILE:
                file.unlink()
        shutil.rmtree(self._done, ignore_errors=True)
        self._note()

    def _acquire(self) -> None:
        """Lock the parts until the `with` block ends."""
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise InputError(
                f"{self.path}: another process is writing it; wait for that run, or choose another name"
            ) from error

    def _check_lock(self) -> None:
        if not (self._parts / LOCK_FILE).exists():  # removed by a run that finished meanwhile
            raise InputError(f"{self.path}: another run has just written it; use {FORCE} to overwrite it")

    def _note(self) -> None:
        run = {"version": VERSION, "settings": self._settings}
        write_durably(self._settings_file, lambda path: path.write_text(json.dumps(run)))

    def _finished_summary(self, *, resume: bool) -> S:
        """Return the summary of the run that wrote the output.

        Raises `InputError` if the output may not be resumed, or if that run had other settings.
        """
        kind: Any = FinishedRun[self._summary_type]  # type: ignore[name-defined]
        run, version = None, VERSION
        if resume:
            with suppress(OSError, ValueError, RecursionError):
                values = json.loads(self._run_file.read_bytes())
                version = msgspec.convert(values, Versioned).version
                run = msgspec.convert(values, kind)
        check_version(version, VERSION, self._run_file)
        if run is None or (self._is_file and run.num_bytes != self.path.stat().st_size):
            raise InputError(f"{self._output}: exists; use {FORCE} to overwrite it, or another name")
        self._check_same(run.settings)
        summary: S = run.summary
        return summary

    def _check_resumes(self, *, resume: bool) -> None:
        if not resume:
            raise InputError(f"{self.path}: an earlier run was interrupted; use {RESUME}, or {BEGIN_ANEW}")
        if not self._settings_file.exists():
            self._note()
        with _reading(self._settings_file):
            data = self._settings_file.read_bytes()
            check_version(msgspec.json.decode(data, type=Versioned).version, VERSION, self._settings_file)
            before = msgspec.json.decode(data, type=UnfinishedRun).settings
        self._check_same(before)
        now, self._settings = self._settings, before
        self.agree({name: now[name] for name in SOURCES_OF_NUMBERS if name in now})

    def _check_same(self, before: dict[str, Any]) -> None:
        now = self._settings
        names = before.keys() | now.keys()
        names -= {name for name in SOURCES_OF_NUMBERS if name not in before or name not in now}
        other = sorted(name for name in names if before.get(name) != now.get(name))
        if other:
            raise InputError(
                f"{self.path}: the run to resume had different settings "
                f"({', '.join(other)}); repeat them, or {BEGIN_ANEW}"
            )

    def agree(self, source: dict[str, str | None]) -> None:
        """Record the model and weights that computed the next rows (`SOURCES_OF_NUMBERS`).

        Raises:
            InputError: earlier rows were computed by another model or other weights.
        """
        for name, value in source.items():
            before = self._settings.get(name, value)
            if before != value:
                raise InputError(
                    f"{self.path}: {name} is {value!r}, but earlier rows have {before!r}; use the same "
                    f"model, LoRA, weights and dtype for the whole run, or {BEGIN_ANEW}"
                )
        if not source.keys() <= self._settings.keys():
            self._settings |= source
            with writing(self.path, _MAKE_ROOM):
                self._note()

    # -- parts -----------------------------------------------------------------------------------------------

    def complete(
        self,
        answered: Iterable[AnsweredRows],
        tally: Tally[S],
        write: Callable[[], None] | None = None,
        *,
        columns: list[str] | None = None,
    ) -> S:
        """Write the missing rows as parts, summarize all rows, and make the output from the parts.

        Args:
            answered: batches of the data set rows from `num_done` on.
            tally: accumulates the summary.
            write: writes the output files to the folder; None if the output is one file.
            columns: columns that `tally` reads; None reads all columns.
        """
        tables: list[pa.Table] = []
        batches: list[AnsweredRows] = []
        since = time.monotonic()
        for batch in answered:
            self.agree(batch.source)
            batches.append(batch)
            tables.append(batch.table(self._schema))
            is_full = (
                sum(one.num_rows for one in batches) >= ROWS_A_PART
                or sum(table.nbytes for table in tables) >= BYTES_A_PART
                or time.monotonic() - since >= SECONDS_A_PART
            )
            if is_full:
                self._write_part(batches, tables)
                batches, tables, since = [], [], time.monotonic()
        if batches:
            self._write_part(batches, tables)
        # Not part by part, because the last bits of sums would then depend on how long a part took.
        for table in self.groups(columns):
            tally.add(table)
        summary = tally.summary(self._num_bad())
        self._finish(summary, write or self._write_file)
        return summary

    def _write_part(self, batches: Sequence[AnsweredRows], tables: Sequence[pa.Table]) -> None:
        info = next((batch.info for batch in batches if batch.info is not None), None)
        bad = [row for batch in batches for row in batch.bad]
        self.write(batches[-1].end, pa.concat_tables(tables), bad, info)

    def write(self, end: int, rows: pa.Table, bad: Sequence[BadRow], info: LogprobsInfo | None) -> None:
        """Write the data set rows [`num_done`, `end`) as one part, atomically."""
        name = f"{self.num_done:012d}-{end:012d}"
        table = rows.replace_schema_metadata({INFO_KEY: info.to_json().encode()} if info else None)
        with writing(self.path, _MAKE_ROOM):
            if bad:
                lines = "".join(json.dumps(row.to_dict()) + "\n" for row in bad)
                write_durably(self._parts / f"{name}.errors", lambda path: path.write_text(lines))
            # Written last: its presence marks the part as complete.
            write_durably(
                self._parts / f"{name}.parquet",
                lambda path: pq.write_table(table, path, compression="zstd"),
            )
        self.num_done = end

    def _all_parts(self) -> list[Path]:
        """Return the parts in order; raise `InputError` if a part is missing or overlaps another."""
        parts = sorted(self._parts.glob("*.parquet"))
        _end_of(parts)
        return parts

    def groups(self, columns: list[str] | None = None) -> Iterator[pa.Table]:
        """Return all rows in order, in tables of `ROWS_A_GROUP` rows, whatever the sizes of the parts.

        `columns` are the columns to read; None reads all columns.
        """
        num_rows = 0
        for part in self._all_parts():
            with _reading(part):
                num_rows += pq.read_metadata(part).num_rows
        ends = [*range(ROWS_A_GROUP, num_rows, ROWS_A_GROUP), *([num_rows] if num_rows else [])]
        return _cut(self._pieces(columns), ends)

    def _pieces(self, columns: list[str] | None = None) -> Iterator[pa.Table]:
        """Yield the rows of all parts in tables of at most `ROWS_A_PIECE` rows."""
        for part in self._all_parts():
            with _reading(part), pq.ParquetFile(part) as file:
                if not file.schema_arrow.equals(self._schema):
                    raise InputError(f"{part}: its columns differ from those of this run; {BEGIN_ANEW}")
                for batch in file.iter_batches(batch_size=ROWS_A_PIECE, columns=columns):
                    yield pa.Table.from_batches([batch])

    def _num_bad(self) -> int:
        return sum(errors.read_bytes().count(b"\n") for errors in self._error_parts())

    def _error_parts(self) -> list[Path]:
        """Return the error files of complete parts, in order.

        An error file without a part was left by a killed run and is ignored.
        """
        parts = sorted(self._parts.glob("*.errors"))
        return [errors for errors in parts if errors.with_suffix(".parquet").exists()]

    # -- output files ----------------------------------------------------------------------------------------

    def _finish(self, summary: S, write: Callable[[], None]) -> None:
        """Write the output, the file of bad rows and the record of the run, then remove the parts."""
        errors_path, errors = self._beside("errors.jsonl"), self._error_parts()
        with writing(self.path, _MAKE_ROOM):
            if errors:
                write_durably(errors_path, partial(_concatenate, errors))
            else:
                errors_path.unlink(missing_ok=True)
            write()
            num_bytes = self.path.stat().st_size if self._is_file else None
            run = msgspec.to_builtins(
                FinishedRun(version=VERSION, settings=self._settings, summary=summary, num_bytes=num_bytes)
            )
            write_durably(self._run_file, lambda path: path.write_text(json.dumps(run, indent=2) + "\n"))
            # Renaming is atomic; if some parts were deleted first, the rest would look like a damaged run.
            self._parts.rename(self._done)
            shutil.rmtree(self._done, ignore_errors=True)

    def share(self, folder: Path, shards: Sequence[Sequence[int]]) -> None:
        """Write the rows to files in a folder, named like the files of a Hugging Face `datasets` split.

        Args:
            folder: the folder, which is created if missing.
            shards: for each file, the index of the first row after each of the file's row groups, counted
                from the run's first row. These indices must not depend on how long a part took or where a run
                was killed.
        """
        folder.mkdir(exist_ok=True)
        groups = _cut(self._pieces(), [end for ends in shards for end in ends])
        for number, ends in enumerate(shards):
            shard = folder / f"train-{number:05d}-of-{len(shards):05d}.parquet"
            write_durably(shard, partial(self._write_groups, islice(groups, len(ends))))

    def _write_file(self) -> None:
        is_parquet = self.path.suffix == ".parquet"
        write_durably(
            self.path, partial(self._write_groups, self.groups()) if is_parquet else self._write_jsonl
        )

    def _info(self) -> bytes | None:
        for part in self._all_parts():
            with _reading(part):
                metadata = pq.read_schema(part).metadata or {}
            if INFO_KEY in metadata:
                info: bytes = metadata[INFO_KEY]
                return info
        return None

    def _write_groups(self, groups: Iterable[pa.Table], path: Path) -> None:
        with parquet_writer(path, self._schema, self._info()) as write:
            for group in groups:
                write(group)

    def _write_jsonl(self, path: Path) -> None:
        info = self._info()
        if info is not None:
            about = json.dumps(json.loads(info) | {"floor": IMPOSSIBLE})
            write_durably(self._beside("info.json"), lambda side: side.write_text(f"{about}\n"))
        with path.open("w", encoding="utf-8") as file:
            for table in self.groups():
                file.writelines(json_line(row) + "\n" for row in table.to_pylist())


_MAKE_ROOM: Final = f"free disk space and use {RESUME}"


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Convert the exceptions that reading a file of an earlier run raises to `InputError`.

    The message advises a new run, which deletes the finished rows, only if the file is damaged.
    """
    try:
        with reading(path, BEGIN_ANEW):
            yield
    except InputError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno is not None:
            message = (
                f"{path}: cannot be read ({os.strerror(cause.errno)}); make it readable and use {RESUME}"
            )
            raise InputError(message) from cause
        raise


def files_written(output: Path) -> list[Path]:
    """Return the output, the files beside it, and the folder of its parts."""
    names = ("errors.jsonl", "info.json", "run.json")
    return [output, parts_folder(output), *(output.with_name(f"{output.name}.{name}") for name in names)]


def parts_folder(output: Path) -> Path:
    """Return the folder that holds the parts of an unfinished output."""
    return output.with_name(f"{output.name}.parts")


def _end_of(parts: Iterable[Path]) -> int:
    """Return the index of the first row after the last part.

    Raises `InputError` if the parts do not cover contiguous rows from row 0 on.
    """
    end = 0
    for part in parts:
        with _reading(part):
            first, stop = map(int, part.stem.split("-"))
        if first != end:
            what = "the part before it is missing" if first > end else "its rows overlap with an earlier part"
            raise InputError(f"{part}: {what}; {BEGIN_ANEW}")
        end = stop
    return end


def _cut(tables: Iterator[pa.Table], ends: Iterable[int]) -> Iterator[pa.Table]:
    """Yield the rows [0, ends[0]), [ends[0], ends[1]), ... of consecutive tables."""
    waiting: list[pa.Table] = []
    start = num_waiting = 0
    for end in ends:
        while num_waiting < end - start:
            waiting.append(next(tables))
            num_waiting += len(waiting[-1])
        whole = pa.concat_tables(waiting)
        yield whole.slice(0, end - start)
        waiting, num_waiting, start = [whole.slice(end - start)], num_waiting - (end - start), end


def _concatenate(parts: Sequence[Path], path: Path) -> None:
    with path.open("wb") as file:
        for part in parts:
            file.write(part.read_bytes())
