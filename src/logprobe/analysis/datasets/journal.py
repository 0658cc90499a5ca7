"""Where the rows of a run go: parts that are whole or not there, and one file at the end.

Each part is written beside the output under another name, made durable, and renamed: what a kill leaves is
the parts before it. The name says which rows of the data set it answers, so that a resumed run goes on after
the last one.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from contextlib import contextmanager, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from filelock import FileLock, Timeout

from logprobe.analysis.datasets.summary import Summary  # noqa: TC001 - msgspec reads the field
from logprobe.errors import InputError, OutputError
from logprobe.private_files import FOLDER_MODE, claim, is_private
from logprobe.records.forms.arrow_validity import UNREADABLE
from logprobe.records.forms.finite import IMPOSSIBLE, finite_fields

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from logprobe.analysis.datasets.rows import BadRow
    from logprobe.records.info import LogprobsInfo

INFO_KEY = b"logprobe.info"
ROWS_A_GROUP, ROWS_A_PIECE = 1 << 14, 1 << 10
SUFFIXES = (".parquet", ".jsonl")
# The parameters of Python and the options of the command, as errors name them.
RESUME: Final = "resume=True (--resume)"
FORCE: Final = "force=True (--force)"
LOCK_FILE = "lock"  # in the folder of the parts, held by the process that writes them
# Settings that are known with the first rows where not before.
SOURCES_OF_NUMBERS = ("model", "weights", "weight_version", "lora", "lora_version")


class FinishedRun(msgspec.Struct, frozen=True):
    """A run whose output is whole."""

    settings: dict[str, Any]
    summary: Summary
    num_bytes: int  # of the output


class Journal:
    """The parts of one output, for one process at a time; `num_done` rows of the data set have been answered.

    Use it in a `with` block, which ends with the lock on the parts released.

    `summary` is that of a run to resume which is finished; None: there is something left to do.

    Raises:
        InputError: the output's suffix is unknown, it exists, another process writes it, or the run to resume
            had other settings.
        OutputError: it cannot be written.
    """

    def __init__(
        self, path: str | Path, schema: pa.Schema, settings: dict[str, Any], *, resume: bool, force: bool
    ) -> None:
        self.path = Path(path)
        self._schema = schema
        self._parts = parts_folder(self.path)
        self._done = self.path.with_name(f"{self.path.name}.parts.done")
        self._settings_file = self._parts / "settings.json"
        self.errors_path = self.path.with_name(f"{self.path.name}.errors.jsonl")
        self._run_path = self.path.with_name(f"{self.path.name}.run.json")
        self.summary: Summary | None = None
        if self.path.suffix not in SUFFIXES:
            raise InputError(f"{path}: must end in {' or '.join(SUFFIXES)}")
        self._settings: dict[str, Any] = {}
        self._lock = FileLock(self._parts / LOCK_FILE)
        self.is_new = False  # there were no parts of an earlier run
        self.num_done = 0
        try:
            with naming(self.path):
                self._open(settings, resume=resume, force=force)
                self.num_done = _end_of(self._all_parts())
        except BaseException:
            self._lock.release()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._leave()
        self._lock.release()

    def _open(self, settings: dict[str, Any], *, resume: bool, force: bool) -> None:
        if self._parts.exists():
            if not is_private(self._parts):
                raise InputError(
                    f"{self._parts}: other users own it or may write to it; remove it, or run chmod -R go-w"
                )
            self._acquire()
            if not force:
                self._check_resumes(settings, resume=resume)
                for unfinished in self._parts.glob("*.tmp"):  # of a killed run
                    unfinished.unlink()
                return
            for file in self._parts.iterdir():
                if file.name != LOCK_FILE:
                    file.unlink()
        elif self.path.exists() and not force:
            if resume and (run := self._finished_run()) is not None:
                self._check_same(run.settings, settings)
                self.summary = run.summary
                return
            raise InputError(f"{self.path}: exists; give {FORCE} to write it anew, or another name")
        else:
            self._parts.parent.mkdir(parents=True, exist_ok=True)
            self._parts.mkdir(FOLDER_MODE, exist_ok=True)
            self._acquire()
            self.is_new = True
        shutil.rmtree(self._done, ignore_errors=True)
        self._note(settings)

    def _acquire(self) -> None:
        """Lock the parts until the `with` block ends.

        Raises:
            InputError: another process has them, or had until now.
        """
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise InputError(
                f"{self.path}: another process writes it; let that run end, or choose another name"
            ) from error
        if not (self._parts / LOCK_FILE).exists():  # removed by a run that finished meanwhile
            raise InputError(f"{self.path}: another run has just written it; give {FORCE} to write it anew")

    def _note(self, settings: dict[str, Any]) -> None:
        self._settings = json.loads(json.dumps(settings))
        write_durably(self._settings_file, lambda path: path.write_text(json.dumps(settings)))

    def _check_resumes(self, settings: dict[str, Any], *, resume: bool) -> None:
        if not resume:
            raise InputError(f"{self.path}: an earlier run stopped half way; give {RESUME} or {FORCE}")
        if not self._settings_file.exists():
            self._note(settings)
        before = self._earlier_settings()
        self._settings = before
        now = self._check_same(before, settings)
        self.agree({name: now[name] for name in SOURCES_OF_NUMBERS if name in now})

    def _earlier_settings(self) -> dict[str, Any]:
        """The settings of the run to resume.

        Raises:
            InputError: the file is damaged.
        """
        with _reading(self._settings_file):
            return msgspec.json.decode(self._settings_file.read_bytes(), type=dict[str, Any])

    def _check_same(self, before: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
        """Refuse settings that are not those of the run to resume; they as JSON gives them back.

        Raises:
            InputError: they are others.
        """
        now: dict[str, Any] = json.loads(json.dumps(settings))
        names = before.keys() | now.keys()
        names -= {name for name in SOURCES_OF_NUMBERS if name not in before or name not in now}
        other = sorted(name for name in names if before.get(name) != now.get(name))
        if other:
            raise InputError(
                f"{self.path}: the run to resume had another {', '.join(other)}; "
                f"repeat its settings, or give {FORCE}"
            )
        return now

    def _finished_run(self) -> FinishedRun | None:
        """What was noted when the output was written; None where it is not the file that was."""
        try:
            run = msgspec.convert(json.loads(self._run_path.read_text()), FinishedRun)
        except (OSError, ValueError):
            return None
        return run if run.num_bytes == self.path.stat().st_size else None

    def agree(self, source: dict[str, str | None]) -> None:
        """Note what gave the rows that come next (`SOURCES_OF_NUMBERS`); it must be what gave all others.

        Raises:
            InputError: it is not.
        """
        for name, value in source.items():
            before = self._settings.get(name, value)
            if before != value:
                raise InputError(
                    f"{self.path}: rows of {name} {value!r} after rows of {before!r}; let every part of the "
                    f"run load the same weights in the same dtype, or give {FORCE}"
                )
        if not source.keys() <= self._settings.keys():
            with naming(self.path):
                self._note(self._settings | source)

    def _all_parts(self) -> list[Path]:
        """The parts in order.

        Raises:
            InputError: their rows overlap, or some are missing.
        """
        parts = sorted(self._parts.glob("*.parquet"))
        _end_of(parts)
        return parts

    def write(
        self, end: int, rows: Sequence[dict[str, Any]], bad: Sequence[BadRow], info: LogprobsInfo | None
    ) -> None:
        """Answer the rows from `num_done` up to `end`, all or nothing."""
        self.write_table(end, pa.Table.from_pylist(list(rows), self._schema), bad, info)

    def write_table(self, end: int, rows: pa.Table, bad: Sequence[BadRow], info: LogprobsInfo | None) -> None:
        """`write`, with the rows as a table of the journal's schema."""
        name = f"{self.num_done:012d}-{end:012d}"
        metadata = {INFO_KEY: info.to_json().encode()} if info is not None else None
        table = rows.replace_schema_metadata(metadata)
        with naming(self.path):
            if bad:
                lines = "".join(json.dumps(row.to_dict()) + "\n" for row in bad)
                write_durably(self._parts / f"{name}.errors", lambda path: path.write_text(lines))
            # Last: this one says that all of it is there.
            write_durably(
                self._parts / f"{name}.parquet",
                lambda path: pq.write_table(table, path, compression="zstd"),
            )
        self.num_done = end

    def groups(self, columns: list[str] | None = None) -> Iterator[pa.Table]:
        """All rows in order, or some columns, ROWS_A_GROUP at a time, whatever the parts are."""
        num_rows = 0
        for part in self._all_parts():
            with _reading(part):
                num_rows += pq.read_metadata(part).num_rows
        ends = [*range(ROWS_A_GROUP, num_rows, ROWS_A_GROUP), *([num_rows] if num_rows else [])]
        return _cut(self._pieces(columns), ends)

    def _pieces(self, columns: list[str] | None = None) -> Iterator[pa.Table]:
        """The rows of all parts, some at a time."""
        for part in self._all_parts():
            with _reading(part), pq.ParquetFile(part) as file:
                if not file.schema_arrow.equals(self._schema):
                    raise InputError(f"{part}: has other columns than this run; give {FORCE} to begin anew")
                for batch in file.iter_batches(batch_size=ROWS_A_PIECE, columns=columns):
                    yield pa.Table.from_batches([batch])

    def _leave(self) -> None:
        """Keep what was written for `resume`; where nothing was written, nothing stays."""
        if not any(self._parts.glob("*.parquet")):
            shutil.rmtree(self._parts, ignore_errors=True)

    def num_bad(self) -> int:
        """Bad rows of all parts."""
        return sum(errors.read_bytes().count(b"\n") for errors in self._error_parts())

    def _error_parts(self) -> list[Path]:
        """Side files of whole parts, in order; one without its part is a killed run's."""
        parts = sorted(self._parts.glob("*.errors"))
        return [errors for errors in parts if errors.with_suffix(".parquet").exists()]

    def finish(self, summary: Summary) -> None:
        """Make one file of the parts, and one of the bad rows if there are any; then the parts go.

        What the run was, and what it came to, is noted beside it: who resumes it hears that it is finished.
        """
        with naming(self.path):
            write = self._write_parquet if self.path.suffix == ".parquet" else self._write_jsonl
            errors = self._error_parts()
            if errors:
                write_durably(self.errors_path, lambda path: _concatenate(errors, path))
            else:
                self.errors_path.unlink(missing_ok=True)
            write_durably(self.path, write)
            run = FinishedRun(self._settings, summary, self.path.stat().st_size)
            text = json.dumps(msgspec.to_builtins(run))
            write_durably(self._run_path, lambda path: path.write_text(f"{text}\n"))
            self.remove_parts()

    def share(self, folder: Path, shards: Sequence[Sequence[int]]) -> None:
        """Write the rows to files of a folder, named as those of a split of Hugging Face's `datasets` are.

        What a kill leaves is done again: the parts stay until `remove_parts`.

        Args:
            folder: it need not be there.
            shards: of each file one past the last row of each group, counted from the run's first row. How
                long a part took and where a run was killed have no part in them.
        """
        with naming(folder):
            folder.mkdir(exist_ok=True)
            groups = _cut(self._pieces(), [end for ends in shards for end in ends])
            for number, ends in enumerate(shards):
                shard = folder / f"train-{number:05d}-of-{len(shards):05d}.parquet"
                own = islice(groups, len(ends))
                write_durably(shard, partial(self._write_groups, own))
            errors = self._error_parts()
            if errors:
                write_durably(self.errors_path, lambda path: _concatenate(errors, path))
            else:
                self.errors_path.unlink(missing_ok=True)

    def remove_parts(self) -> None:
        """Remove the parts, whose rows are in other files now."""
        self._parts.rename(self._done)  # at once: half of the parts would look like a damaged run
        shutil.rmtree(self._done, ignore_errors=True)

    def _info(self) -> bytes | None:
        for part in self._all_parts():
            with _reading(part):
                metadata = pq.read_schema(part).metadata or {}
            if INFO_KEY in metadata:
                info: bytes = metadata[INFO_KEY]
                return info
        return None

    def _write_parquet(self, path: Path) -> None:
        self._write_groups(self.groups(), path)

    def _write_groups(self, groups: Iterable[pa.Table], path: Path) -> None:
        info = self._info()
        schema = self._schema.with_metadata(None if info is None else {INFO_KEY: info})
        with pq.ParquetWriter(path, schema, compression="zstd") as writer:
            for group in groups:
                writer.write_table(group.replace_schema_metadata(schema.metadata))
                pa.default_memory_pool().release_unused()  # or each group's memory stays

    def _write_jsonl(self, path: Path) -> None:
        info = self._info()
        if info is not None:
            about = json.loads(info) | {"floor": IMPOSSIBLE}
            write_durably(
                self.path.with_name(f"{self.path.name}.info.json"),
                lambda side: side.write_text(json.dumps(about) + "\n"),
            )
        with path.open("w", encoding="utf-8") as file:
            for table in self.groups():
                file.writelines(json_line(row) + "\n" for row in table.to_pylist())


def parts_folder(output: Path) -> Path:
    """Return the folder of the parts of an unfinished output."""
    return output.with_name(f"{output.name}.parts")


def _end_of(parts: Iterable[Path]) -> int:
    """One past the last row of some parts, which must follow one another from row 0 on.

    Raises:
        InputError: they do not.
    """
    end = 0
    for part in parts:
        with _reading(part):
            first, stop = map(int, part.stem.split("-"))
        if first != end:
            what = "a part before it is missing" if first > end else "its rows are those of a part before it"
            raise InputError(f"{part}: {what}; give {FORCE} to begin anew")
        end = stop
    return end


def json_line(row: dict[str, Any]) -> str:
    """A row as JSON; -inf becomes -9999, and +inf (a perplexity that follows from it) null."""
    bounded = {name: None if value == math.inf else value for name, value in row.items()}
    return json.dumps(finite_fields(bounded), ensure_ascii=False)


def _cut(tables: Iterator[pa.Table], ends: Iterable[int]) -> Iterator[pa.Table]:
    """Rows [0, ends[0]), [ends[0], ends[1]) and so on of tables that follow one another."""
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


def write_durably(path: Path, write: Callable[[Path], object]) -> None:
    """Write under another name, flush to the disk, and rename; what fails leaves nothing that takes space."""
    unfinished = path.with_name(f"{path.name}.tmp")
    try:
        claim(unfinished)
        write(unfinished)
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raise `InputError` for a file of an earlier run that is damaged; an error of the system stays."""
    try:
        yield
    except InputError:
        raise
    except (*UNREADABLE, ValueError, RecursionError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = " ".join(str(error).split())
        raise InputError(f"{path}: is damaged ({reason:.300}); give {FORCE} to begin anew") from error


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Raise `OutputError` with the name of the output where the system cannot write in the block."""
    try:
        yield
    except OutputError:
        raise
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error  # pyarrow's own text is longer
        raise OutputError(f"{path}: cannot be written ({reason}); make room and give {RESUME}") from error
