"""Products of a few keys and values with the queries that share them, as LLVM's text.

A key's product with all queries is a vector, one lane a query; a value's is a vector of the value's own
numbers for each query. Each sum goes from its first summand to its last, one rounding each, as the sums of
`widen.tiles` do. Before it: addresses of keys and values. After it: the softmax, or what a row gives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from logprobe.kernels.layers.widen import FLOATS, INT64, LANES, VECTOR, every_lane, fused
from logprobe.kernels.threads.intrinsics import FLOAT, intrinsic

if TYPE_CHECKING:
    from collections.abc import Sequence

KEYS_AT_ONCE = 8  # whose sums stay in registers
FLOAT_TYPE = ir.FloatType()


def _load(builder: Any, start: Any, index: Any, kind: Any) -> Any:
    """A float, or a vector of them, `index` floats behind an address."""
    place = builder.add(start, builder.mul(index, INT64(FLOAT)))
    return builder.load(builder.inttoptr(place, kind.as_pointer()), align=FLOAT)


def _addresses(builder: Any, places: Any, count: int) -> list[Any]:
    starts = (builder.add(places, INT64(8 * number)) for number in range(count))
    return [builder.load(builder.inttoptr(start, INT64.as_pointer())) for start in starts]


@intrinsic
def score(_typing: Any, _queries: Any, _dim: Any, _places: Any, _scores: Any) -> Any:
    """Compiled `score(queries, dim, places, scores)`: products of KEYS_AT_ONCE keys, (KEYS_AT_ONCE, LANES).

    All but the number are addresses. queries is (dim, LANES); places are where the keys begin.
    """

    def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        queries, dim, places, scores = arguments
        keys, zero = _addresses(builder, places, KEYS_AT_ONCE), ir.Constant(FLOATS, None)
        sums = [cgutils.alloca_once_value(builder, zero) for _ in keys]  # type: ignore[no-untyped-call]
        with cgutils.for_range(builder, dim) as loop:
            query = _load(builder, queries, builder.mul(loop.index, INT64(LANES)), FLOATS)
            for key, total in zip(keys, sums, strict=True):
                number = every_lane(builder, _load(builder, key, loop.index, FLOAT_TYPE))
                builder.store(fused(builder, number, query, builder.load(total)), total)
        for number, total in enumerate(sums):
            place = builder.add(scores, INT64(VECTOR * number))
            builder.store(builder.load(total), builder.inttoptr(place, FLOATS.as_pointer()), align=FLOAT)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


def _weigher(num_keys: int) -> Any:
    """Compiled `weigh(weights, places, dim, sums)`: adds some keys' values to sums, (dim,), key after key.

    All but the number are addresses. places are where the values begin; a key's weight stands LANES behind
    that of the key before it.
    """

    @intrinsic
    def weigh(_typing: Any, _weights: Any, _places: Any, _dim: Any, _sums: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            weights, places, dim, sums = arguments
            values = _addresses(builder, places, num_keys)
            own = [_load(builder, weights, INT64(LANES * number), FLOAT_TYPE) for number in range(num_keys)]
            vectors = [every_lane(builder, weight) for weight in own]
            whole = builder.sub(dim, builder.srem(dim, INT64(LANES)))
            with cgutils.for_range_slice(builder, INT64(0), whole, INT64(LANES), INT64) as (index, _):
                _add(builder, FLOATS, vectors, values, index, sums)
            with cgutils.for_range_slice(builder, whole, dim, INT64(1), INT64) as (index, _):
                _add(builder, FLOAT_TYPE, own, values, index, sums)
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


weigh_several, weigh_one = _weigher(KEYS_AT_ONCE), _weigher(1)
