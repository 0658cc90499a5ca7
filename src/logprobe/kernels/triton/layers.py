"""Triton kernels for norms, rotary embedding, storing keys and values, and gated activations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from logprobe.kernels.triton.pieces import store_pieces

if TYPE_CHECKING:
    from torch import Tensor


def norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None = None,
    *,
    epsilon: float = 0.0,
    is_centred: bool = False,
    out: Tensor,
    residual: Tensor | None = None,
) -> Tensor:
    """Write RMSNorm (Zhang & Sennrich 2019) or LayerNorm (Ba et al. 2016) of each part of each row to `out`.

    Args:
        x: (rows, parts * width) float32, each row contiguous.
        weight: (width,) float32; None: do not normalise.
        bias: (width,) float32, only for LayerNorm.
        epsilon: added to the mean square or the variance.
        is_centred: True: LayerNorm, which first subtracts the mean; False: RMSNorm.
        out: (rows, parts * width) float32, each row contiguous, may be `x` itself; or (num_pieces, rows,
            width) bfloat16, to write the result as pieces (then there is one part).
        residual: (rows, parts * width) float32, added to the result; may be `out` itself.

    Returns:
        `out`.
    """
    width = x.shape[1] if weight is None else len(weight)
    num_pieces = len(out) if out.dtype == torch.bfloat16 else 0
    parts = x.shape[1] // width
    assert num_pieces == 0 or (parts == 1 and out.is_contiguous())
    if len(x):
        _norm_kernel[(len(x), parts)](
            x,
            x if weight is None else weight,
            x if bias is None else bias,
            x if residual is None else residual,
            out,
            x.stride(0),
            out.stride(-2),
            0 if residual is None else residual.stride(0),
            out.stride(0),
            width,
            epsilon,
            is_normed=weight is not None,
            is_centred=is_centred,
            has_bias=bias is not None,
            has_residual=residual is not None,
            num_pieces=num_pieces,
            block=triton.next_power_of_2(width),
            num_warps=4 if width <= 2048 else 8,
        )
    return out


@triton.jit
def _norm_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
    residual_stride: tl.tensor,
    piece_stride: tl.tensor,
    width: tl.tensor,
    epsilon: tl.tensor,
    is_normed: tl.constexpr,
    is_centred: tl.constexpr,
    has_bias: tl.constexpr,
    has_residual: tl.constexpr,
    num_pieces: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    mask = columns < width
    first = tl.program_id(1) * width
    numbers = tl.load(x + row * x_stride + first + columns, mask=mask, other=0.0)
    if is_normed:
        if is_centred:
            numbers = tl.where(mask, numbers - tl.sum(numbers) / width, 0.0)
        mean = tl.sum(numbers * numbers) / width
        numbers = tl.div_rn(numbers, tl.sqrt_rn(mean + epsilon)) * tl.load(
            weight + columns, mask=mask, other=0.0
        )
        if has_bias:
            numbers += tl.load(bias + columns, mask=mask, other=0.0)
    if has_residual:
        numbers += tl.load(residual + row * residual_stride + first + columns, mask=mask, other=0.0)
    offsets = row * out_stride + first + columns
    if num_pieces == 0:
        tl.store(out + offsets, numbers, mask=mask)
    else:
        store_pieces(out, offsets, mask, numbers, piece_stride, num_pieces)


def rotate_and_store(
    projected: Tensor,
    offsets: tuple[int, int, int],
    head_stride: int,
    rotary: tuple[Tensor, Tensor] | None,
    pool: tuple[Tensor, Tensor],
    slots: Tensor,
    query: Tensor,
    *,
    is_paired: bool = False,
    query_scales: Tensor | None = None,
) -> None:
    """Rotate queries and keys by their positions (Su et al. 2021), and store keys and values in their slots.

    Args:
        projected: (rows, queries + keys + values) float32, each row contiguous.
        offsets: offsets of the first query, key and value in a row.
        head_stride: number of elements from one head to the next.
        rotary: cosines and sines, (rows, pairs) float32, contiguous; None: no rotation.
        pool: keys and values, (num_slots, kv_heads, head_dim) float32 or bfloat16.
        slots: (rows,) int32; rows with slot -1 are padding and are not stored.
        query: (rows, heads, head_dim) float32, filled with the rotated queries.
        is_paired: a pair is two adjacent dimensions, as in GPT-J; False: dimension i of the first half and
            dimension i of the second, as in Llama.
        query_scales: (rows,) float32, by which the rotated queries are multiplied; None: not at all.
    """
    keys, values = pool
    num_rows, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    cosines, sines = (query, query) if rotary is None else rotary
    if num_rows:
        _rotary_kernel[(num_rows, heads + 2 * kv_heads)](
            projected,
            cosines,
            sines,
            query if query_scales is None else query_scales,
            query,
            keys,
            values,
            slots,
            projected.stride(0),
            *offsets,
            head_stride,
            heads,
            kv_heads,
            head_dim,
            0 if rotary is None else cosines.shape[1],
            is_paired=is_paired,
            has_scales=query_scales is not None,
            block=triton.next_power_of_2(head_dim),
            num_warps=1,
        )


@triton.jit
def _rotary_kernel(
    projected: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    scales: tl.tensor,
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    slots: tl.tensor,
    row_stride: tl.tensor,
    first_query: tl.tensor,
    first_key: tl.tensor,
    first_value: tl.tensor,
    head_stride: tl.tensor,
    heads: tl.tensor,
    kv_heads: tl.tensor,
    head_dim: tl.tensor,
    num_pairs: tl.tensor,
    is_paired: tl.constexpr,
    has_scales: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    columns = tl.arange(0, block)
    mask = columns < head_dim
    is_value = head >= heads + kv_heads
    is_query = head < heads
    own = tl.where(is_query, head, tl.where(is_value, head - heads - kv_heads, head - heads))
    first = tl.where(is_query, first_query, tl.where(is_value, first_value, first_key))
    base = projected + row * row_stride + first + own * head_stride
    numbers = tl.load(base + columns, mask=mask, other=0.0)
    if is_paired:
        pair = columns // 2
        partner = columns ^ 1
        is_first = columns % 2 == 0
    else:
        is_first = columns < num_pairs
        pair = tl.where(is_first, columns, columns - num_pairs)
        partner = tl.where(is_first, columns + num_pairs, columns - num_pairs)
    rotates = columns < tl.where(is_value, 0, 2 * num_pairs)
    others = tl.load(base + partner, mask=rotates, other=0.0)
    cosine = tl.load(cosines + row * num_pairs + pair, mask=rotates, other=1.0)
    sine = tl.load(sines + row * num_pairs + pair, mask=rotates, other=0.0)
    numbers = numbers * cosine + tl.where(is_first, -others, others) * sine
    if is_query:
        if has_scales:
            numbers *= tl.load(scales + row)
        tl.store(query + (row * heads + head) * head_dim + columns, numbers, mask=mask)
    else:
        slot = tl.load(slots + row).to(tl.int64)
        place = (slot * kv_heads + own) * head_dim + columns
        mask = columns < tl.where(slot >= 0, head_dim, 0)
        if is_value:
            tl.store(values + place, numbers.to(values.dtype.element_ty), mask=mask)
        else:
            tl.store(keys + place, numbers.to(keys.dtype.element_ty), mask=mask)


ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
GATE_BLOCK = 1024


def gate(x: Tensor, activation: str, out: Tensor, *, has_values: bool) -> Tensor:
    """Write activation(gates) * values, or activation(gates), to `out` as pieces; return `out`.

    Args:
        x: (rows, width) gates, or (rows, 2 * width) gates followed by values; float32, contiguous.
        activation: one of ACTIVATIONS.
        out: (num_pieces, rows, width) bfloat16, contiguous.
        has_values: True if `x` contains values.
    """
    num_pieces, num_rows, width = out.shape
    if num_rows:
        _gate_kernel[(num_rows, triton.cdiv(width, GATE_BLOCK))](
            x,
            out,
            x.stride(0),
            width,
            num_rows * width,
            activation=activation,
            has_values=has_values,
            num_pieces=num_pieces,
            block=GATE_BLOCK,
        )
    return out


@triton.jit
def tanh(x: tl.tensor) -> tl.tensor:
    """Return the hyperbolic tangent; near 0 its series is used, because the quotient loses precision."""
    square = x * x
    series = x * (
        1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835))))
    )
    quotient = 1.0 - 2.0 / (tl.exp(2.0 * tl.minimum(tl.maximum(x, -20.0), 20.0)) + 1.0)
    return tl.where(square < 0.04, series, quotient)


@triton.jit
def _gate_kernel(
    x: tl.tensor,
    out: tl.tensor,
    row_stride: tl.tensor,
    width: tl.tensor,
    piece_stride: tl.tensor,
    activation: tl.constexpr,
    has_values: tl.constexpr,
    num_pieces: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    mask = columns < width
    gates = tl.load(x + row * row_stride + columns, mask=mask, other=0.0)
    if activation == "silu":
        numbers = tl.div_rn(gates, 1.0 + tl.exp(-gates))
    elif activation == "gelu":
        numbers = 0.5 * gates * (1.0 + tl.erf(gates * 0.7071067811865476))
    elif activation == "gelu_tanh":
        numbers = 0.5 * gates * (1.0 + tanh(0.7978845608028654 * (gates + 0.044715 * gates * gates * gates)))
    else:
        numbers = tl.maximum(gates, 0.0)
        if activation == "relu2":
            numbers *= numbers
    if has_values:
        numbers *= tl.load(x + row * row_stride + width + columns, mask=mask, other=0.0)
    store_pieces(out, row * width + columns, mask, numbers, piece_stride, num_pieces)
