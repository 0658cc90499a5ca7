"""`Codec`: encodes a value as the bytes of one message, and decodes the value.

A message is msgpack with a list of binary blocks, and the value, which refers to rows and arrays by block
number. Narrow rows of the same kind share a block, so that a step with many of them does not need one block
per row. Blocks of at least `SHARED_BYTES` are written to shared memory, and the message contains only their
location. Only known types are decoded; nothing is unpickled.

A block is an int64 table with one line per array, followed by the arrays, each aligned to 8 bytes. A line has
the index of the array's dtype in `DTYPES`, the array's length, and its width (-1 if it has one dimension).
A missing array has -1 in all three.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Generic, TypeAlias, TypeVar, get_origin

import msgspec
import numpy as np

from logprobe import errors
from logprobe.errors import EngineError, LogprobeError, ParameterError
from logprobe.records.rows import EXTRAS, GivenLists, HostRows, KeptLists
from logprobe.transport.shm import Span, num_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.records.store.columns import Array
    from logprobe.transport.shm import PageReader, PageWriter, Parts

T = TypeVar("T")

MAX_MESSAGE_BYTES: Final = 1 << 30
SHARED_BYTES: Final = 1 << 16  # block size from which shared memory is faster (benchmarks/bench_transport.py)
NARROW_BYTES: Final = 1 << 10  # size of rows up to which joining them in one block is faster
MAX_CAUSES: Final = 4  # maximum length of the chain of causes sent with an error

DTYPES: Final = tuple(map(np.dtype, ("<i4", "<f4", "<i8", "?", "<f8", "<u2", "u1", "<u4")))
ABSENT: Final = [-1, -1, -1]
LINE_BYTES: Final = 3 * 8  # size of a table line
PADDING: Final = [np.zeros(count, np.uint8) for count in range(8)]
NUM_COLUMNS: Final = 3 + 4 + 2  # numbers of arrays in the rows, in `given` and in `kept`

Range: TypeAlias = tuple[int, int, int]
"""A range of rows in a block: (block number, start, stop)."""


class UnreadableError(EngineError):
    """A message could not be decoded."""

    def __init__(self, value: bytes, reason: str) -> None:
        super().__init__(f"a message from another process cannot be read: {reason}")
        self.value = value  # the encoded value; empty if the envelope cannot be decoded


class Envelope(msgspec.Struct, array_like=True, frozen=True):
    """Wire format of one message."""

    blocks: list[bytes | Span]
    value: msgspec.Raw


class Codec(Generic[T]):
    """Encodes and decodes messages.

    Args:
        incoming: type of the messages to decode.
        writer: shared memory for outgoing blocks; None to send all blocks in messages.
        reader: shared memory for incoming blocks.
    """

    def __init__(
        self, incoming: Any, *, writer: PageWriter | None = None, reader: PageReader | None = None
    ) -> None:
        self._incoming = incoming
        self._writer = writer
        self._reader = reader

    def encode(self, value: Any) -> bytes:
        """Encode a value as one message.

        Raises:
            ParameterError: the value contains something that cannot be encoded, or is too large.
        """
        numbers = _Outgoing()
        try:
            plain = msgspec.msgpack.encode(value, enc_hook=numbers.plain)
        except OverflowError as error:
            raise ParameterError("params", f"an integer has more than 64 bits: {error}") from error
        except UnicodeEncodeError as error:
            raise ParameterError("params", f"a string is not valid Unicode: {error}") from error
        blocks = [self._carried(parts) for parts in numbers.blocks()]
        data = msgspec.msgpack.encode(Envelope(blocks, msgspec.Raw(plain)))
        if len(data) > MAX_MESSAGE_BYTES:
            for block in blocks:
                if isinstance(block, Span) and self._writer is not None:
                    self._writer.take_back(block)
            what = f"a message has {len(data):,} bytes, but at most {MAX_MESSAGE_BYTES:,} can be sent"
            raise ParameterError(
                "message", f"{what}; request fewer alternatives, or lower max_num_batched_tokens"
            )
        return data

    def decode(self, data: Any) -> T:
        """Decode the value of one message.

        Raises:
            UnreadableError: the bytes are not a message of the incoming type.
        """
        value = msgspec.Raw()
        try:
            envelope = msgspec.msgpack.decode(data, type=Envelope)
            value, numbers = envelope.value, _Incoming(envelope.blocks, self._reader)
            got: T = msgspec.msgpack.decode(value, type=self._incoming, dec_hook=numbers.made)
        except msgspec.DecodeError as error:
            raise UnreadableError(bytes(value), str(error)) from error
        return got

    def _carried(self, parts: Parts) -> bytes | Span:
        if self._writer is not None and num_bytes(parts) >= SHARED_BYTES:
            span = self._writer.write(parts)
            if span is not None:
                return span
        return b"".join(part.data for part in parts)


class _Outgoing:
    """Collects the `HostRows` and NumPy arrays of one message while msgpack encodes the message."""

    def __init__(self) -> None:
        self._blocks: list[list[HostRows] | Array] = []
        # kind of narrow rows → (block number, number of rows so far)
        self._ends: dict[Any, tuple[int, int]] = {}

    def plain(self, value: Any) -> Any:
        """Convert a value that msgpack cannot encode; used as msgpack's `enc_hook`."""
        if isinstance(value, HostRows):
            return self._range_of(value)
        if isinstance(value, np.ndarray):
            self._blocks.append(value)
            return len(self._blocks) - 1
        if isinstance(value, LogprobeError):
            return _plain_error(value)
        if isinstance(value, Mapping):
            return dict(value)
        kind = type(value).__name__
        raise ParameterError("params", f"holds {value!r:.60} ({kind}), which cannot be serialized")

    def blocks(self) -> list[Parts]:
        """Return the parts of each block, in the order of the blocks' numbers."""
        return [
            parts_of_rows(HostRows.joined(block)) if isinstance(block, list) else parts_of_array(block)
            for block in self._blocks
        ]

    def _range_of(self, rows: HostRows) -> Range:
        """Append narrow rows to their kind's block, and other rows to a new block; return the rows' range."""
        kind = _narrow_kind(rows)
        number, start = self._ends.get(kind, (len(self._blocks), 0))
        if number == len(self._blocks):
            self._blocks.append([])
        block, stop = self._blocks[number], start + len(rows)
        assert isinstance(block, list)
        block.append(rows)
        if kind is not None:
            self._ends[kind] = number, stop
        return number, start, stop


def _narrow_kind(rows: HostRows) -> tuple[Any, ...] | None:
    """Return a key that is equal for rows that can share a block; None if the rows need their own block."""
    if 2 * rows.token_ids.nbytes > NARROW_BYTES or rows.given is not None or rows.kept is not None:
        return None
    columns = (rows.token_ids, rows.logprobs, *rows.extras.values())
    return (rows.k, *rows.extras, *(column.dtype for column in columns))


class _Incoming:
    """Provides the blocks of one message while its value is decoded."""

    def __init__(self, blocks: Sequence[bytes | Span], reader: PageReader | None) -> None:
        self._blocks = blocks
        self._reader = reader
        self._rows: dict[int, HostRows] = {}  # decoded blocks, by number

    def made(self, kind: Any, value: Any) -> Any:
        """Convert a value back from the result of `_Outgoing.plain`; used as msgpack's `dec_hook`."""
        if kind is HostRows:
            return self._rows_at(*msgspec.convert(value, Range))
        if get_origin(kind) is np.ndarray:
            return self._array_at(msgspec.convert(value, int))
        assert kind is LogprobeError
        return _error(value)

    def _rows_at(self, number: int, start: int, stop: int) -> HostRows:
        if number not in self._rows:
            self._rows[number] = rows_of(self._block(number))
        rows = self._rows[number]
        size = len(rows)
        if not 0 <= start <= stop <= size:
            raise EngineError(f"a block of {size} rows has no rows {start} to {stop}; please report this")
        return rows if stop - start == size else rows.rows(start, stop)

    def _array_at(self, number: int) -> Array:
        array = array_of(self._block(number))
        if isinstance(self._blocks[number], Span):
            array = array.copy()  # arrays live long and must not keep shared pages in use
        array.flags.writeable = False
        return array

    def _block(self, number: int) -> Array:
        if not 0 <= number < len(self._blocks):
            raise EngineError(
                f"a message of {len(self._blocks)} blocks has no block {number}; please report this"
            )
        block = self._blocks[number]
        if isinstance(block, bytes):
            return np.frombuffer(block, np.uint8)
        if self._reader is None:
            raise EngineError("a message refers to shared memory, but there is none; please report this")
        return self._reader.read(block)


def parts_of_array(array: Array) -> Parts:
    """Return the parts of a block that contains one array with one or two dimensions."""
    return _parts_of([array])


def parts_of_rows(rows: HostRows) -> Parts:
    """Return the parts of a block that contains rows."""
    given = [None] * 4 if rows.given is None else rows.given.columns()
    kept = [None] * 2 if rows.kept is None else [rows.kept.offsets, rows.kept.token_ids]
    return _parts_of(
        [rows.token_ids, rows.logprobs, rows.ranks, *given, *kept, *map(rows.extras.get, EXTRAS)]
    )


def array_of(block: Array) -> Array:
    """Return the array in a block, (n,) uint8, as a view of the block's memory.

    Raises:
        EngineError: the block is malformed.
    """
    [array] = _whole(_arrays_of(block, 1))
    return array


def rows_of(block: Array) -> HostRows:
    """Return the rows in a block, (n,) uint8, as views of the block's memory; raises as `array_of` does."""
    arrays = _arrays_of(block, NUM_COLUMNS + len(EXTRAS))
    token_ids, logprobs, ranks = _whole(arrays[:3])
    given, kept, extras = arrays[3:7], arrays[7:NUM_COLUMNS], zip(EXTRAS, arrays[NUM_COLUMNS:], strict=True)
    return HostRows(
        token_ids,
        logprobs,
        ranks,
        {name: array for name, array in extras if array is not None},
        None if given[0] is None else GivenLists.of(*_whole(given)),
        None if kept[0] is None else KeptLists(offsets=kept[0], token_ids=_whole(kept)[1]),
    )


def _parts_of(arrays: Sequence[Array | None]) -> Parts:
    lines: list[list[int]] = []
    parts: Parts = []
    for array in arrays:
        if array is None:
            lines.append(ABSENT)
            continue
        whole = np.ascontiguousarray(array)
        width = -1 if whole.ndim == 1 else whole.shape[1]
        lines.append([DTYPES.index(whole.dtype), len(whole), width])
        parts.append(whole)
        if whole.nbytes % 8:
            parts.append(PADDING[-whole.nbytes % 8])
    return [np.array(lines, np.int64), *parts]


def _arrays_of(block: Array, count: int) -> list[Array | None]:
    if len(block) < count * LINE_BYTES:
        raise EngineError(
            f"a block of {len(block)} bytes is too short for {count} arrays; please report this"
        )
    arrays: list[Array | None] = []
    start = count * LINE_BYTES
    for kind, length, width in block[:start].view(np.int64).reshape(count, 3).tolist():
        if [kind, length, width] == ABSENT:
            arrays.append(None)
            continue
        if not 0 <= kind < len(DTYPES) or length < 0 or width < -1:
            raise EngineError(f"a block has an array of type {kind}, {length} x {width}; please report this")
        shape = (length,) if width == -1 else (length, width)
        stop = start + DTYPES[kind].itemsize * math.prod(shape)
        if stop > len(block):
            raise EngineError(
                f"a block of {len(block)} bytes is shorter than its table says; please report this"
            )
        arrays.append(block[start:stop].view(DTYPES[kind]).reshape(shape))
        start = stop + -stop % 8
    if start != len(block):
        raise EngineError(f"a block of {len(block)} bytes is longer than its table says; please report this")
    return arrays


def _whole(arrays: Sequence[Array | None]) -> list[Array]:
    there = [array for array in arrays if array is not None]
    if len(there) < len(arrays):
        raise EngineError("a block lacks an array; please report this")
    return there


def _plain_error(error: BaseException, most_causes: int = MAX_CAUSES) -> list[Any]:
    """Encode an error as a list of its class name, arguments, plain attributes and cause."""
    own = error if isinstance(error, LogprobeError) else EngineError(f"{type(error).__name__}: {error}")
    kinds = (str, int, float, tuple)  # tuples of names
    fields = {name: value for name, value in vars(own).items() if isinstance(value, kinds)}
    cause = error.__cause__ if most_causes > 0 else None
    caused_by = None if cause is None else _plain_error(cause, most_causes - 1)
    return [type(own).__name__, [str(value) for value in own.args], fields, caused_by]


def _error(plain: Any) -> LogprobeError:
    """Rebuild an error from the result of `_plain_error`; unknown classes become `EngineError`."""
    fields_type = dict[str, str | int | float | tuple[str, ...]]
    name, args, fields, cause = msgspec.convert(plain, tuple[str, list[str], fields_type, Any])
    kind: Any = getattr(errors, name, None)
    is_known = isinstance(kind, type) and issubclass(kind, LogprobeError)
    error = errors.remade(kind if is_known else EngineError, tuple(args), fields)
    error.__cause__ = None if cause is None else _error(cause)
    return error
