"""A record as bytes: a JSON header, then raw columns, each aligned to 8 bytes (layout in docs/records.md).

Before it: `FlatLogprobs`. After it: pickle, message queues, files of one record.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from logprobe.errors import InputError
from logprobe.records.flat import FlatLogprobs
from logprobe.records.forms.compact import Precision, quantise, restore
from logprobe.records.info import LogprobsInfo  # noqa: TC001 - msgspec reads the annotation
from logprobe.records.store.ragged_rows import RaggedRows
from logprobe.records.store.top_rows import TopRows

if TYPE_CHECKING:
    from logprobe.records.store.columns import Array
    from logprobe.records.store.rows import Store

MAGIC, VERSION, ALIGNMENT = b"LGPB", 1, 8


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


def to_bytes(record: FlatLogprobs, precision: Precision = "float32") -> bytes:
    """Encode a record; `float32` is exact, the others say in the header how far off they are."""
    store_header, columns = _store_state(record.rows.store)
    given_header = None
    if record.entropy is not None:
        columns["entropy"] = record.entropy
    if record.given is not None:
        given_header, given = _store_state(record.given.rows.store)
        columns |= {f"given.{name}": column for name, column in given.items()}
    columns, max_abs_error = quantise(columns, precision)
    placed, body = _place(columns)
    header = Header(
        version=VERSION,
        rows=store_header,
        columns=placed,
        given=given_header,
        info=record.info,
        precision=precision,
        max_abs_error=max_abs_error,
    )
    head = msgspec.json.encode(header)
    head += b" " * (-(len(MAGIC) + 4 + len(head)) % ALIGNMENT)
    return b"".join([MAGIC, len(head).to_bytes(4, "little"), head, *body])


def from_bytes(data: bytes | memoryview) -> FlatLogprobs:
    """Read what `to_bytes` wrote; exact columns are read in place, without a copy.

    Raises:
        InputError: not such bytes, a later version, or a column that is cut short.
    """
    header, body = read_header(data)
    columns = restore(_read_columns(header, body))
    try:
        given = None
        if header.given is not None:
            given = FlatLogprobs.of(_store_from(header.given, columns, "given."))
        store = _store_from(header.rows, columns, "")
        return FlatLogprobs.of(store, entropy=columns.get("entropy"), given=given, info=header.info)
    except KeyError as error:
        raise InputError(f"the record lacks the column {error}") from error


def encode_hook(value: object) -> bytes:
    """`enc_hook` for msgspec: a record travels in MessagePack as its bytes."""
    if isinstance(value, FlatLogprobs):
        return value.to_bytes()
    raise TypeError(f"{type(value).__name__} has no form as bytes")


def decode_hook(kind: type, value: Any) -> FlatLogprobs:
    """`dec_hook` for msgspec: bytes become a record again."""
    if kind is FlatLogprobs:
        return from_bytes(value)
    raise TypeError(f"{kind.__name__} has no form as bytes")


def read_header(data: bytes | memoryview) -> tuple[Header, memoryview]:
    """The header of `to_bytes`' result, and what follows it.

    Raises:
        InputError: not such bytes, or a later version.
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
    if header.version > VERSION:
        raise InputError(f"the record has version {header.version}; this program reads up to {VERSION}")
    return header, view[stop:]


def _store_state(store: Store) -> tuple[StoreHeader, dict[str, Array]]:
    scalars, columns = store.state()
    form: Literal["top", "ragged"] = "top" if isinstance(store, TopRows) else "ragged"
    return StoreHeader(form=form, **scalars), columns


def _store_from(header: StoreHeader, columns: dict[str, Array], prefix: str) -> Store:
    own = {name.removeprefix(prefix): column for name, column in columns.items() if name.startswith(prefix)}
    scalars = msgspec.structs.asdict(header)
    return (TopRows if header.form == "top" else RaggedRows).from_state(scalars, own)


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
