"""`Codec`: values ↔ the bytes of one message.

A message is msgpack: blocks of numbers, and the value, in which rows and arrays stand as places in these
blocks. Rows of one kind share a block, so that a step of many narrow rows costs one block and not one a row.
A block of `SHARED_BYTES` and more lies in shared memory, with its place in the message; both ways give the
same rows. Only known types are made of what comes: nothing is unpickled.

Before it: messages. After it: a socket, and the same messages on its other side.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Generic, TypeAlias, TypeVar, get_origin

import msgspec
import numpy as np

from logprobe import errors
from logprobe.errors import EngineError, LogprobeError, ParameterError
from logprobe.records.rows import HostRows
from logprobe.transport.blocks import array_of, num_bytes, parts_of_array, parts_of_rows, rows_of
from logprobe.transport.shm import Span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.records.store.columns import Array
    from logprobe.transport.blocks import Parts
    from logprobe.transport.shm import PageReader, PageWriter

T = TypeVar("T")

MAX_MESSAGE_BYTES: Final = 1 << 30
SHARED_BYTES: Final = 1 << 16  # of a block, from which shared memory is faster; benchmarks/bench_transport.py
NARROW_BYTES: Final = 1 << 10  # of rows, up to which a copy is cheaper than a block of their own
MOST_CAUSES: Final = 4  # of an error, one behind the other

Place: TypeAlias = tuple[int, int, int]
"""Of rows: block, first row, the one after the last."""


class UnreadableError(EngineError):
    """A message that holds no value of a known type."""

    def __init__(self, value: bytes, reason: str) -> None:
        super().__init__(f"a message from another process cannot be read: {reason}")
        self.value = value  # its bytes, as far as they were found


class Envelope(msgspec.Struct, array_like=True, frozen=True):
    """One message."""

    blocks: list[bytes | Span]
    value: msgspec.Raw


class Codec(Generic[T]):
    """Values ↔ bytes; `incoming` is the type of all that may come."""

    def __init__(
        self, incoming: Any, *, writer: PageWriter | None = None, reader: PageReader | None = None
    ) -> None:
        self._writer = writer
        self._reader = reader
        self._envelopes = msgspec.msgpack.Decoder(Envelope)
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(incoming, dec_hook=self._made)
        self._present = _Present()  # the message that is decoded

    def encode(self, value: Any) -> bytes:
        """One message.

        Raises:
            ParameterError: a value that cannot cross: no plain one, or too large.
        """
        numbers = _Numbers()
        try:
            told = msgspec.msgpack.encode(value, enc_hook=numbers.plain)
        except OverflowError as error:
            raise ParameterError("params", f"an integer has more than 64 bits: {error}") from error
        except UnicodeEncodeError as error:
            raise ParameterError("params", f"a text is no valid Unicode: {error}") from error
        blocks = [self._carried(parts) for parts in numbers.blocks()]
        data = msgspec.msgpack.encode(Envelope(blocks, msgspec.Raw(told)))
        if len(data) > MAX_MESSAGE_BYTES:
            for block in blocks:
                if isinstance(block, Span) and self._writer is not None:
                    self._writer.take_back(block)
            what = f"a message has {len(data):,} bytes, at most {MAX_MESSAGE_BYTES:,} cross to a process"
            raise ParameterError("message", f"{what}; ask for fewer alternatives, or lower max_batch_tokens")
        return data

    def decode(self, data: Any) -> T:
        """The value of one message.

        Raises:
            UnreadableError: bytes that hold no such value.
        """
        value = msgspec.Raw()
        try:
            envelope = self._envelopes.decode(data)
            self._present.blocks, value = envelope.blocks, envelope.value
            return self._decoder.decode(value)
        except msgspec.DecodeError as error:
            raise UnreadableError(bytes(value), str(error)) from error
        finally:
            self._present.blocks, self._present.rows = (), {}

    def _carried(self, parts: Parts) -> bytes | Span:
        if self._writer is not None and num_bytes(parts) >= SHARED_BYTES:
            span = self._writer.write(parts)
            if span is not None:
                return span
        return b"".join(part.data for part in parts)

    def _made(self, kind: Any, value: Any) -> Any:
        if kind is HostRows:
            return self._rows_at(*msgspec.convert(value, Place))
        if get_origin(kind) is np.ndarray:
            return self._array_at(msgspec.convert(value, int))
        assert kind is LogprobeError
        return _error(value)

    def _rows_at(self, block: int, start: int, stop: int) -> HostRows:
        known = self._present.rows
        if block not in known:
            known[block] = rows_of(self._block(block))
        rows = known[block]
        size = len(rows)
        if not 0 <= start <= stop <= size:
            raise EngineError(f"a block of {size} rows has no rows {start} to {stop}; please report this")
        return rows if stop - start == size else rows.rows(start, stop)

    def _array_at(self, block: int) -> Array:
        array = array_of(self._block(block))
        if isinstance(self._present.blocks[block], Span):
            array = array.copy()  # it is kept for long, and must not keep pages
        array.flags.writeable = False
        return array

    def _block(self, number: int) -> Array:
        blocks = self._present.blocks
        if not 0 <= number < len(blocks):
            raise EngineError(f"a message of {len(blocks)} blocks has no block {number}; report this")
        block = blocks[number]
        if isinstance(block, bytes):
            return np.frombuffer(block, np.uint8)
        if self._reader is None:
            raise EngineError("rows in shared memory came, and none is shared; please report this")
        return self._reader.read(block)


class _Present(threading.local):
    """What the values of one message stand on while it is decoded, each thread's own."""

    def __init__(self) -> None:
        self.blocks: Sequence[bytes | Span] = ()
        self.rows: dict[int, HostRows] = {}  # in these blocks


class _Numbers:
    """The rows and arrays of one message, gathered while its value is encoded."""

    def __init__(self) -> None:
        self._blocks: list[list[HostRows] | Array] = []
        self._num_rows: list[int] = []  # of each block
        self._kinds: dict[Any, int] = {}  # the kind of narrow rows → their block

    def plain(self, value: Any) -> Any:
        """What msgpack does not know, as what it knows."""
        if isinstance(value, HostRows):
            return self._place_of(value)
        if isinstance(value, np.ndarray):
            self._blocks.append(value)
            self._num_rows.append(0)
            return len(self._blocks) - 1
        if isinstance(value, LogprobeError):
            return _told(value)
        if isinstance(value, Mapping):
            return dict(value)
        kind = type(value).__name__
        raise ParameterError("params", f"holds {value!r:.60} ({kind}), which cannot cross to another process")

    def blocks(self) -> list[Parts]:
        """What the places that `plain` gave stand for."""
        return [
            parts_of_rows(HostRows.joined(block)) if isinstance(block, list) else parts_of_array(block)
            for block in self._blocks
        ]

    def _place_of(self, rows: HostRows) -> Place:
        """The end of the block of such rows; wide ones have one of their own."""
        number, kind = len(self._blocks), _narrow_kind(rows)
        if kind is not None:
            number = self._kinds.setdefault(kind, number)
        if number == len(self._blocks):
            self._blocks.append([])
            self._num_rows.append(0)
        block, start = self._blocks[number], self._num_rows[number]
        assert isinstance(block, list)
        block.append(rows)
        self._num_rows[number] = stop = start + len(rows)
        return number, start, stop


def _narrow_kind(rows: HostRows) -> tuple[Any, ...] | None:
    """What rows have in common that lie well in one block; None where they are better alone."""
    if 2 * rows.token_ids.nbytes > NARROW_BYTES or rows.given is not None or rows.kept is not None:
        return None
    columns = (rows.token_ids, rows.logprobs, *rows.extras.values())
    return (rows.k, *rows.extras, *(column.dtype for column in columns))


def _told(error: BaseException, most_causes: int = MOST_CAUSES) -> list[Any]:
    """An error as its class's name, its arguments, its plain fields, and what caused it."""
    own = error if isinstance(error, LogprobeError) else EngineError(f"{type(error).__name__}: {error}")
    fields = {name: value for name, value in vars(own).items() if isinstance(value, str | int | float)}
    cause = error.__cause__ if most_causes > 0 else None
    told = None if cause is None else _told(cause, most_causes - 1)
    return [type(own).__name__, [str(value) for value in own.args], fields, told]


def _error(told: Any) -> LogprobeError:
    """The error of a known class that `_told` tells of."""
    fields_type = dict[str, str | int | float]
    name, args, fields, cause = msgspec.convert(told, tuple[str, list[str], fields_type, Any])
    kind: Any = getattr(errors, name, None)
    is_known = isinstance(kind, type) and issubclass(kind, LogprobeError)
    error = errors.remade(kind if is_known else EngineError, tuple(args), fields)
    error.__cause__ = None if cause is None else _error(cause)
    return error
