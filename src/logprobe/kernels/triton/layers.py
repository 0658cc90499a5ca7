"""Triton kernels for norms, rotary embedding, storing keys and values, and gated activations.

A kernel that uses a matrix product takes the product's parts and bias (`products.linear_parts`), and adds
them itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from logprobe.kernels.triton import launch
from logprobe.kernels.triton.launch import wait_for_inputs
from logprobe.kernels.triton.pieces import store_pieces
from logprobe.kernels.triton.products import sum_parts

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm (Zhang & Sennrich 2019) or LayerNorm (Ba et al. 2016)."""

    weight: Tensor  # (width,) float32
    bias: Tensor | None = None  # only for LayerNorm
    epsilon: float = 0.0  # added to the mean square or the variance
    is_centred: bool = False  # True: LayerNorm, which first subtracts the mean; False: RMSNorm


def norm(x: Tensor, layer: Norm | None, out: Tensor) -> Tensor:
    """Write the norm of each part of each row to `out`; return `out`.

    Args:
        x: (rows, parts * width) float32, each row contiguous.
        layer: the norm; None: do not normalize.
        out: (rows, parts * width) float32, each row contiguous, may be `x` itself; or (num_pieces, rows,
            width) bfloat16, contiguous, to write the result as pieces (then there is one part).
    """
    width = x.shape[1] if layer is None else len(layer.weight)
    parts = x.shape[1] // width
    if len(x):
        assert out.dtype != torch.bfloat16 or (parts == 1 and out.is_contiguous())
        _norm_kernel[(len(x), parts)](
            x,
            out,
            *_weights(layer, x),
            x.stride(0),
            out.stride(-2),
            out.stride(0),
            width,
            num_pieces=len(out) if out.dtype == torch.bfloat16 else 0,
            block=triton.next_power_of_2(width),
            num_warps=4 if width <= 2048 else 8,
            **_kind("own", layer),
            **launch.options(x.device),
        )
    return out


def add(
    parts: Tensor,
    bias: Tensor | None,
    hidden: Tensor,
    *,
    factor: float = 1.0,
    after: Norm | None = None,
    following: Norm | None = None,
    out: Tensor | None = None,
) -> None:
    """Add a matrix product to the hidden states, in place, and normalize them for the next layer.

    Args:
        parts: (parts, rows, width) float32, contiguous: the product.
        bias: (width,) float32 of the product.
        hidden: (rows, width) float32, contiguous.
        factor: multiplies the sum of product and bias.
        after: norm of the product before it is added; None: do not normalize it.
        following: norm of the new hidden states; None: do not normalize them.
        out: (num_pieces, rows, width) bfloat16, contiguous, filled with the new hidden states after the norm
            `following`; None: nothing is written.
    """
    num_parts, num_rows, width = parts.shape
    if num_rows:
        _add_kernel[(num_rows,)](
            parts,
            parts if bias is None else bias,
            hidden,
            hidden if out is None else out,
            *_weights(after, parts),
            *_weights(following, parts),
            width,
            num_rows * width,
            factor,
            has_bias=bias is not None,
            num_parts=num_parts,
            num_pieces=0 if out is None else len(out),
            block=triton.next_power_of_2(width),
            num_warps=8 if width <= 2048 else 16,
            enable_fp_fusion=False,  # as separate kernels would round
            **_kind("after", after),
            **_kind("following", following),
            **launch.options(parts.device),
        )


def _weights(layer: Norm | None, unused: Tensor) -> tuple[Tensor, Tensor, float]:
    """Return the arguments of a norm for a kernel; `unused` takes the place of a missing tensor."""
    if layer is None:
        return unused, unused, 0.0
    return layer.weight, unused if layer.bias is None else layer.bias, layer.epsilon


def _kind(name: str, layer: Norm | None) -> dict[str, Any]:
    """Return the kind of a norm as a kernel's compile-time argument `name`.

    0: no norm; 1: RMSNorm; 2: LayerNorm without bias; 3: LayerNorm with bias.
    """
    if layer is None or not layer.is_centred:
        return {name: int(layer is not None)}
    return {name: 2 if layer.bias is None else 3}


@triton.jit
def _normed(
    numbers: tl.tensor, columns: tl.tensor, mask: tl.tensor, weight: tl.tensor, bias: tl.tensor,
    epsilon: tl.tensor, width: tl.tensor, kind: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the norm of one row, whose numbers outside `mask` are 0."""
    if kind > 1:
        numbers = tl.where(mask, numbers - tl.sum(numbers) / width, 0.0)
    if kind > 0:
        mean = tl.sum(numbers * numbers) / width
        numbers = tl.div_rn(numbers, tl.sqrt_rn(mean + epsilon)) * tl.load(
            weight + columns, mask=mask, other=0.0
        )
    if kind == 3:
        numbers += tl.load(bias + columns, mask=mask, other=0.0)
    return numbers


@triton.jit
def _norm_kernel(
    x: tl.tensor,
    out: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    epsilon: tl.tensor,
    x_stride: tl.tensor,
    out_stride: tl.tensor,
    piece_stride: tl.tensor,
    width: tl.tensor,
    own: tl.constexpr,
    num_pieces: tl.constexpr,
    block: tl.constexpr,
    is_early: tl.constexpr,
) -> None:
    wait_for_inputs(is_early)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, block)
    mask = columns < width
    first = tl.program_id(1) * width
    numbers = tl.load(x + row * x_stride + first + columns, mask=mask, other=0.0)
    numbers = _normed(numbers, columns, mask, weight, bias, epsilon, width, own)
    offsets = row * out_stride + first + columns
    if num_pieces == 0:
        tl.store(out + offsets, numbers, mask=mask)
    else:
        store_pieces(out, offsets, mask, numbers, piece_stride, num_pieces)


@triton.jit
def _add_kernel(
    parts: tl.tensor,
    bias: tl.tensor,
    hidden: tl.tensor,
    out: tl.tensor,
    after_weight: tl.tensor,
    after_bias: tl.tensor,
    after_epsilon: tl.tensor,
    following_weight: tl.tensor,
    following_bias: tl.tensor,
    following_epsilon: tl.tensor,
    width: tl.tensor,
    stride: tl.tensor,
    factor: tl.tensor,
    has_bias: tl.constexpr,
    num_parts: tl.constexpr,
    after: tl.constexpr,
    following: tl.constexpr,
    num_pieces: tl.constexpr,
    block: tl.constexpr,
    is_early: tl.constexpr,
) -> None:
    wait_for_inputs(is_early)
    columns = tl.arange(0, block)
    mask = columns < width
    offsets = tl.program_id(0).to(tl.int64) * width + columns
    numbers = sum_parts(parts, stride, offsets, mask, num_parts)
    if has_bias:
        numbers += tl.load(bias + columns, mask=mask, other=0.0)
    numbers *= factor
    numbers = _normed(numbers, columns, mask, after_weight, after_bias, after_epsilon, width, after)
    numbers += tl.load(hidden + offsets, mask=mask, other=0.0)
    tl.store(hidden + offsets, numbers, mask=mask)
    if num_pieces > 0:
        numbers = _normed(
            numbers, columns, mask, following_weight, following_bias, following_epsilon, width, following
        )
        store_pieces(out, offsets, mask, numbers, stride, num_pieces)


def rotate_and_store(
    parts: Tensor,
    bias: Tensor | None,
    offsets: tuple[int, int, int],
    head_stride: int,
    rotary: tuple[Tensor, Tensor] | None,
    pool: tuple[Tensor, Tensor],
    slots: Tensor,
    query: Tensor,
    *,
    norms: tuple[Norm | None, Norm | None] = (None, None),
    is_paired: bool = False,
    query_scales: Tensor | None = None,
) -> None:
    """Rotate queries and keys by their positions (Su et al. 2021), and store keys and values in their slots.

    Args:
        parts: (parts, rows, queries + keys + values) float32, contiguous: a matrix product.
        bias: (queries + keys + values,) float32 of the product.
        offsets: offsets of the first query, key and value in a row.
        head_stride: number of elements from one head to the next.
        rotary: cosines and sines, (rows, pairs) float32, contiguous; None: no rotation.
        pool: keys and values, (num_slots, kv_heads, head_dim) float32 or bfloat16.
        slots: (rows,) int32; rows with slot -1 are padding and are not stored.
        query: (rows, heads, head_dim) float32, filled with the rotated queries.
        norms: norms of each head's query and key, applied before the rotation; both or neither, of the same
            kind.
        is_paired: a pair is two adjacent dimensions, as in GPT-J; False: dimension i of the first half and
            dimension i of the second, as in Llama.
        query_scales: (rows,) float32, by which the rotated queries are multiplied; None: not at all.
    """
    keys, values = pool
    num_rows, heads, head_dim = query.shape
    kv_heads = keys.shape[1]
    cosines, sines = (query, query) if rotary is None else rotary
    query_norm, key_norm = norms
    assert _kind("", query_norm) == _kind("", key_norm)
    if num_rows:
        _rotary_kernel[(num_rows, heads + 2 * kv_heads)](
            parts,
            parts if bias is None else bias,
            cosines,
            sines,
            query if query_scales is None else query_scales,
            query,
            keys,
            values,
            slots,
            *_weights(query_norm, parts),
            *_weights(key_norm, parts),
            parts.stride(1),
            parts.stride(0),
            *offsets,
            head_stride,
            heads,
            kv_heads,
            head_dim,
            0 if rotary is None else cosines.shape[1],
            num_parts=len(parts),
            has_bias=bias is not None,
            is_paired=is_paired,
            has_scales=query_scales is not None,
            block=triton.next_power_of_2(head_dim),
            num_warps=1,
            **_kind("head_norm", query_norm),
            **launch.options(parts.device),
        )


@triton.jit
def _rotary_kernel(
    parts: tl.tensor,
    bias: tl.tensor,
    cosines: tl.tensor,
    sines: tl.tensor,
    scales: tl.tensor,
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    slots: tl.tensor,
    query_weight: tl.tensor,
    query_bias: tl.tensor,
    query_epsilon: tl.tensor,
    key_weight: tl.tensor,
    key_bias: tl.tensor,
    key_epsilon: tl.tensor,
    row_stride: tl.tensor,
    part_stride: tl.tensor,
    first_query: tl.tensor,
    first_key: tl.tensor,
    first_value: tl.tensor,
    head_stride: tl.tensor,
    heads: tl.tensor,
    kv_heads: tl.tensor,
    head_dim: tl.tensor,
    num_pairs: tl.tensor,
    num_parts: tl.constexpr,
    has_bias: tl.constexpr,
    head_norm: tl.constexpr,
    is_paired: tl.constexpr,
    has_scales: tl.constexpr,
    block: tl.constexpr,
    is_early: tl.constexpr,
) -> None:
    wait_for_inputs(is_early)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    columns = tl.arange(0, block)
    mask = columns < head_dim
    is_value = head >= heads + kv_heads
    is_query = head < heads
    own = tl.where(is_query, head, tl.where(is_value, head - heads - kv_heads, head - heads))
    first = tl.where(is_query, first_query, tl.where(is_value, first_value, first_key)) + own * head_stride
    if is_paired:
        pair = columns // 2
        partner = columns ^ 1
        is_first = columns % 2 == 0
    else:
        is_first = columns < num_pairs
        pair = tl.where(is_first, columns, columns - num_pairs)
        partner = tl.where(is_first, columns + num_pairs, columns - num_pairs)
    rotates = columns < tl.where(is_value, 0, 2 * num_pairs)
    base = row * row_stride + first
    numbers = sum_parts(parts, part_stride, base + columns, mask, num_parts)
    others = sum_parts(parts, part_stride, base + partner, rotates, num_parts)
    if has_bias:
        numbers += tl.load(bias + first + columns, mask=mask, other=0.0)
        others += tl.load(bias + first + partner, mask=rotates, other=0.0)
    if head_norm > 0:
        weight = tl.where(is_query, query_weight, key_weight)
        epsilon = tl.where(is_query, query_epsilon, key_epsilon)
        centred, other_centred = numbers, others
        if head_norm > 1:
            mean = tl.sum(numbers) / head_dim
            centred = tl.where(mask, numbers - mean, 0.0)
            other_centred = others - mean
        root = tl.sqrt_rn(tl.sum(centred * centred) / head_dim + epsilon)
        normed = tl.div_rn(centred, root) * tl.load(weight + columns, mask=mask, other=0.0)
        other_normed = tl.div_rn(other_centred, root) * tl.load(weight + partner, mask=rotates, other=0.0)
        if head_norm == 3:
            shift = tl.where(is_query, query_bias, key_bias)
            normed += tl.load(shift + columns, mask=mask, other=0.0)
            other_normed += tl.load(shift + partner, mask=rotates, other=0.0)
        numbers = tl.where(is_value, numbers, normed)
        others = tl.where(is_value, others, other_normed)
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


def gate(parts: Tensor, bias: Tensor | None, activation: str, out: Tensor, *, has_values: bool) -> Tensor:
    """Compute activation(gates) * values, or activation(gates), and write it to `out`; return `out`.

    Args:
        parts: (parts, rows, width) gates, or (parts, rows, 2 * width) gates followed by values, float32,
            contiguous; the sum over the first axis is a matrix product (see `linear_parts`).
        bias: (width,) or (2 * width,) float32 of the product.
        activation: one of ACTIVATIONS.
        out: (num_pieces, rows, width) bfloat16, contiguous: pieces of float32 numbers (see `pieces.py`).
        has_values: True if `parts` contains values.
    """
    num_pieces, num_rows, width = out.shape
    if num_rows:
        _gate_kernel[(num_rows, triton.cdiv(width, GATE_BLOCK))](
            parts,
            parts if bias is None else bias,
            out,
            parts.stride(1),
            parts.stride(0),
            width,
            num_rows * width,
            activation=activation,
            has_bias=bias is not None,
            has_values=has_values,
            num_parts=len(parts),
            num_pieces=num_pieces,
            block=GATE_BLOCK,
            **launch.options(parts.device),
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
    parts: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    row_stride: tl.tensor,
    part_stride: tl.tensor,
    width: tl.tensor,
    piece_stride: tl.tensor,
    activation: tl.constexpr,
    has_bias: tl.constexpr,
    has_values: tl.constexpr,
    num_parts: tl.constexpr,
    num_pieces: tl.constexpr,
    block: tl.constexpr,
    is_early: tl.constexpr,
) -> None:
    wait_for_inputs(is_early)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    mask = columns < width
    places = row * row_stride + columns
    gates = sum_parts(parts, part_stride, places, mask, num_parts)
    if has_bias:
        gates += tl.load(bias + columns, mask=mask, other=0.0)
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
        values = sum_parts(parts, part_stride, places + width, mask, num_parts)
        if has_bias:
            values += tl.load(bias + width + columns, mask=mask, other=0.0)
        numbers *= values
    store_pieces(out, row * width + columns, mask, numbers, piece_stride, num_pieces)
