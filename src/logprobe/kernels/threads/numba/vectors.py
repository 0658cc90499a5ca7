"""Loops over a block of floats that the compiler turns into vector instructions.

What makes them vectorise: each reduces over a slice argument (an index into a larger array is checked for
wrap-around), `exp` is a polynomial with a bit shift, and sums may be reassociated. Fast-math never covers
NaN: a NaN in the row must reach the sum. What loops cannot say stands in `intrinsics`.

Before it: one block of a row. After it: the row kernel.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from logprobe.kernels.threads.numba.intrinsics import bits_float, float_bits, internal, maximum, multiply_add

F32 = np.float32
I32 = np.int32
SUMS = {"reassoc", "nsz"}

MINUS_INF = F32(-np.inf)
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


@internal
def exponential(d: Any) -> Any:
    """e**d for d in [-87, 0], relative error under 2e-7 + 1.4e-8 |d|: log2(e) is a float32; NaN for NaN."""
    t = multiply_add(d, LOG2_E, ROUND)
    r = multiply_add(d, LOG2_E, ROUND - t)  # d * log2(e) less its nearest integer
    p = multiply_add(C5, r, C4)
    p = multiply_add(p, r, C3)
    p = multiply_add(p, r, C2)
    p = multiply_add(p, r, C1)
    p = multiply_add(p, r, ONE)
    return p * bits_float(float_bits(t) << I32(23))


@internal(fastmath={"reassoc", "nsz", "nnan", "ninf"})
def greatest(x: Any) -> Any:
    """The largest value; a NaN is passed over."""
    largest = MINUS_INF
    for i in range(x.size):
        largest = maximum(largest, x[i])
    return largest


@internal(fastmath=SUMS)
def sum_exp(x: Any, reference: Any) -> Any:
    """Sum of e**(x - reference)."""
    total = ZERO
    for i in range(x.size):
        d = x[i] - reference
        d = LOWEST if d < LOWEST else d  # noqa: FURB136 (this way round, NaN stays NaN)
        total += exponential(d)
    return total


@internal(fastmath=SUMS)
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


@internal(fastmath=SUMS)
def sum_squares(x: Any, reference: Any, mean: Any) -> Any:
    """Sum of (d - mean)**2 * e**d, where d = x - reference."""
    squares = ZERO
    for i in range(x.size):
        d = x[i] - reference
        d = LOWEST if d < LOWEST else d  # noqa: FURB136
        apart = d - mean
        squares += apart * apart * exponential(d)
    return squares


@internal
def count_greater(x: Any, bound: Any) -> Any:
    """How many values are strictly greater than `bound`."""
    count = I32(0)
    for i in range(x.size):
        count += I32(x[i] > bound)
    return count


@internal
def widen_bfloat16(x: Any, out: Any) -> None:
    """Bits of bfloat16 as float32."""
    for i in range(x.size):
        out[i] = bits_float(I32(x[i]) << I32(16))


@internal
def widen_float16(x: Any, out: Any) -> None:
    """Bits of float16 as float32, subnormals, infinities and NaN included."""
    for i in range(x.size):
        bits = I32(x[i])
        magnitude = (bits & I32(0x7FFF)) << I32(13)
        finite = float_bits(bits_float(magnitude) * HALF_SCALE)
        special = magnitude | I32(0x7F800000)
        wide = special if magnitude >= I32(0x0F800000) else finite
        out[i] = bits_float(wide | ((bits & I32(0x8000)) << I32(16)))
