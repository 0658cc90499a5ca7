"""Arrays ↔ one block of bytes: the form in which rows cross a wall, in a message or in shared memory.

A block is a table of int64, a line an array (its type's place in `DTYPES`, its length, its width or -1 where
it has one dimension; all -1: there is no such array), and then the arrays, each at a multiple of 8 bytes.

Before it: the rows of a step. After it: the same rows, as views of the block.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np

from logprobe.errors import EngineError
from logprobe.records.rows import EXTRAS, GivenLists, HostRows, KeptLists

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.records.store.columns import Array

Parts: TypeAlias = "list[Array]"
"""Contiguous arrays that lie one after another in a block."""

DTYPES: Final = tuple(map(np.dtype, ("<i4", "<f4", "<i8", "?", "<f8", "<u2", "u1", "<u4")))
ABSENT: Final = [-1, -1, -1]
LINE: Final = 3 * 8  # bytes of an array's line in the table
PADDING: Final = [np.zeros(count, np.uint8) for count in range(8)]
NUM_OWN, NUM_GIVEN, NUM_KEPT = (
    3,
    4,
    2,
)  # arrays of all rows, of the ids that were named, of those that were kept


def parts_of_array(array: Array) -> Parts:
    """An array of one or two dimensions."""
    return _parts_of([array])


def parts_of_rows(rows: HostRows) -> Parts:
    """The rows of a step, or of one of its requests."""
    given: list[Array | None] = [None] * NUM_GIVEN
    if rows.given is not None:
        given = [*rows.given.columns()]
    kept: list[Array | None] = [None] * NUM_KEPT
    if rows.kept is not None:
        kept = [rows.kept.offsets, rows.kept.token_ids]
    extras = [rows.extras.get(name) for name in EXTRAS]
    return _parts_of([rows.token_ids, rows.logprobs, rows.ranks, *extras, *given, *kept])


def num_bytes(parts: Parts) -> int:
    """The size of the block that holds these."""
    return sum(part.nbytes for part in parts)


def array_of(block: Array) -> Array:
    """The array in a block of bytes, (n,) uint8; shares its memory.

    Raises:
        EngineError: the block is not what it says.
    """
    (array,) = _arrays_of(block, 1)
    return _there(array)


def rows_of(block: Array) -> HostRows:
    """The rows in a block of bytes, (n,) uint8; they share its memory. Raises as `array_of`."""
    arrays = _arrays_of(block, NUM_OWN + len(EXTRAS) + NUM_GIVEN + NUM_KEPT)
    kept, given = arrays[-NUM_KEPT:], arrays[-NUM_KEPT - NUM_GIVEN : -NUM_KEPT]
    token_ids, logprobs, ranks = map(_there, arrays[:NUM_OWN])
    return HostRows(
        token_ids,
        logprobs,
        ranks,
        {name: array for name, array in zip(EXTRAS, arrays[NUM_OWN:], strict=False) if array is not None},
        None if given[0] is None else GivenLists.of(*map(_there, given)),
        None if kept[0] is None else KeptLists(offsets=kept[0], token_ids=_there(kept[1])),
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
    if len(block) < count * LINE:
        raise EngineError(f"a block of {len(block)} bytes holds no table of {count} arrays; report this")
    arrays: list[Array | None] = []
    start = count * LINE
    for kind, length, width in block[:start].view(np.int64).reshape(count, 3).tolist():
        if [kind, length, width] == ABSENT:
            arrays.append(None)
            continue
        if not 0 <= kind < len(DTYPES) or length < 0 or width < -1:
            raise EngineError(f"a block has an array of type {kind}, {length} x {width}; please report this")
        shape = (length,) if width == -1 else (length, width)
        stop = start + DTYPES[kind].itemsize * math.prod(shape)
        if stop > len(block):
            raise EngineError(f"a block of {len(block)} bytes is shorter than it says; please report this")
        arrays.append(block[start:stop].view(DTYPES[kind]).reshape(shape))
        start = stop + -stop % 8
    if start != len(block):
        raise EngineError(f"a block of {len(block)} bytes is longer than it says; please report this")
    return arrays


def _there(array: Array | None) -> Array:
    if array is None:
        raise EngineError("a block lacks an array; please report this")
    return array
