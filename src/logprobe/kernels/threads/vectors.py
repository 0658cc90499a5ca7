"""Loops over a block of floats that the compiler turns into vector instructions.

What makes them vectorise: each reduces over a slice argument (an index into a larger array is checked for
wrap-around), `exp` is a polynomial with a bit shift, and sums may be reassociated. Fast-math never covers
NaN: a NaN in the row must reach the sum. What loops cannot say (maxima by lane, bit masks) is written as
vector instructions, of 64 lanes whatever the processor has: the compiler splits them.

Before it: one block of a row. After it: the row kernel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

F32 = np.float32
I32 = np.int32
SUMS = {"reassoc", "nsz"}
BLOCK = 1024  # values that stay in the first-level cache between the passes over them
LANES = 64
LANE_FLOATS = ir.VectorType(ir.FloatType(), LANES)

LOG2_E = F32(1.4426950408889634)
LOWEST = F32(-87.0)  # e**-87 is about the smallest normal float32
ROUND = F32(
    12582912.0 + 127.0
)  # 1.5 * 2**23 + 127: adding it rounds to an integer and adds the exponent's bias
# (2**r - 1) / r on [-0.5, 0.5], degree 4, fitted for the least relative error of 2**r (1e-7)
C1, C2, C3, C4, C5 = (
    F32(c)
    for c in (
        0.6931470036506653,
        0.24022242426872253,
        0.05550733581185341,
        0.009671512991189957,
        0.001326472731307149,
    )
)
ONE = F32(1.0)
ZERO = F32(0.0)
HALF_SCALE = F32(2.0**112)  # the difference of the exponent biases of float32 and float16


def _maximum_intrinsic(_typing_context: Any, _a: Any, _b: Any) -> Any:
    """The greater of two floats: one instruction, which ignores a NaN."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        kind = ir.FloatType()
        function = builder.module.declare_intrinsic("llvm.maxnum", [kind], ir.FunctionType(kind, [kind] * 2))
        return builder.call(function, arguments)

    return types.float32(types.float32, types.float32), generate


def _multiply_add_intrinsic(_typing_context: Any, _a: Any, _b: Any, _c: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        kind = ir.FloatType()
        function = builder.module.declare_intrinsic("llvm.fmuladd", [kind], ir.FunctionType(kind, [kind] * 3))
        return builder.call(function, arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


def _float_bits_intrinsic(_typing_context: Any, _value: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), generate


def _bits_float_intrinsic(_typing_context: Any, _value: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


def _load_lanes(builder: Any, address: Any, offset: int) -> Any:
    """LANES floats at an address, some lanes further on."""
    pointer = builder.inttoptr(builder.add(address, ir.IntType(64)(4 * offset)), LANE_FLOATS.as_pointer())
    return builder.load(pointer, align=4)


def _in_every_lane(builder: Any, value: Any) -> Any:
    nothing = ir.Constant(LANE_FLOATS, ir.Undefined)
    one = builder.insert_element(nothing, value, ir.IntType(32)(0))
    return builder.shuffle_vector(
        one, nothing, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    )


def _greater_lanes(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _lane_range(builder: Any, vector: Any, start: int, stop: int) -> Any:
    chosen = ir.Constant(ir.VectorType(ir.IntType(32), stop - start), list(range(start, stop)))
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), chosen)


def _block_maxima_intrinsic(_typing_context: Any, _address: Any, _bound: Any, _out: Any) -> Any:
    """Maxima of LANES groups of a block, then of half as many, and so on to one; the count above `bound`.

    A group is every LANES-th value of the block, so that the maxima need no step across the lanes.
    """

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        address, bound, out = arguments
        bounds = _in_every_lane(builder, bound)
        maxima: Any = None
        count: Any = ir.IntType(64)(0)
        for offset in range(0, BLOCK, LANES):
            values = _load_lanes(builder, address, offset)
            bits = builder.bitcast(builder.fcmp_ordered(">", values, bounds), ir.IntType(LANES))
            count = builder.add(count, builder.ctpop(bits))
            maxima = values if maxima is None else _greater_lanes(builder, values, maxima)
        size = LANES
        while True:
            target = builder.add(out, ir.IntType(64)(4 * 2 * (LANES - size)))
            builder.store(maxima, builder.inttoptr(target, maxima.type.as_pointer()), align=4)
            if size == 1:
                return count
            size //= 2
            halves = [_lane_range(builder, maxima, start, start + size) for start in (0, size)]
            maxima = _greater_lanes(builder, *halves)

    return types.int64(types.int64, types.float32, types.int64), generate


def _prefetch_intrinsic(_typing_context: Any, _address: Any) -> Any:
    """Starts to fetch the block at an address into the cache; where nothing lies there, it is harmless."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        byte, int32 = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, int32, int32, int32])
        function = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        for offset in range(0, 4 * BLOCK, 64):
            place = builder.inttoptr(builder.add(arguments[0], ir.IntType(64)(offset)), byte)
            builder.call(function, [place, int32(0), int32(3), int32(1)])
        return ir.IntType(64)(0)

    return types.int64(types.int64), generate


def _reaching_intrinsic(_typing_context: Any, _address: Any, _bound: Any) -> Any:
    """One bit for each of LANES floats at an address: whether it is at least the bound."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        values = _load_lanes(builder, arguments[0], 0)
        bounds = _in_every_lane(builder, arguments[1])
        return builder.bitcast(builder.fcmp_ordered(">=", values, bounds), ir.IntType(LANES))

    return types.uint64(types.int64, types.float32), generate


def _lowest_bit_intrinsic(_typing_context: Any, _bits: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.IntType(1)(1))

    return types.int64(types.uint64), generate


maximum: Any = intrinsic(_maximum_intrinsic)
multiply_add: Any = intrinsic(_multiply_add_intrinsic)
float_bits: Any = intrinsic(_float_bits_intrinsic)
bits_float: Any = intrinsic(_bits_float_intrinsic)
block_maxima: Any = intrinsic(_block_maxima_intrinsic)
prefetch_block: Any = intrinsic(_prefetch_intrinsic)
reaching: Any = intrinsic(_reaching_intrinsic)
lowest_bit: Any = intrinsic(_lowest_bit_intrinsic)


@njit
def exponential(d: Any) -> Any:
    """e**d for d in [-87, 0], relative error under 2e-7; NaN for NaN."""
    t = multiply_add(d, LOG2_E, ROUND)
    r = multiply_add(d, LOG2_E, ROUND - t)  # d * log2(e) less its nearest integer
    p = multiply_add(C5, r, C4)
    p = multiply_add(p, r, C3)
    p = multiply_add(p, r, C2)
    p = multiply_add(p, r, C1)
    p = multiply_add(p, r, ONE)
    return p * bits_float(float_bits(t) << I32(23))


@njit(fastmath=SUMS)
def sum_exp(x: Any, reference: Any) -> Any:
    """Sum of e**(x - reference)."""
    total = ZERO
    for i in range(x.size):
        d = x[i] - reference
        d = LOWEST if d < LOWEST else d  # noqa: FURB136 (this way round, NaN stays NaN)
        total += exponential(d)
    return total


@njit(fastmath=SUMS)
def sum_exp_and_product(x: Any, reference: Any) -> Any:
    """Sums of e**d and of d * e**d, where d = x - reference."""
    total, products = ZERO, ZERO
    for i in range(x.size):
        d = x[i] - reference
        d = LOWEST if d < LOWEST else d  # noqa: FURB136
        e = exponential(d)
        total += e
        products += d * e
    return total, products


@njit
def count_greater(x: Any, bound: Any) -> Any:
    """How many values are strictly greater than `bound`."""
    count = I32(0)
    for i in range(x.size):
        count += I32(x[i] > bound)
    return count


@njit
def widen_bfloat16(x: Any, out: Any) -> None:
    """Bits of bfloat16 as float32."""
    for i in range(x.size):
        out[i] = bits_float(I32(x[i]) << I32(16))


@njit
def widen_float16(x: Any, out: Any) -> None:
    """Bits of float16 as float32, subnormals, infinities and NaN included."""
    for i in range(x.size):
        bits = I32(x[i])
        magnitude = (bits & I32(0x7FFF)) << I32(13)
        finite = float_bits(bits_float(magnitude) * HALF_SCALE)
        special = magnitude | I32(0x7F800000)
        wide = special if magnitude >= I32(0x0F800000) else finite
        out[i] = bits_float(wide | ((bits & I32(0x8000)) << I32(16)))
