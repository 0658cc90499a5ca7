"""A record as bytes: a JSON header, then raw columns, each aligned to 8 bytes (layout in docs/records.md).

Exact by default; 16-bit and 8-bit log-probabilities at an error that the header states.

Before it: the rows of a record and what stands beside them. After it: pickle, message queues, files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np

from logprobe.errors import InputError, ParameterError
from logprobe.records.info import LogprobsInfo  # noqa: TC001 - msgspec reads the annotation
from logprobe.records.store.rows import Rows

if TYPE_CHECKING:
    from logprobe.records.store.columns import Array

MAGIC, VERSION, ALIGNMENT = b"LGPB", 2, 8

Precision: TypeAlias = Literal["float32", "float16", "uint8"]

LOSSY_COLUMNS = ("logprobs", "outside_logprobs", "given.logprobs", "given.outside_logprobs")
GROUP = 256  # scalars that share one scale
NUM_STEPS = 254  # 8-bit codes 0..254 span a group's finite values; 255 is -inf
INFINITE = 255


class Parts(NamedTuple):
    """What of a record travels."""

    rows: Rows
    entropy: Array | None  # (T,) float32, nats
    given: Rows | None
    info: LogprobsInfo | None


class ColumnHeader(msgspec.Struct, frozen=True):
    """Where one column lies: bytes from the end of the header, NumPy type string, shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


class StoreHeader(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The scalars of one store."""

    form: Literal["top", "ragged"]
    num_rows: int
    num_none: int = 0
    k: int = 0
    repeats_chosen: bool = False
    texts: list[str | None] = []


class Header(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything about a record that is no column."""

    version: int
    rows: StoreHeader
    columns: list[ColumnHeader]
    given: StoreHeader | None = None
    info: LogprobsInfo | None = None
    precision: Precision = "float32"
    max_abs_error: float = 0.0  # nats, of any finite logprob against the record that was written


def encode(parts: Parts, precision: Precision = "float32") -> bytes:
    """A record's bytes; `float32` is exact, the others say in the header how far off they are.

    Raises:
        ParameterError: an unknown precision; one below float32 for NaN or positive values.
    """
    scalars, columns = parts.rows.state()
    given_header = None
    if parts.entropy is not None:
        columns["entropy"] = parts.entropy
    if parts.given is not None:
        given_scalars, given = parts.given.state()
        given_header = StoreHeader(**given_scalars)
        columns |= {f"given.{name}": column for name, column in given.items()}
    columns, max_abs_error = _quantise(columns, precision)
    placed, body = _place(columns)
    header = Header(
        version=VERSION,
        rows=StoreHeader(**scalars),
        columns=placed,
        given=given_header,
        info=parts.info,
        precision=precision,
        max_abs_error=max_abs_error,
    )
    head = msgspec.json.encode(header)
    head += b" " * (-(len(MAGIC) + 4 + len(head)) % ALIGNMENT)
    return b"".join([MAGIC, len(head).to_bytes(4, "little"), head, *body])


def decode(data: bytes | memoryview) -> Parts:
    """Read what `encode` wrote; exact columns are read in place, without a copy.

    Raises:
        InputError: not such bytes, another version, or a column that is cut short.
    """
    header, body = read_header(data)
    columns = _restore(_read_columns(header, body))
    try:
        given = None if header.given is None else _rows_from(header.given, columns, "given.")
        return Parts(_rows_from(header.rows, columns, ""), columns.get("entropy"), given, header.info)
    except KeyError as error:
        raise InputError(f"the record lacks the column {error}") from error


def read_header(data: bytes | memoryview) -> tuple[Header, memoryview]:
    """The header of `encode`'s result, and what follows it.

    Raises:
        InputError: not such bytes, or another version.
    """
    view = memoryview(data).cast("B")
    start = len(MAGIC) + 4
    if bytes(view[: len(MAGIC)]) != MAGIC:
        raise InputError(f"a record starts with {MAGIC!r}, this with {bytes(view[: len(MAGIC)])!r}")
    stop = start + int.from_bytes(view[len(MAGIC) : start], "little")
    try:
        header = msgspec.json.decode(view[start:stop], type=Header)
    except msgspec.DecodeError as error:
        raise InputError(f"the record's header cannot be read: {error}") from error
    if header.version != VERSION:
        raise InputError(f"the record has version {header.version}; this program reads {VERSION}")
    return header, view[stop:]


def _rows_from(header: StoreHeader, columns: dict[str, Array], prefix: str) -> Rows:
    own = {name.removeprefix(prefix): column for name, column in columns.items() if name.startswith(prefix)}
    return Rows.from_state(msgspec.structs.asdict(header), own)


def _place(columns: dict[str, Array]) -> tuple[list[ColumnHeader], list[bytes]]:
    placed, body, offset = [], [], 0
    for name, column in columns.items():
        raw = column.astype(column.dtype.newbyteorder("<"), copy=False).tobytes()
        placed.append(ColumnHeader(name, column.dtype.newbyteorder("<").str, column.shape, offset))
        body += [raw, b"\0" * (-len(raw) % ALIGNMENT)]
        offset += len(raw) + len(body[-1])
    return placed, body


def _read_columns(header: Header, body: memoryview) -> dict[str, Array]:
    columns: dict[str, Any] = {}
    for column in header.columns:
        try:
            count = int(np.prod(column.shape, dtype=np.int64))
            flat = np.frombuffer(body, np.dtype(column.dtype), count, column.offset)
            columns[column.name] = flat.reshape(column.shape)
        except (ValueError, TypeError) as error:
            raise InputError(f"the record's column {column.name} cannot be read: {error}") from error
    return columns


# -- smaller log-probabilities ---------------------------------------------------------------------------


def _quantise(columns: dict[str, Array], precision: Precision) -> tuple[dict[str, Array], float]:
    """Columns with smaller log-probabilities, and the largest error of a finite one, nats.

    float16 rounds each value. uint8 spans the finite values of each row of k, or of each 256 scalars, in 254
    equal steps.
    """
    if precision not in {"float32", "float16", "uint8"}:
        raise ParameterError("precision", f"{precision!r} is not one of 'float32', 'float16', 'uint8'")
    if precision == "float32":
        return columns, 0.0
    smaller, max_abs_error = dict(columns), 0.0
    for name in LOSSY_COLUMNS:
        if name in columns:
            exact = columns[name]
            if not (exact <= 0).all():
                raise ParameterError(
                    "precision", "NaN and positive values have no smaller form; use 'float32'"
                )
            coded = _smaller(name, exact, precision)
            finite = np.isfinite(exact)
            errors = np.abs(_restored(name, coded)[finite] - exact[finite].astype(np.float64))
            max_abs_error = max(max_abs_error, float(errors.max(initial=0)))
            smaller |= coded
    return smaller, max_abs_error


def _restore(columns: dict[str, Array]) -> dict[str, Array]:
    """Undo `_quantise`: float32 columns."""
    restored = {name: column for name, column in columns.items() if not name.endswith(".scale")}
    for name in LOSSY_COLUMNS:
        if name in columns and columns[name].dtype not in (np.float32, np.float64):
            restored[name] = _restored(name, columns)
    return restored


def _smaller(name: str, column: Array, precision: Precision) -> dict[str, Array]:
    """The smaller column of values <= 0 and what else is needed to read it."""
    magnitudes = -column
    if precision == "float16":
        largest = np.finfo(np.float16).max  # what is finite stays so
        halves = np.where(np.isinf(magnitudes), np.inf, np.minimum(magnitudes, largest))
        return {name: halves.astype(np.float16)}
    groups = _groups(magnitudes)
    is_finite = np.isfinite(groups)
    low = np.where(is_finite, groups, np.inf).min(axis=1, initial=np.inf)
    low[np.isinf(low)] = 0
    step = (np.where(is_finite, groups, low[:, None]).max(axis=1, initial=0) - low) / NUM_STEPS
    step[step <= 0] = 1
    codes = np.rint((np.where(is_finite, groups, low[:, None]) - low[:, None]) / step[:, None])
    codes = np.where(is_finite, codes, INFINITE).astype(np.uint8).ravel()[: magnitudes.size]
    scale = np.stack([low, step], axis=1).astype(np.float32)
    return {name: codes.reshape(magnitudes.shape), f"{name}.scale": scale}


def _restored(name: str, columns: dict[str, Array]) -> Array:
    """Log-probabilities, float32."""
    column = columns[name]
    if column.dtype == np.float16:
        return np.float32(0) - column.astype(np.float32)
    scale = columns[f"{name}.scale"]
    groups = _groups(column)
    values = np.where(groups == INFINITE, np.float32(np.inf), scale[:, :1] + groups * scale[:, 1:])
    return np.float32(0) - values.ravel()[: column.size].reshape(column.shape).astype(np.float32)


def _groups(column: Array) -> Array:
    """Rows of a matrix, or runs of GROUP scalars, the last filled up with its own last value."""
    if column.ndim == 2:
        return column
    if not len(column):
        return column.reshape(0, GROUP)
    padded: Array = np.pad(column, (0, -len(column) % GROUP), mode="edge")
    return padded.reshape(-1, GROUP)
