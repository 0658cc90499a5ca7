"""Panels of weights widened to float32 in registers: LLVM's text of a loop over one.

Widening is exact but for `scale · value + summand`, which is rounded once, as a float32 load rounds it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from logprobe.kernels.layers.layout import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    GROUP,
    NIBBLES,
    NIBBLES_WIDE,
    OCTETS,
    OCTETS_WIDE,
    PANEL,
    TILE_ROWS,
    Form,
    can_widen,
)
from logprobe.kernels.processor import FLOAT, HAS_WIDE_REGISTERS, cpu_features
from logprobe.kernels.threads.numba.intrinsics import internal, intrinsic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from typing import TypeAlias

    Header: TypeAlias = Sequence[Callable[[], Any]]  # vectors, to be had where they are used

LANES = 16 if HAS_WIDE_REGISTERS else 8
VECTORS = PANEL // LANES
HAS_FEW_REGISTERS = "avx2" in cpu_features() and not HAS_WIDE_REGISTERS  # 16 of 256 bits
VECTOR = FLOAT * LANES  # bytes
ROOMY_ROWS = 5 if HAS_WIDE_REGISTERS else 0  # whose sums leave registers for a block's header; measured
INT64, INT32, INT16, INT8 = (ir.IntType(bits) for bits in (64, 32, 16, 8))
FLOATS, HALVES, INTS, SHORTS, BYTES = (
    ir.VectorType(kind, LANES) for kind in (ir.FloatType(), ir.HalfType(), INT32, INT16, INT8)
)


def _load(builder: Any, address: Any, offset: int, kind: Any) -> Any:
    place = builder.inttoptr(builder.add(address, INT64(offset)), kind.as_pointer())
    return builder.load(place, align=1)


def every(kind: Any, value: Any) -> Any:
    """A vector with one value in all lanes."""
    return ir.Constant(kind, [value] * LANES)


def every_lane(builder: Any, value: Any) -> Any:
    """A float in all lanes of a vector."""
    nothing = ir.Constant(FLOATS, ir.Undefined)
    first = builder.insert_element(nothing, value, INT32(0))
    return builder.shuffle_vector(first, nothing, ir.Constant(INTS, [0] * LANES))


def fused(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """A · b + c of floats or vectors of them; in one rounding where the processor can."""
    kind = ir.FunctionType(a.type, [a.type] * 3)
    operation, width = "fma" if can_widen() else "fmuladd", f"v{LANES}" if a.type == FLOATS else ""
    name = f"llvm.{operation}.{width}f32"
    function = cgutils.get_or_insert_function(builder.module, kind, name)  # type: ignore[no-untyped-call]
    return builder.call(function, [a, b, c])


def _halves(builder: Any, address: Any, offset: int) -> Any:
    return builder.fpext(_load(builder, address, offset, HALVES), FLOATS)


def _float32_values(builder: Any, address: Any, _header: Header) -> Iterator[Iterable[Any]]:
    for place in range(GROUP):
        yield (_load(builder, address, VECTOR * (VECTORS * place + j), FLOATS) for j in range(VECTORS))


def _bfloat16_values(builder: Any, address: Any, _header: Header) -> Iterator[Iterable[Any]]:
    for pair in range(GROUP // 2):
        both = [_load(builder, address, VECTOR * (VECTORS * pair + j), INTS) for j in range(VECTORS)]
        yield [builder.bitcast(builder.shl(bits, every(INTS, 16)), FLOATS) for bits in both]
        yield [builder.bitcast(builder.and_(bits, every(INTS, 0xFFFF0000)), FLOATS) for bits in both]


def _float16_values(builder: Any, address: Any, _header: Header) -> Iterator[Iterable[Any]]:
    for place in range(GROUP):
        yield [_halves(builder, address, VECTOR // 2 * (VECTORS * place + j)) for j in range(VECTORS)]


def _nibble_values(builder: Any, address: Any, header: Header) -> Iterator[Iterable[Any]]:
    bits = [partial(_load, builder, address, VECTOR * j, INTS) for j in range(VECTORS)]
    floats = _looked_up if HAS_WIDE_REGISTERS else _subtracted
    for values in floats(builder, bits):
        parts = zip(values, header[:VECTORS], header[VECTORS:], strict=True)
        yield [fused(builder, value, scale(), summand()) for value, scale, summand in parts]


def _looked_up(builder: Any, bits: Header) -> Iterator[list[Any]]:
    """Four bits as the number of one of 16 lanes, which hold 0 to 15; the instruction ignores higher bits."""
    kind = ir.FunctionType(FLOATS, [FLOATS, INTS])
    name = "llvm.x86.avx512.permvar.sf.512"
    function = cgutils.get_or_insert_function(builder.module, kind, name)  # type: ignore[no-untyped-call]
    numbers = ir.Constant(FLOATS, [float(lane) for lane in range(LANES)])
    for number in range(GROUP):
        lanes = [builder.lshr(load(), every(INTS, 4 * number)) for load in bits]
        yield [builder.call(function, [numbers, lane]) for lane in lanes]


def _subtracted(builder: Any, bits: Header) -> Iterator[list[Any]]:
    """Four bits under an exponent that gives their place its value: 2**e + value, and 2**e less."""
    for number in range(GROUP):
        place, shift = (4 * number, 0) if number < 5 else (4 * (number - 5), 20)
        exponent = 23 - place
        values = []
        for load in bits:
            nibble = builder.and_(builder.lshr(load(), every(INTS, shift)), every(INTS, 15 << place))
            shifted = builder.bitcast(builder.or_(nibble, every(INTS, (exponent + 127) << 23)), FLOATS)
            values.append(builder.fsub(shifted, every(FLOATS, float(2**exponent))))
        yield values


def _octet_values(builder: Any, address: Any, header: Header) -> Iterator[Iterable[Any]]:
    for place in range(GROUP):
        vectors = [_load(builder, address, LANES * (VECTORS * place + j), BYTES) for j in range(VECTORS)]
        floats = [builder.sitofp(builder.sext(vector, INTS), FLOATS) for vector in vectors]
        yield [builder.fmul(value, scale()) for value, scale in zip(floats, header, strict=True)]


_VALUES = {
    FLOAT32: _float32_values,
    BFLOAT16: _bfloat16_values,
    FLOAT16: _float16_values,
    NIBBLES: _nibble_values,
    NIBBLES_WIDE: _nibble_values,
    OCTETS: _octet_values,
    OCTETS_WIDE: _octet_values,
}


def _header(builder: Any, form: Form, address: Any, *, is_in_memory: bool) -> Header:
    """A block's scales, and then its summands, as vectors of float32: in registers, or read at use.

    Where many sums need the registers, the compiler would keep these and put the sums aside.
    """
    if form in (NIBBLES_WIDE, OCTETS_WIDE):
        return [partial(_load, builder, address, offset, FLOATS) for offset in range(0, form.header, VECTOR)]
    vectors = [_halves(builder, address, offset) for offset in range(0, form.header, VECTOR // 2)]
    if not is_in_memory:
        return [partial(_itself, vector) for vector in vectors]
    places = [cgutils.alloca_once_value(builder, vector) for vector in vectors]  # type: ignore[no-untyped-call]
    for place in places:
        _keep_in_memory(builder, place)
    return [partial(builder.load, place) for place in places]


def _keep_in_memory(builder: Any, place: Any) -> None:
    """Hand a pointer to text of no instruction: what it points to stays in memory, not in registers."""
    kind = ir.FunctionType(ir.VoidType(), [place.type])
    builder.asm(kind, "", "r,~{memory}", [place], side_effect=True)


def _itself(vector: Any) -> Any:
    return vector


def _each_input(
    builder: Any,
    form: Form,
    panel: Any,
    num_inputs: Any,
    use: Callable[[Iterable[Any], Any], None],
    after: tuple[int, Callable[[], None]] | None = None,
    *,
    is_tight: bool = False,
) -> None:
    """Let `use` see the vectors of every input of a panel, with the input's number.

    `after` is a number of inputs, and what is to follow each run of so many.
    """
    num_blocks = builder.sdiv(num_inputs, INT64(form.inputs))
    with cgutils.for_range(builder, num_blocks) as blocks:
        address = builder.add(panel, builder.mul(blocks.index, INT64(form.block_bytes)))
        header = _header(builder, form, address, is_in_memory=is_tight)
        first = builder.mul(blocks.index, INT64(form.inputs))
        with cgutils.for_range(builder, INT64(form.inputs // GROUP)) as groups:
            offset = builder.add(builder.mul(groups.index, INT64(form.group)), INT64(form.header))
            start = builder.add(first, builder.mul(groups.index, INT64(GROUP)))
            values = _VALUES[form](builder, builder.add(address, offset), header)
            for number, vectors in enumerate(values):
                use(vectors, builder.add(start, INT64(number)))
            if after is not None:
                run, end_run = after
                place = builder.and_(builder.add(start, INT64(GROUP)), INT64(run - 1))
                with builder.if_then(builder.icmp_signed("==", place, INT64(0))):
                    end_run()


@internal
def tile_width(num_rows: Any) -> Any:
    """How many rows there is room for beside each other in a tile of up to 8: the next power of two."""
    return num_rows if num_rows <= 2 else 4 if num_rows <= 4 else 8


def switch_on(builder: Any, number: Any, most: int, emit: Callable[[int], None]) -> None:
    """Code for a number from 1 to `most`, written by `emit` for each; nothing is done for another."""
    done = builder.append_basic_block("done")
    switch = builder.switch(number, done)
    for case in range(1, most + 1):
        block = builder.append_basic_block(f"case_{case}")
        switch.add_case(INT64(case), block)
        builder.position_at_end(block)
        emit(case)
        builder.branch(done)
    builder.position_at_end(done)


def tiles(form: Form, run: int | None = None) -> Any:
    """Compiled `multiply(num_rows, panel, num_inputs, x, out)`: adds to out (num_rows, PANEL) products of x.

    x is (num_inputs, tile_width(num_rows)), of up to TILE_ROWS rows: an input's rows side by side. Each sum
    goes from the first input to the last, one rounding each, however many rows there are.

    Args:
        form: of the panel.
        run: inputs, a power of two from GROUP on, whose products are summed by themselves before they are
            added to those before them: the rounding error of a sum grows with its runs. None: all inputs.
    """
    # Both sums of half the rows stay in registers. Where weights take long to widen, all rows share that.
    most = TILE_ROWS if run is None or form.header else max(2, TILE_ROWS // 2)

    @intrinsic
    def multiply(_typing: Any, _rows: Any, _panel: Any, _inputs: Any, _x: Any, _out: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            num_rows, *others = arguments

            def write(rows: int) -> None:
                for start in range(0, rows, most):
                    _multiply_tile(builder, form, run, range(start, min(rows, start + most)), rows, others)

            switch_on(builder, num_rows, TILE_ROWS, write)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), generate

    return multiply


def _multiply_tile(
    builder: Any, form: Form, run: int | None, own: range, num_rows: int, arguments: list[Any]
) -> None:
    """The products of some rows of a tile of `num_rows`."""
    panel, num_inputs, x, out = arguments
    width = tile_width.py_func(num_rows)
    zero = ir.Constant(FLOATS, None)
    sums, totals = (
        {
            (row, j): cgutils.alloca_once_value(builder, zero)  # type: ignore[no-untyped-call]
            for row in own
            for j in range(VECTORS)
        }
        for _ in range(2)
    )
    if run is not None and HAS_WIDE_REGISTERS and len(own) > TILE_ROWS // 2:
        for total in totals.values():
            _keep_in_memory(builder, total)

    def end_run() -> None:
        for place, total in sums.items():
            builder.store(builder.fadd(builder.load(totals[place]), builder.load(total)), totals[place])
            builder.store(zero, total)

    def use(vectors: Iterable[Any], number: Any) -> None:
        start = builder.add(x, builder.mul(number, INT64(FLOAT * width)))
        rows = (every_lane(builder, _load(builder, start, FLOAT * row, ir.FloatType())) for row in own)
        if HAS_WIDE_REGISTERS:
            held = list(vectors)
            for row, value in zip(own, rows, strict=True):
                _add_products(builder, value, held, [sums[row, j] for j in range(VECTORS)])
        else:
            held = list(rows)
            for j, vector in enumerate(vectors):
                _add_products(builder, vector, held, [sums[row, j] for row in own])

    after = None if run is None else (run, end_run)
    _each_input(builder, form, panel, num_inputs, use, after, is_tight=len(own) > ROOMY_ROWS)
    if run is not None:
        end_run()
        sums = totals
    for (row, j), total in sums.items():
        place = builder.inttoptr(builder.add(out, INT64(VECTOR * (VECTORS * row + j))), FLOATS.as_pointer())
        whole = builder.fadd(builder.load(place, align=4), builder.load(total))
        builder.store(whole, place, align=4)


def _add_products(builder: Any, one: Any, others: list[Any], sums: list[Any]) -> None:
    """Add the products of one vector with others, and only then load what follows.

    Loaded ahead, as the compiler would have it, vectors take the registers of sums.
    """
    for other, total in zip(others, sums, strict=True):
        builder.store(_by_now(builder, fused(builder, one, other, builder.load(total))), total)
    builder.asm(ir.FunctionType(ir.VoidType(), []), "", "~{memory}", [], side_effect=True)


def _by_now(builder: Any, vector: Any) -> Any:
    """The vector, made before anything that follows: text of no instruction, which wants it in a register.

    With few registers, the compiler would put a product off until after the next loads, and spill a sum.
    """
    kind = ir.FunctionType(FLOATS, [FLOATS])
    return builder.asm(kind, "", "=x,0", [vector], side_effect=True) if HAS_FEW_REGISTERS else vector


def widener(form: Form) -> Any:
    """Compiled `widen(panel, num_inputs, out)`: the weights as (num_inputs, PANEL) float32."""

    @intrinsic
    def widen(_typing: Any, _panel: Any, _inputs: Any, _out: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            panel, num_inputs, out = arguments

            def use(vectors: Iterable[Any], number: Any) -> None:
                start = builder.add(out, builder.mul(number, INT64(FLOAT * PANEL)))
                for j, vector in enumerate(vectors):
                    place = builder.inttoptr(builder.add(start, INT64(VECTOR * j)), FLOATS.as_pointer())
                    builder.store(vector, place, align=4)

            _each_input(builder, form, panel, num_inputs, use)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 3), generate

    return widen
