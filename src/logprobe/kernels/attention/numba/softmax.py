"""Softmax of a block of scores whose vectors' lanes are query rows, a block of keys at a time.

The sums of a softmax go on from block to block: where a greater score comes, what earlier blocks gave is
scaled down (Milakov and Gimelshein, 2018). Written as LLVM's text, so that a row's maximum and sum stay in
registers while keys go by. Before it: scores of `chunk`. After it: their product with the values. What the
kernel for rows must do alike stands here, too.

The totals are float64. Many models give most of a row's weight to the first token and very little to each of
thousands of others; added one by one to a float32 total near 1, weights below 6e-8 would be lost, and the
error would grow with the length of the context.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from logprobe.kernels.layers.layout import PANEL
from logprobe.kernels.layers.numba.widen import FLOATS, INT64, INTS, LANES, VECTORS, every, fused
from logprobe.kernels.processor import DOUBLE, FLOAT
from logprobe.kernels.threads.numba import vectors
from logprobe.kernels.threads.numba.intrinsics import internal, intrinsic
from logprobe.kernels.threads.numba.vectors import F32

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCK_KEYS = 192  # measured: a panel's sums are read and written once for so many keys
# No score is less but that of a key that a row may not see, which is -inf and gets no weight at all.
LEAST = -3e38
DOUBLES = ir.VectorType(ir.DoubleType(), LANES)


@intrinsic
def soften(_typing: Any, _scores: Any, _keys: Any, _largest: Any, _totals: Any, _factors: Any) -> Any:
    """Compiled `soften(scores, num_keys, largest, totals, factors)`: exponentials in the place of scores.

    All but the number are addresses. scores is (num_keys, PANEL); largest, (PANEL,), and totals, (PANEL,)
    float64, go on from the block before; factors, (PANEL,), are written: what earlier blocks' products take.
    Gives whether one of them is not 1. A NaN stays what it is.
    """

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        scores, num_keys, largest, totals, factors = arguments
        before = _loaded(builder, largest)
        maxima = [cgutils.alloca_once_value(builder, vector) for vector in before]  # type: ignore[no-untyped-call]
        with cgutils.for_range(builder, num_keys) as loop:
            for place, score in zip(maxima, _loaded(builder, _row(builder, scores, loop)), strict=True):
                held = builder.load(place)
                builder.store(builder.select(builder.fcmp_ordered(">", score, held), score, held), place)
        after = [builder.load(place) for place in maxima]
        _store(builder, largest, after)
        least = every(FLOATS, LEAST)
        known = [builder.select(builder.fcmp_ordered(">", x, least), x, least) for x in after]
        shares = [_exponential(builder, old, new) for old, new in zip(before, known, strict=True)]
        _store(builder, factors, shares)
        scaled = [
            builder.fmul(x, builder.fpext(share, DOUBLES))
            for x, share in zip(_loaded(builder, totals, DOUBLES), shares, strict=True)
        ]
        sums = [cgutils.alloca_once_value(builder, vector) for vector in scaled]  # type: ignore[no-untyped-call]
        with cgutils.for_range(builder, num_keys) as loop:
            row = _row(builder, scores, loop)
            exponentials = []
            for score, reference in zip(_loaded(builder, row), known, strict=True):
                hidden = builder.fcmp_ordered("<", score, least)
                value = _exponential(builder, score, reference)
                exponentials.append(builder.select(hidden, ir.Constant(FLOATS, None), value))
            _store(builder, row, exponentials)
            for place, value in zip(sums, exponentials, strict=True):
                builder.store(builder.fadd(builder.load(place), builder.fpext(value, DOUBLES)), place)
        _store(builder, totals, [builder.load(place) for place in sums], DOUBLES)
        return _is_any(builder, [builder.fcmp_unordered("!=", x, every(FLOATS, 1.0)) for x in shares])

    return types.boolean(*[types.int64] * 5), generate


def _row(builder: Any, start: Any, loop: Any) -> Any:
    return builder.add(start, builder.mul(loop.index, INT64(FLOAT * PANEL)))


def _places(builder: Any, start: Any, kind: Any) -> list[Any]:
    """Addresses of the vectors of one row of a panel."""
    stride = LANES * (DOUBLE if kind is DOUBLES else FLOAT)
    addresses = (builder.add(start, INT64(stride * number)) for number in range(VECTORS))
    return [builder.inttoptr(address, kind.as_pointer()) for address in addresses]


def _loaded(builder: Any, start: Any, kind: Any = FLOATS) -> list[Any]:
    return [builder.load(place, align=FLOAT) for place in _places(builder, start, kind)]


def _store(builder: Any, start: Any, values: Sequence[Any], kind: Any = FLOATS) -> None:
    for place, value in zip(_places(builder, start, kind), values, strict=True):
        builder.store(value, place, align=FLOAT)


def _exponential(builder: Any, x: Any, reference: Any) -> Any:
    """e**(x - reference), not below e**-87: `vectors.exponential` with as many lanes as a register has."""
    difference, lowest = builder.fsub(x, reference), every(FLOATS, vectors.LOWEST)
    d = builder.select(builder.fcmp_ordered("<", difference, lowest), lowest, difference)
    log2_e, rounds = every(FLOATS, vectors.LOG2_E), every(FLOATS, vectors.ROUND)
    shifted = fused(builder, d, log2_e, rounds)
    rest = fused(builder, d, log2_e, builder.fsub(rounds, shifted))
    value = every(FLOATS, vectors.C5)
    for factor in (vectors.C4, vectors.C3, vectors.C2, vectors.C1, vectors.ONE):
        value = fused(builder, value, rest, every(FLOATS, factor))
    exponent = builder.shl(builder.bitcast(shifted, INTS), every(INTS, 23))
    return builder.fmul(value, builder.bitcast(exponent, FLOATS))


def _is_any(builder: Any, lanes: Sequence[Any]) -> Any:
    bits = [builder.bitcast(some, ir.IntType(LANES)) for some in lanes]
    both = bits[0]
    for others in bits[1:]:
        both = builder.or_(both, others)
    return builder.icmp_unsigned("!=", both, ir.IntType(LANES)(0))


@internal
def cap(scores: Any, softcap: Any) -> None:
    """Squash scores, in place."""
    for i in range(scores.size):
        scores[i] = softcap * F32(math.tanh(scores[i] / softcap))
