"""Read the rows of a data set one at a time from txt, jsonl, csv and Parquet files and standard input.

A bad row is yielded with its error, and reading continues. A file that cannot be read raises `InputError`.
"""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from glob import glob, has_magic
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import msgspec

from logprobe.errors import InputError, OutputError, require

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

T = TypeVar("T")
Format: TypeAlias = Literal["txt", "jsonl", "csv", "parquet"]
STDIN = "-"
SUFFIXES: dict[str, Format] = {
    ".txt": "txt",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".parquet": "parquet",
}
FIRST_ROWS = 32  # number of a jsonl file's first rows that are read to find its columns
ROWS_A_CALL = 256  # maximum number of rows that are scored in one call


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a data set: its values by column, or its error."""

    index: int  # index of the row in the whole data set, from 0
    source: str  # name of the file
    line: int  # line in the file, or row in a Parquet file; from 1
    num_bytes: float  # the row's share of the file's bytes, for the progress bar
    values: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None  # the error, if the row cannot be read

    @property
    def place(self) -> str:
        """The file and the line or, in a Parquet file, the row, for messages."""
        return _place(self.source, self.line)


def _place(source: str, line: int) -> str:
    return f"{source}, {'row' if source.endswith('.parquet') else 'line'} {line}"


class BadRow(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A row that cannot be used, and the reason."""

    index: int  # index of the row in the whole data set, from 0
    source: str  # name of the file
    line: int  # line in the file, or row in a Parquet file; from 1
    num_bytes: float  # the row's share of the file's bytes, for the progress bar
    problem: str

    @classmethod
    def of(cls, row: Any, problem: object) -> BadRow:
        """Return a bad row with the position of `row` and the problem on a single line."""
        return cls(
            index=row.index,
            source=row.source,
            line=row.line,
            num_bytes=row.num_bytes,
            problem=" ".join(str(problem).split()),
        )

    def __str__(self) -> str:
        return f"bad row: {_place(self.source, self.line)}: {self.problem}"

    def to_dict(self) -> dict[str, Any]:
        """Return the row as an object for the `.errors.jsonl` file."""
        return {"row": self.index, "source": self.source, "line": self.line, "error": self.problem}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One file of a data set."""

    name: str
    format: Format
    by_line: bool = False  # for txt files: each line is a row, instead of the whole file

    @property
    def num_bytes(self) -> int | None:
        """File size in bytes; None for standard input."""
        return None if self.name == STDIN else Path(self.name).stat().st_size


def find_sources(
    inputs: str | Path | Sequence[str | Path], *, kind: Format | None = None, by_line: bool = False
) -> list[Source]:
    """Expand file names, folders and glob patterns to files; the files in a folder or pattern are sorted.

    Raises:
        InputError: a file is missing, unreadable or of an unknown suffix, or a folder or pattern has no
            files.
        ParameterError: `inputs` is empty.
    """
    sources: list[Source] = []
    many = [inputs] if isinstance(inputs, str | os.PathLike) else inputs
    for name in [os.fspath(one) for one in many]:
        paths = [name] if name == STDIN or Path(name).is_file() else _below(name)
        sources += [Source(name=path, format=kind or _format_of(path), by_line=by_line) for path in paths]
    require(sources, "inputs", "must not be empty; name at least one file")
    for source in sources:
        _check_opens(source)
    return sources


def total_bytes(sources: Sequence[Source]) -> int | None:
    """Return the total size of the files in bytes, or None if one of them is standard input."""
    sizes = [source.num_bytes for source in sources]
    return None if None in sizes else sum(size or 0 for size in sizes)


def identity_of(sources: Sequence[Source], *, resume: bool) -> dict[str, Any]:
    """Return the properties of the inputs that must be the same when a run is resumed.

    Raises:
        InputError: `resume` is set and an input is standard input, which cannot be read again.
    """
    if resume and any(source.name == STDIN for source in sources):
        raise InputError("standard input: cannot be read again; save it to a file to resume from it")
    return {"inputs": [[one.name, one.format, one.by_line, one.num_bytes] for one in sources]}


def check_apart(sources: Iterable[Source], outputs: Iterable[Path]) -> None:
    """Check that no input is one of the files that a run writes, or lies in a folder that it writes.

    Raises:
        OutputError: an input would be overwritten, or the results of an earlier run are among the inputs.
    """
    written = {output.resolve() for output in outputs}
    for source in sources:
        path = Path(source.name).resolve()
        if source.name != STDIN and not written.isdisjoint([path, *path.parents]):
            raise OutputError(f"{source.name}: is read as input; write to another file or folder")


def in_batches(rows: Iterable[T], size_of: Callable[[T], int], max_size: float) -> Iterator[list[T]]:
    """Yield batches of at most `ROWS_A_CALL` rows.

    A batch ends early when the total of its rows' sizes, `size_of(row)`, reaches `max_size`.
    """
    batch: list[T] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += size_of(row)
        if len(batch) >= ROWS_A_CALL or size >= max_size:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _below(name: str) -> list[str]:
    path = Path(name)
    if path.is_dir():
        files = sorted(str(file) for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
        if not files:
            raise InputError(f"{name}: the folder has no {', '.join(SUFFIXES)} files; name a file")
        return files
    if has_magic(name):
        files = sorted(file for file in glob(name, recursive=True) if Path(file).is_file())  # noqa: PTH207
        if files:
            return files
        raise InputError(f"{name}: no file matches the pattern; check the folder")
    if path.exists():
        raise InputError(f"{name}: is a pipe or a device; use - to read standard input")
    raise InputError(f"{name}: no such file; use a file, a folder, a glob pattern, or - for standard input")


def _format_of(path: str) -> Format:
    if path == STDIN:
        return "txt"
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise InputError(
            f"{path}: unknown suffix (known: {', '.join(SUFFIXES)}); set the format with kind (--format)"
        )
    return SUFFIXES[suffix]


def _check_opens(source: Source) -> None:
    """Raise `InputError` if the file cannot be opened, so that a run fails before anything is computed."""
    if source.name == STDIN:
        if source.format == "parquet":
            raise InputError(
                "standard input: cannot be Parquet, which is not streamable; use the file's name"
            )
        return
    with _naming(source.name), Path(source.name).open("rb"):
        if source.format == "parquet":
            _open_parquet(source.name).close()


def check_columns(sources: Iterable[Source], columns: Sequence[str]) -> None:
    """Check that the files have `columns`, before anything is computed; standard input is not checked.

    Raises:
        InputError: a file lacks a column or cannot be read. A jsonl file lacks a column if none of its first
            rows has it.
    """
    for source in sources:
        if source.format == "txt":
            _check_txt(source, columns)
        elif source.name != STDIN:
            with _naming(source.name):
                known = _COLUMNS[source.format](source)
                if known is not None:
                    _check_columns(source.name, columns, known)


def read_rows(sources: Iterable[Source], columns: Iterable[str]) -> Iterator[Row]:
    """Yield the rows of all files, with the values of `columns`.

    Raises:
        InputError: a file cannot be read or lacks a column.
    """
    wanted, index = list(columns), 0
    for source in sources:
        with _naming(source.name):
            for line, num_bytes, values in _READERS[source.format](source, wanted):
                problem = values if isinstance(values, str) else None
                yield Row(
                    index=index,
                    source=source.name,
                    line=line,
                    num_bytes=num_bytes,
                    values={} if isinstance(values, str) else values,
                    problem=problem,
                )
                index += 1


@contextmanager
def _naming(name: str) -> Iterator[None]:
    title = "standard input" if name == STDIN else name
    try:
        yield
    except UnicodeDecodeError as error:
        raise InputError(f"{title}: is not UTF-8 text ({error.reason}); convert it first") from error
    except (OSError, csv.Error) as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise InputError(f"{title}: cannot be read ({reason}); use another file") from error


Raw: TypeAlias = "tuple[int, float, dict[str, Any] | str]"
"""Line number, size in bytes, and either the values by column or the error."""


def _binary(source: Source) -> AbstractContextManager[Any]:
    return nullcontext(sys.stdin.buffer) if source.name == STDIN else Path(source.name).open("rb")


def _lines(source: Source) -> Iterator[bytes]:
    with _binary(source) as file:
        yield from file


def _read_txt(source: Source, columns: Sequence[str]) -> Iterator[Raw]:
    name = columns[0] if columns else "text"
    _check_txt(source, columns)
    if source.by_line:
        for number, line in enumerate(_lines(source), 1):
            try:
                yield number, len(line), {name: line.decode().rstrip("\r\n")}
            except UnicodeDecodeError as error:
                yield number, len(line), f"is not UTF-8 text (byte {error.start})"
        return
    data = b"".join(_lines(source))
    yield 1, len(data), {name: data.decode()}


def _read_jsonl(source: Source, columns: Sequence[str]) -> Iterator[Raw]:
    for number, line in enumerate(_lines(source), 1):
        if line.strip():
            yield number, len(line), _json_values(line, columns)


def _json_value(line: bytes) -> tuple[Any, str | None]:
    """Return the parsed value and None, or None and the error if the line is not valid JSON."""
    try:
        return json.loads(line), None
    except (ValueError, RecursionError) as error:
        return None, f"is not valid JSON ({error})"


def _json_values(line: bytes, columns: Sequence[str]) -> dict[str, Any] | str:
    value, problem = _json_value(line)
    if problem is not None:
        return problem
    if isinstance(value, str) and len(columns) == 1:
        return {columns[0]: value}
    if not isinstance(value, dict):
        return f"must be a JSON object, got {type(value).__name__}"
    missing = [name for name in columns if name not in value]
    if missing:
        return f"has no {', '.join(map(repr, missing))}; it has {', '.join(map(repr, value)) or 'nothing'}"
    return {name: value[name] for name in columns}


def _read_csv(source: Source, columns: Sequence[str]) -> Iterator[Raw]:
    csv.field_size_limit(sys.maxsize)
    num_read = 0  # bytes of the lines since the last row

    def counted(lines: Iterable[str]) -> Iterator[str]:
        nonlocal num_read
        for line in lines:
            num_read += len(line.encode())
            yield line

    with _binary(source) as file, io.TextIOWrapper(file, "utf-8-sig", newline="") as stream:
        reader = csv.DictReader(counted(stream), strict=True)
        names = list(reader.fieldnames or [])
        _check_columns(source.name, columns, names)
        twice = [name for name in columns if names.count(name) > 1]
        if twice:
            raise InputError(f"{source.name}: its header has {twice[0]!r} twice; rename one of the columns")
        for values in reader:
            num_bytes, num_read = num_read, 0
            missing = [name for name in columns if values.get(name) is None]
            problem = f"is too short: has no {', '.join(map(repr, missing))}" if missing else None
            if any(values.get(None, ())):  # the fields beyond the header's
                problem = f"has more fields than the header ({len(names)}); quote texts that contain commas"
            yield reader.line_num, num_bytes, problem or {name: values[name] for name in columns}


def _read_parquet(source: Source, columns: Sequence[str]) -> Iterator[Raw]:
    from logprobe._arrow import pa
    from logprobe.analysis.io.tables import parquet_rows

    with _open_parquet(source.name) as file:
        _check_columns(source.name, columns, file.schema_arrow.names)
        size = Path(source.name).stat().st_size / max(file.metadata.num_rows, 1)
        number = 0
        try:
            for number, values in enumerate(parquet_rows(file, columns), 1):
                yield number, size, values
        except (pa.ArrowException, OSError) as error:
            message = " ".join(str(error).split())
            raise InputError(f"{source.name}: is damaged after row {number} ({message})") from error


def _open_parquet(name: str) -> Any:
    from logprobe._arrow import pa, pq

    try:
        return pq.ParquetFile(name)
    except pa.ArrowException as error:
        raise InputError(f"{name}: is not a Parquet file ({' '.join(str(error).split())})") from error


def _check_columns(name: str, columns: Sequence[str], known: Sequence[str]) -> None:
    missing = [column for column in columns if column not in known]
    if missing:
        names = ", ".join(map(repr, known)) or "none"
        raise InputError(f"{name}: has no column {', '.join(map(repr, missing))}; it has {names}")


def _check_txt(source: Source, columns: Sequence[str]) -> None:
    """Raise `InputError` if there is more than one column: a txt file has one column, under any name."""
    if len(columns) > 1:
        names = ", ".join(map(repr, columns))
        remedy = "use a .jsonl, .csv or .parquet file, or --format jsonl or csv"
        raise InputError(f"{source.name}: is read as text, which has one column, not {names}; {remedy}")


def _jsonl_columns(source: Source) -> Sequence[str] | None:
    """Return the columns of the file's first rows, or None if a row is not an object or no row has a column.

    Lines that are not valid JSON are skipped here; `read_rows` yields them as bad rows.
    """
    first = map(_json_value, islice(_lines(source), FIRST_ROWS))
    values = [value for value, problem in first if problem is None]
    if not all(isinstance(value, dict) for value in values):
        return None
    return list(dict.fromkeys(chain.from_iterable(values))) or None


def _csv_columns(source: Source) -> Sequence[str] | None:
    csv.field_size_limit(sys.maxsize)
    with _binary(source) as file, io.TextIOWrapper(file, "utf-8-sig", newline="") as stream:
        return csv.DictReader(stream, strict=True).fieldnames or []


def _parquet_columns(source: Source) -> Sequence[str] | None:
    with _open_parquet(source.name) as file:
        names: list[str] = file.schema_arrow.names
    return names


_COLUMNS: dict[Format, Callable[[Source], Sequence[str] | None]] = {
    "jsonl": _jsonl_columns,
    "csv": _csv_columns,
    "parquet": _parquet_columns,
}
_READERS: dict[Format, Callable[[Source, Sequence[str]], Iterator[Raw]]] = {
    "txt": _read_txt,
    "jsonl": _read_jsonl,
    "csv": _read_csv,
    "parquet": _read_parquet,
}
