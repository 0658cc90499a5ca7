"""Instructions that Python has no words for, as functions of compiled code: each writes LLVM's own text.

Addresses are int64. Vectors have 64 lanes whatever the processor has: the compiler splits them.
"""

from __future__ import annotations

from functools import partial
from platform import machine
from typing import Any

from llvmlite import ir
from numba import extending, njit, types

from logprobe.kernels.processor import FLOAT, LINE

intrinsic: Any = extending.intrinsic  # its own type asks callers for the typing context
# What compiled code alone calls: without entry points for Python and C it takes a sixth less time to compile,
# and would crash if it was called from Python.
internal: Any = partial(njit, no_cpython_wrapper=True, no_cfunc_wrapper=True)
BLOCK = 1024  # values that stay in the first-level cache between the passes over them
LANES = 64
BYTE_POINTER = ir.IntType(8).as_pointer()
_VOID = ir.FunctionType(ir.VoidType(), [])
LANE_FLOATS = ir.VectorType(ir.FloatType(), LANES)


@intrinsic
def pointer(_typing_context: Any, address: Any) -> Any:
    """An integer address as a pointer."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], BYTE_POINTER)

    return types.voidptr(address), generate


@intrinsic
def fetch_add(_typing_context: Any, address: Any, _number: Any) -> Any:
    """The counter at an address, read and increased by a number in a single atomic step.

    What a thread wrote before it is seen by those that find it done.
    """

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        counter = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", counter, arguments[1], "acq_rel")

    return types.int64(address, types.int64), generate


@intrinsic
def counted(_typing_context: Any, address: Any) -> Any:
    """The counter at an address as other threads have left it, with all that they wrote before."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        counter = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(counter, "acquire", align=8)

    return types.int64(address), generate


@intrinsic
def pause(_typing_context: Any) -> Any:
    """Tell the processor that this loop only waits."""

    def generate(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
        if machine() in {"x86_64", "AMD64"}:
            builder.call(builder.module.declare_intrinsic("llvm.x86.sse2.pause", [], _VOID), [])
        return context.get_dummy_value()

    return types.void(), generate


def _prefetch(builder: Any, address: Any) -> None:
    int32 = ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [BYTE_POINTER, int32, int32, int32])
    hint = builder.module.declare_intrinsic("llvm.prefetch", [BYTE_POINTER], kind)
    to_read, all_levels, data = int32(0), int32(3), int32(1)
    builder.call(hint, [builder.inttoptr(address, BYTE_POINTER), to_read, all_levels, data])


@intrinsic
def prefetch_line(_typing_context: Any, address: Any) -> Any:
    """Ask the processor to bring the line at an address into its caches; a hint without an effect."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        _prefetch(builder, arguments[0])
        return context.get_dummy_value()

    return types.void(address), generate


@intrinsic
def call_with_task(_typing_context: Any, function: Any, task: Any) -> Any:
    """Call the C function `void(void*)` at an address."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [BYTE_POINTER]).as_pointer()
        builder.call(builder.inttoptr(arguments[0], kind), [builder.inttoptr(arguments[1], BYTE_POINTER)])
        return context.get_dummy_value()

    return types.void(function, task), generate


@intrinsic
def call_with_number(_typing_context: Any, function: Any, _number: Any) -> Any:
    """Call the C function `int(unsigned)` at an address."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        int32 = ir.IntType(32)
        kind = ir.FunctionType(int32, [int32]).as_pointer()
        builder.call(builder.inttoptr(arguments[0], kind), [builder.trunc(arguments[1], int32)])
        return context.get_dummy_value()

    return types.void(function, types.int64), generate


@intrinsic
def maximum(_typing_context: Any, _a: Any, _b: Any) -> Any:
    """The greater of two floats: one instruction, which ignores a NaN."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        kind = ir.FloatType()
        function = builder.module.declare_intrinsic("llvm.maxnum", [kind], ir.FunctionType(kind, [kind] * 2))
        return builder.call(function, arguments)

    return types.float32(types.float32, types.float32), generate


@intrinsic
def multiply_add(_typing_context: Any, _a: Any, _b: Any, _c: Any) -> Any:
    """A · b + c, in one rounding where the processor can."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        kind = ir.FloatType()
        function = builder.module.declare_intrinsic("llvm.fmuladd", [kind], ir.FunctionType(kind, [kind] * 3))
        return builder.call(function, arguments)

    return types.float32(types.float32, types.float32, types.float32), generate


@intrinsic
def float_bits(_typing_context: Any, _value: Any) -> Any:
    """The bits of a float as an integer."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), generate


@intrinsic
def bits_float(_typing_context: Any, _value: Any) -> Any:
    """The float of such bits."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


def _load_lanes(builder: Any, address: Any, offset: int) -> Any:
    """LANES floats at an address, some lanes further on."""
    address = builder.add(address, ir.IntType(64)(FLOAT * offset))
    return builder.load(builder.inttoptr(address, LANE_FLOATS.as_pointer()), align=FLOAT)


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


@intrinsic
def block_maxima(_typing_context: Any, _address: Any, _bound: Any, _out: Any) -> Any:
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


@intrinsic
def prefetch_block(_typing_context: Any, address: Any) -> Any:
    """Starts to fetch the block at an address into the cache; where nothing lies there, it is harmless."""

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        for offset in range(0, FLOAT * BLOCK, LINE):
            _prefetch(builder, builder.add(arguments[0], ir.IntType(64)(offset)))
        return context.get_dummy_value()

    return types.void(address), generate


@intrinsic
def reaching(_typing_context: Any, _address: Any, _bound: Any) -> Any:
    """One bit for each of LANES floats at an address: whether it is at least the bound."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        values = _load_lanes(builder, arguments[0], 0)
        bounds = _in_every_lane(builder, arguments[1])
        return builder.bitcast(builder.fcmp_ordered(">=", values, bounds), ir.IntType(LANES))

    return types.uint64(types.int64, types.float32), generate


@intrinsic
def lowest_bit(_typing_context: Any, _bits: Any) -> Any:
    """The place of the lowest bit that is set; one is."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.IntType(1)(1))

    return types.int64(types.uint64), generate
