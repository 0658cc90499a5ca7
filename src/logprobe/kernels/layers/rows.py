"""CPU kernels that compute each row alone: norms, rotary embedding, gated activations, soft cap of logits.

The functions return stages (`kernels.stages`). Arrays of rows are float32, and each row is contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from logprobe.kernels.arrays import as_array
from logprobe.kernels.stages import Stage, block_rows

if TYPE_CHECKING:
    from logprobe.kernels.arrays import Array

MAX_ROWS = 16  # maximum rows per work item
ROWS_FOR_THREADS = 64  # with fewer rows, one thread is faster than several
GATE_PIECE, SOFTCAP_PIECE = 1 << 10, 1 << 13  # elements of a row per work item
ACTIVATIONS = {
    "none": 0,
    "silu": 1,
    "gelu_tanh": 2,
    "gelu": 3,
    "relu": 4,
    "relu2": 5,
}  # as in `gates.hpp`


def norm_stage(
    x: Array,
    weight: Array,
    out: Array,
    epsilon: float,
    residual: Array | None = None,
    *,
    bias: Array | None = None,
    is_centred: bool = False,
) -> Stage:
    """Return the stage that writes RMSNorm or LayerNorm (Ba et al. 2016) of each part of each row to `out`.

    RMSNorm is `x / sqrt(mean(x²) + epsilon) · weight` (Zhang & Sennrich 2019).

    Args:
        x: (num_rows, parts · width) float32.
        weight: (width,) float32.
        out: (num_rows, parts · width) float32; may be `x` itself.
        epsilon: added to the mean square, or to the variance.
        residual: added to the result; has the shape and strides of `out`, and may be `out` itself.
        bias: (width,) float32, added after multiplying by the weight; only for LayerNorm.
        is_centred: True: LayerNorm, which first subtracts the mean; False: RMSNorm.
    """
    width, num_rows = len(weight), len(x)
    parts = x.shape[1] // width
    assert residual is None or as_array(residual).strides == as_array(out).strides
    assert bias is None or is_centred
    block = block_rows(num_rows, MAX_ROWS)
    return Stage(
        "norm",
        "NormArgs",
        num_items=-(-num_rows // block),
        is_small=num_rows < ROWS_FOR_THREADS,
        x=x,
        weight=weight,
        bias=bias,
        residual=residual,
        out=out,
        width=width,
        parts=parts,
        num_rows=num_rows,
        block_rows=block,
        is_centred=is_centred,
        epsilon=epsilon,
    )


@dataclass(frozen=True, slots=True)
class Projections:
    """Queries, keys and values of a step's packed tokens in one layer, float32; each head is contiguous."""

    query: Array  # (num_tokens, heads, key_dim)
    key: Array  # (num_tokens, kv_heads, key_dim)
    value: Array  # (num_tokens, kv_heads, value_dim)


def rotary_stage(
    projections: Projections,
    rotary: tuple[Array, Array],
    pool: tuple[Array, Array],
    slots: Array,
    out: Array,
    *,
    is_paired: bool = False,
    query_scales: Array | None = None,
) -> Stage:
    """Return the stage that rotates queries and keys (Su et al. 2021), and stores keys and values.

    As in Llama, dimension i of the first half of the rotated dimensions and dimension i of the second half
    form a pair.

    Args:
        projections: the layer's queries, keys and values.
        rotary: cosines and sines, (num_tokens, rotary_dim) float32 each, contiguous; the second half of each
            row repeats the first. The first rotary_dim dimensions of each head are rotated,
            0 <= rotary_dim <= key_dim.
        pool: the cache: keys (num_slots, kv_heads, key_dim) and values (num_slots, kv_heads, value_dim),
            float32; token i is written to row `slots[i]`.
        slots: (num_tokens,) int64, distinct.
        out: (num_tokens, heads, key_dim) float32, contiguous; the rotated queries are written to it.
        is_paired: rotate adjacent pairs (0, 1), (2, 3), ... as in GPT-J. Pair i uses column i of the cosines
            and sines, whose layout does not change.
        query_scales: (num_tokens,) float32, by which the rotated queries are multiplied; None: not at all.
    """
    query, key, value = projections.query, projections.key, projections.value
    (cosines, sines), (keys, values) = rotary, pool
    num_rows, heads, key_dim = out.shape
    block = block_rows(num_rows, MAX_ROWS)
    return Stage(
        "rotary",
        "RotaryArgs",
        num_items=-(-num_rows // block),
        is_small=num_rows < ROWS_FOR_THREADS,
        query=query,
        key=key,
        value=value,
        cosines=cosines,
        sines=sines,
        query_scales=query_scales,
        out=out,
        key_pool=keys,
        value_pool=values,
        slots=slots,
        num_rows=num_rows,
        heads=heads,
        kv_heads=keys.shape[1],
        key_dim=key_dim,
        value_dim=values.shape[2],
        rotary_dim=cosines.shape[1],
        is_paired=is_paired,
        block_rows=block,
    )


def gate_stage(gates: Array, values: Array | None, out: Array, activation: str) -> Stage:
    """Return the stage that writes activation(gates) · values, or activation(gates), to `out`.

    This stage is used if LoRA products must first be added to gates or values, or if the weight formats of
    gates and values differ. Otherwise the kernel for matrix products applies the activation
    (`panels.Finish`). Both run the same code and give the same bits.

    Args:
        gates: (M, width) float32.
        values: (M, width) float32; must not overlap `out`. None: write
            activation(gates).
        out: (M, width) float32; may be `gates` itself.
        activation: one of ACTIVATIONS except "none".
    """
    assert activation != "none"
    num_rows, width = gates.shape
    return Stage(
        "gate",
        "GateArgs",
        num_items=num_rows * -(-width // GATE_PIECE),
        gates=gates,
        values=values,
        out=out,
        width=width,
        piece=GATE_PIECE,
        activation=ACTIVATIONS[activation],
    )


def softcap_stage(logits: Array, cap: float) -> Stage:
    """Return the stage that replaces `logits` with cap · tanh(logits / cap), in place (Gemma 2).

    Args:
        logits: (num_rows, width) float32.
        cap: the largest magnitude of a result.
    """
    num_rows, width = logits.shape
    return Stage(
        "softcap",
        "SoftcapArgs",
        num_items=num_rows * -(-width // SOFTCAP_PIECE),
        logits=logits,
        width=width,
        piece=SOFTCAP_PIECE,
        cap=cap,
    )
