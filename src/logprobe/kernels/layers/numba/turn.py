"""Rows of activations turned, so that an input's numbers of several rows stand side by side.

A tile of rows is kept as (inputs, width of the tile), the width a power of two: what a panel's product reads
at once. It is turned by interleaving halves of its vectors as often as the width has bits; number by number,
it would take a good part of the product's own time. Before it: rows as they come. After it: `panels`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from logprobe.kernels.layers.layout import TILE_ROWS
from logprobe.kernels.layers.numba.widen import FLOATS, INT32, INT64, LANES, VECTOR, tile_width
from logprobe.kernels.threads.numba.intrinsics import internal, intrinsic
from logprobe.kernels.threads.numba.tasks import float32_at

if TYPE_CHECKING:
    from collections.abc import Sequence


def _turner(width: int) -> Any:
    """Compiled `turn(x, stride, num_rows, num_inputs, out)`: whole vectors of inputs of up to `width` rows.

    x and out are addresses, the stride is in bytes. Beside fewer rows stand copies of the last one.
    """

    @intrinsic
    def turn(_typing: Any, _x: Any, _stride: Any, _rows: Any, _inputs: Any, _out: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            x, stride, num_rows, num_inputs, out = arguments
            last = builder.sub(num_rows, INT64(1))
            rows = []
            for row in range(width):
                number = builder.select(builder.icmp_signed("<", INT64(row), last), INT64(row), last)
                rows.append(builder.add(x, builder.mul(number, stride)))
            with cgutils.for_range(builder, builder.sdiv(num_inputs, INT64(LANES))) as loop:
                offset = builder.mul(loop.index, INT64(VECTOR))
                vectors = [builder.load(_place(builder, builder.add(row, offset)), align=4) for row in rows]
                for _ in range(width.bit_length() - 1):
                    vectors = _interleaved(builder, vectors)
                start = builder.add(out, builder.mul(offset, INT64(width)))
                for number, vector in enumerate(vectors):
                    place = _place(builder, builder.add(start, INT64(VECTOR * number)))
                    builder.store(vector, place, align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), generate

    return turn


def _place(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, FLOATS.as_pointer())


def _interleaved(builder: Any, vectors: Sequence[Any]) -> list[Any]:
    """All numbers of the first half of some vectors, each followed by its like of the second half."""
    half = len(vectors) // 2
    lanes = [lane for pair in zip(range(LANES), range(LANES, 2 * LANES), strict=True) for lane in pair]
    masks = [ir.Constant(ir.VectorType(INT32, LANES), lanes[part : part + LANES]) for part in (0, LANES)]
    pairs = zip(vectors[:half], vectors[half:], strict=True)
    return [builder.shuffle_vector(first, second, mask) for first, second in pairs for mask in masks]


_turn_1, _turn_2, _turn_4, _turn_8 = map(_turner, (1, 2, 4, 8))


@internal
def turn_rows(x: Any, stride: Any, num_rows: Any, num_inputs: Any, padded_inputs: Any, out: Any) -> None:
    """Tiles of TILE_ROWS (the last one as wide as it must be), each (padded inputs, width) float32.

    Args:
        x: where the first row begins.
        stride: bytes from one row to the next.
        num_rows: how many there are.
        num_inputs: of a row.
        padded_inputs: how many each tile has room for; those beyond a row's own become zeros.
        out: float32, `turned_size` of them.
    """
    whole = num_inputs // LANES * LANES
    for row in range(0, num_rows, TILE_ROWS):
        some = min(TILE_ROWS, num_rows - row)
        width, first = tile_width(some), x + stride * row
        target = out[row * padded_inputs :]
        if width == 1:
            _turn_1(first, stride, some, num_inputs, target.ctypes.data)
        elif width == 2:
            _turn_2(first, stride, some, num_inputs, target.ctypes.data)
        elif width == 4:
            _turn_4(first, stride, some, num_inputs, target.ctypes.data)
        else:
            _turn_8(first, stride, some, num_inputs, target.ctypes.data)
        for place in range(some):
            rest = float32_at(first + stride * place, num_inputs)
            for number in range(whole, num_inputs):
                target[number * width + place] = rest[number]
        target[num_inputs * width : padded_inputs * width] = 0


@internal
def turned_size(num_rows: Any, padded_inputs: Any) -> int:
    """How many float32 the tiles of some rows take."""
    rest = num_rows % TILE_ROWS
    size: int = (num_rows - rest + (tile_width(rest) if rest else 0)) * padded_inputs
    return size
