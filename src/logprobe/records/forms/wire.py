"""Binary format of records: a JSON header, then raw columns.

The format is lossless by default. With 16-bit or 8-bit log-probabilities the header states the maximum error.

The bytes are `LGPB`, the length of the header (4 bytes), the header (JSON) and the columns (raw arrays), all
little-endian. Header and columns are each padded to a multiple of 8 bytes. The header has `version` (1),
`rows` and `given` (`num_rows`, `num_none`, `k`, `repeats_chosen`, `texts`), `columns` (name, NumPy type
string, shape, and offset from the end of the header), `info`, `precision` and `max_abs_error`; fields with
their default value may be omitted. There are T positions, in this order: `num_none` positions that are None,
n positions with a chosen token and the k likeliest, and m positions with any number of entries. The columns
are:

- `token_ids`, `logprobs`, (N,): for each of the n positions, the chosen token and then the k likeliest; after
  these, the entries of the m positions. With `repeats_chosen`, readers see a chosen token twice if it is
  among the k likeliest.
- `ranks`, (R,): the ranks of the n chosen tokens; after these, the ranks of the entries of the m positions,
  or -1 if unknown.
- `ends`, `is_none`, (m,): for each of the m positions, the total number of entries of the m positions up to
  its end, and whether it is None. Only if m > 0.
- `texts`, (N,): for each entry, the index of its text in the header's `texts`. Only if entries have texts.
- `entropy`, `varentropy`, `margin`, `log_kept_mass`, (T,): float32; NaN if not given.
- `kept.offsets`, (T + 1,), `kept.token_ids`, (M,): the ids that masks and truncation kept, ascending within a
  position. Only if they were requested.
- `given.*`: the same columns for the ids that the caller specified.
- `logprobs.scale`, (groups, 2): for each group of 64 entries, the magnitude of code 0 and the size of one of
  254 steps; code 255 is -inf. Only with the precision `uint8`.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Literal, TypeAlias

import msgspec
import numpy as np

from logprobe.errors import InputError, ParameterError
from logprobe.records.forms.validity import (
    GROUP,
    MAX_COUNTED,
    ColumnHeader,
    RowsHeader,
    check_places,
    check_rows,
    check_runs,
    check_scale,
    known_columns,
    require,
)
from logprobe.records.forms.versions import Versioned, check_version
from logprobe.records.info import LogprobsInfo  # noqa: TC001 - msgspec reads the annotation
from logprobe.records.rows import EXTRAS
from logprobe.records.store.rows import Rows
from logprobe.records.values import IdLists

if TYPE_CHECKING:
    from logprobe.records.store.columns import Array

MAGIC, VERSION, ALIGNMENT = b"LGPB", 1, 8

Precision: TypeAlias = Literal["float32", "float16", "uint8"]

NUM_STEPS = 254  # 8-bit codes 0..254 span a group's finite values; 255 means -inf
INFINITE = 255


class Header(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """JSON header of a serialized record."""

    version: int
    rows: RowsHeader
    columns: list[ColumnHeader]
    given: RowsHeader | None = None
    info: LogprobsInfo | None = None
    precision: Precision = "float32"
    max_abs_error: float = 0.0  # nats, of the finite logprobs, compared with the original record


def encode(rows: Rows, precision: Precision = "float32") -> bytes:
    """Serialize the rows of a record, without loss for "float32"; otherwise the header has the maximum error.

    Raises:
        ParameterError: `precision` is unknown, or it is below float32 and a value is NaN or positive.
    """
    length = rows.num_rows
    scalars, columns = rows.state(MAX_COUNTED)
    given, kept, given_header = rows.given(0, length), rows.kept(0, length), None
    columns |= rows.extras(0, length)
    if kept is not None:
        columns |= {"kept.offsets": kept.offsets, "kept.token_ids": kept.token_ids}
    if given is not None:
        given_scalars, given_columns = given.state(MAX_COUNTED)
        given_header = RowsHeader(**given_scalars)
        columns |= {f"given.{name}": column for name, column in given_columns.items()}
    columns, max_abs_error = _quantise(columns, precision)
    placed, body = _place(columns)
    header = Header(
        version=VERSION,
        rows=RowsHeader(**scalars),
        columns=placed,
        given=given_header,
        info=rows.info,
        precision=precision,
        max_abs_error=max_abs_error,
    )
    head = msgspec.json.encode(header)
    head += b" " * (-(len(MAGIC) + 4 + len(head)) % ALIGNMENT)
    return b"".join([MAGIC, len(head).to_bytes(4, "little"), head, *body])


def decode(data: bytes | memoryview) -> Rows:
    """Deserialize the output of `encode`. Lossless columns without NaN are views of `data`.

    Safe for untrusted data: the data is validated, and its size bounds the memory that is allocated.

    Raises:
        InputError: `data` is not a record, has an unknown version, or has inconsistent columns.
    """
    header, body = read_header(data)
    check_places(header.columns, len(body), ALIGNMENT, known_columns())
    columns = _restore(_read_columns(header, body))
    num_rows = header.rows.num_rows
    extras = {name: columns.pop(name) for name in EXTRAS if name in columns}
    for name, values in extras.items():
        require(values.shape == (num_rows,), f"{name} does not match the number of rows")
    kept = [columns.pop(name) for name in ("kept.offsets", "kept.token_ids") if name in columns]
    check_runs(kept, num_rows)
    named = {
        name.removeprefix("given."): columns.pop(name) for name in [*columns] if name.startswith("given.")
    }
    require(not named or header.given is not None, "it has columns of given ids, but its header has none")
    given = None
    if header.given is not None:
        require(header.given.num_rows == num_rows, "given ids do not match the number of rows")
        given = _rows_from(header.given, named)
    rows = _rows_from(header.rows, columns)
    rows.info = header.info
    rows.set_beside(extras, given, IdLists(*kept) if kept else None)
    return rows


def read_header(data: bytes | memoryview) -> tuple[Header, memoryview]:
    """Return the header in the output of `encode`, and the bytes that follow the header.

    Raises:
        InputError: `data` is not a record, or has an unknown version.
    """
    view = memoryview(data).cast("B")
    start = len(MAGIC) + 4
    if bytes(view[: len(MAGIC)]) != MAGIC:
        raise InputError(f"not a record: it must start with {MAGIC!r}, got {bytes(view[: len(MAGIC)])!r}")
    stop = start + int.from_bytes(view[len(MAGIC) : start], "little")
    try:
        check_version(msgspec.json.decode(view[start:stop], type=Versioned).version, VERSION, "the record")
        header = msgspec.json.decode(view[start:stop], type=Header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"the record's header cannot be read: {error}") from error
    return header, view[stop:]


def _rows_from(header: RowsHeader, columns: dict[str, Array]) -> Rows:
    check_rows(header, columns)
    return Rows.from_state(msgspec.structs.asdict(header), columns)


def _place(columns: dict[str, Array]) -> tuple[list[ColumnHeader], list[bytes]]:
    placed, body, offset = [], [], 0
    for name, column in columns.items():
        raw = column.astype(column.dtype.newbyteorder("<"), copy=False).tobytes()
        placed.append(ColumnHeader(name, column.dtype.newbyteorder("<").str, column.shape, offset))
        body += [raw, b"\0" * (-len(raw) % ALIGNMENT)]
        offset += len(raw) + len(body[-1])
    return placed, body


def _read_columns(header: Header, body: memoryview) -> dict[str, Array]:
    columns: dict[str, Array] = {}
    for column in header.columns:
        size = prod(column.shape) * np.dtype(column.dtype).itemsize
        flat: Array = np.frombuffer(body[column.offset : column.offset + size], np.dtype(column.dtype))
        # Replace every NaN with NumPy's own: other bit patterns cause warnings when converted.
        if flat.dtype.kind == "f" and (is_nan := np.isnan(flat)).any():
            flat = np.where(is_nan, flat.dtype.type(np.nan), flat)
        columns[column.name] = flat.reshape(column.shape)
    return columns


# -- smaller log-probabilities ---------------------------------------------------------------------------


def _quantise(columns: dict[str, Array], precision: Precision) -> tuple[dict[str, Array], float]:
    """Reduce the precision of log-probabilities; also return the largest error of a finite value, in nats.

    float16 rounds each value. uint8 divides the range of the finite values among each `GROUP` consecutive
    values into 254 equal steps.
    """
    if precision not in {"float32", "float16", "uint8"}:
        raise ParameterError("precision", f"{precision!r} is not one of 'float32', 'float16', 'uint8'")
    if precision == "float32":
        return columns, 0.0
    smaller, max_abs_error = dict(columns), 0.0
    for name in ("logprobs", "given.logprobs"):
        if name in columns:
            exact = columns[name]
            if not (exact <= 0).all():
                raise ParameterError(
                    "precision", "must be 'float32' for a record that contains NaN or positive values"
                )
            coded = _smaller(name, exact, precision)
            finite = np.isfinite(exact)
            errors = np.abs(_restored(name, coded)[finite] - exact[finite].astype(np.float64))
            max_abs_error = max(max_abs_error, float(errors.max(initial=0)))
            smaller |= coded
    return smaller, max_abs_error


def _restore(columns: dict[str, Array]) -> dict[str, Array]:
    """Undo `_quantise`: return the columns, with those of reduced precision converted to float32."""
    restored = {name: column for name, column in columns.items() if not name.endswith(".scale")}
    for name in [name for name in columns if name.endswith("logprobs")]:
        if columns[name].dtype not in (np.float32, np.float64):
            if columns[name].dtype == np.uint8:
                check_scale(name, columns[name], columns.get(f"{name}.scale"))
            restored[name] = _restored(name, columns)
    return restored


def _smaller(name: str, column: Array, precision: Precision) -> dict[str, Array]:
    """Return a column of values <= 0 at the reduced precision and, for uint8, its scale column."""
    magnitudes = -column
    if precision == "float16":
        largest = np.finfo(np.float16).max  # clip to this, so that finite values stay finite
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
    return {name: codes, f"{name}.scale": scale}


def _restored(name: str, columns: dict[str, Array]) -> Array:
    """Return the reduced column `name` as float32 log-probabilities."""
    column = columns[name]
    if column.dtype == np.float16:
        return np.float32(0) - column.astype(np.float32)
    scale = columns[f"{name}.scale"]
    groups = _groups(column)
    with np.errstate(over="ignore"):  # a sender's scale may overflow to infinity
        values = np.where(groups == INFINITE, np.float32(np.inf), scale[:, :1] + groups * scale[:, 1:])
    return np.float32(0) - values.ravel()[: column.size].astype(np.float32)


def _groups(column: Array) -> Array:
    """Split a column into rows of GROUP values, padding the last row."""
    if not len(column):
        return column.reshape(0, GROUP)
    padded: Array = np.pad(column, (0, -len(column) % GROUP), mode="edge")
    return padded.reshape(-1, GROUP)
