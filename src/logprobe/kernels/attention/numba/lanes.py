"""Products of a few keys and values with the queries that share them, as LLVM's text.

The lanes of a score's vectors are keys, which are turned in registers, four of their numbers at a time; those
of a value's are its own numbers. Each sum goes from its first summand to its last, one rounding each, as the
sums of `widen.tiles` do. Before it: addresses of keys and values. After it: the softmax, or what a row gives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from logprobe.kernels.attention.numba.softmax import BLOCK_KEYS
from logprobe.kernels.layers.numba.widen import FLOATS, INT32, INT64, LANES, every_lane, fused, switch_on
from logprobe.kernels.processor import FLOAT
from logprobe.kernels.threads.numba.intrinsics import intrinsic

if TYPE_CHECKING:
    from collections.abc import Sequence

QUERIES_AT_ONCE = 4  # whose sums stay in registers
KEYS_AT_ONCE = 2 * LANES  # sums of two vectors of keys do not wait for each other
VALUES_AT_ONCE = 8
QUAD = 4
ONE = ir.FloatType()
QUADS = ir.VectorType(ONE, QUAD)


def _load(builder: Any, start: Any, index: Any, kind: Any) -> Any:
    """A float, or a vector of them, `index` floats behind an address."""
    place = builder.add(start, builder.mul(index, INT64(FLOAT)))
    return builder.load(builder.inttoptr(place, kind.as_pointer()), align=FLOAT)


def _addresses(builder: Any, places: Any, count: int) -> list[Any]:
    starts = (builder.add(places, INT64(8 * number)) for number in range(count))
    return [builder.load(builder.inttoptr(start, INT64.as_pointer())) for start in starts]


def _shuffled(builder: Any, a: Any, b: Any, lanes: Sequence[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(INT32, len(lanes)), list(lanes)))


def _joined(builder: Any, parts: Sequence[Any]) -> Any:
    """One vector of several, whose number is a power of two."""
    while len(parts) > 1:
        width = 2 * parts[0].type.count
        pairs = zip(parts[::2], parts[1::2], strict=True)
        parts = [_shuffled(builder, first, second, range(width)) for first, second in pairs]
    return parts[0]


def _turned(builder: Any, keys: Sequence[Any], index: Any) -> list[Any]:
    """Four numbers of LANES keys as four vectors whose lanes are the keys."""
    rows = [
        _joined(builder, [_load(builder, key, index, QUADS) for key in keys[row::QUAD]])
        for row in range(QUAD)
    ]

    def mixed(a: Any, b: Any, own: Sequence[int]) -> Any:
        """Of each four lanes of both, those that `own` names: 0 to 3 of the first, 4 to 7 of the second."""
        lanes = [
            start + (lane if lane < QUAD else lane - QUAD + LANES)
            for start in range(0, LANES, QUAD)
            for lane in own
        ]
        return _shuffled(builder, a, b, lanes)

    low, high, even, odd = (0, 4, 1, 5), (2, 6, 3, 7), (0, 1, 4, 5), (2, 3, 6, 7)
    halves = [(mixed(rows[0], rows[1], part), mixed(rows[2], rows[3], part)) for part in (low, high)]
    return [mixed(*pair, part) for pair in halves for part in (even, odd)]


def _gathered(builder: Any, keys: Sequence[Any], index: Any) -> Any:
    """One number of LANES keys as a vector."""
    vector = ir.Constant(FLOATS, ir.Undefined)
    for lane, key in enumerate(keys):
        vector = builder.insert_element(vector, _load(builder, key, index, ONE), INT32(lane))
    return vector


def _scorer(num_vectors: int) -> Any:
    """Compiled `score(count, queries, dim, places, scores)`: products of some queries with vectors of keys.

    All but the numbers are addresses. queries is (count, dim) of up to QUERIES_AT_ONCE; places are where the
    keys begin; a query's scores stand BLOCK_KEYS behind those of the one before it.
    """

    @intrinsic
    def score(_typing: Any, _count: Any, _queries: Any, _dim: Any, _places: Any, _scores: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            def write(count: int) -> None:
                _score(builder, num_vectors, count, *arguments[1:])

            switch_on(builder, arguments[0], QUERIES_AT_ONCE, write)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), generate

    return score


def _score(
    builder: Any, num_vectors: int, count: int, queries: Any, dim: Any, places: Any, scores: Any
) -> None:
    keys, zero = _addresses(builder, places, num_vectors * LANES), ir.Constant(FLOATS, None)
    groups = [keys[start : start + LANES] for start in range(0, len(keys), LANES)]
    rows = [builder.add(queries, builder.mul(dim, INT64(FLOAT * number))) for number in range(count)]
    sums = {
        (group, number): cgutils.alloca_once_value(builder, zero)  # type: ignore[no-untyped-call]
        for group in range(num_vectors)
        for number in range(count)
    }

    def add(group: int, index: Any, vector: Any) -> None:
        for number, row in enumerate(rows):
            own = every_lane(builder, _load(builder, row, index, ONE))
            total = sums[group, number]
            builder.store(fused(builder, own, vector, builder.load(total)), total)

    whole = builder.sub(dim, builder.srem(dim, INT64(QUAD)))
    with cgutils.for_range_slice(builder, INT64(0), whole, INT64(QUAD), INT64) as (index, _):
        for group, own in enumerate(groups):
            for place, vector in enumerate(_turned(builder, own, index)):
                add(group, builder.add(index, INT64(place)), vector)
    with cgutils.for_range_slice(builder, whole, dim, INT64(1), INT64) as (index, _):
        for group, own in enumerate(groups):
            add(group, index, _gathered(builder, own, index))
    for (group, number), total in sums.items():
        place = builder.add(scores, INT64(FLOAT * (BLOCK_KEYS * number + LANES * group)))
        builder.store(builder.load(total), builder.inttoptr(place, FLOATS.as_pointer()), align=FLOAT)


def _weigher(num_keys: int) -> Any:
    """Compiled `weigh(weights, places, dim, sums)`: adds some keys' values to sums, (dim,), key after key.

    All but the number are addresses. weights is (num_keys,); places are where the values begin.
    """

    @intrinsic
    def weigh(_typing: Any, _weights: Any, _places: Any, _dim: Any, _sums: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            weights, places, dim, sums = arguments
            values = _addresses(builder, places, num_keys)
            own = [_load(builder, weights, INT64(number), ONE) for number in range(num_keys)]
            vectors = [every_lane(builder, weight) for weight in own]
            whole = builder.sub(dim, builder.srem(dim, INT64(LANES)))
            with cgutils.for_range_slice(builder, INT64(0), whole, INT64(LANES), INT64) as (index, _):
                _add(builder, FLOATS, vectors, values, index, sums)
            with cgutils.for_range_slice(builder, whole, dim, INT64(1), INT64) as (index, _):
                _add(builder, ONE, own, values, index, sums)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 4), generate

    return weigh


def _add(
    builder: Any, kind: Any, weights: Sequence[Any], values: Sequence[Any], index: Any, sums: Any
) -> None:
    """Add the numbers at `index` of all values, times their weights."""
    total = _load(builder, sums, index, kind)
    for weight, value in zip(weights, values, strict=True):
        total = fused(builder, weight, _load(builder, value, index, kind), total)
    place = builder.add(sums, builder.mul(index, INT64(FLOAT)))
    builder.store(total, builder.inttoptr(place, kind.as_pointer()), align=FLOAT)


score_many, score_few = _scorer(2), _scorer(1)
weigh_several, weigh_one = _weigher(VALUES_AT_ONCE), _weigher(1)
