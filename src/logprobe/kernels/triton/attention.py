"""Attention over a paged cache of keys and values, for decode steps and prompt chunks alike.

A tile holds the query heads that share a key/value head, for one or several tokens of a text. The keys of a
text are split by position into blocks of `block_keys` keys; SEGMENT_BLOCKS consecutive blocks are a segment.
Each block has its own softmax. The results of a segment's blocks are merged in order (online softmax, Dao et
al. 2022), then those of the segments. A decode step may have too few tiles to fill a GPU. Then each block or
each segment runs as a separate program, and a second kernel merges the results; for a prompt chunk, one
program does all of this. Tensor cores add over the keys in an order that does not depend on the shape of a
tile, so all cases give the same bits. Operands are float32; each product is computed as three TF32 products.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

from logprobe.kernels.triton import launch
from logprobe.kernels.triton.launch import wait_for_inputs
from logprobe.kernels.triton.layers import tanh
from logprobe.kernels.triton.pieces import store_pieces

if TYPE_CHECKING:
    from torch import Tensor

    from logprobe.kernels.attention.api import ScoreRule

SEGMENT_BLOCKS: Final = 16  # blocks in a segment
ENOUGH_PROGRAMS: Final = 256  # about two per multiprocessor, as many as run at a time
MAX_BLOCKS: Final = 64  # up to this many blocks of a context, each may be a separate program
NO_WINDOW: Final = 1 << 30
DECODE_ROWS: Final = 16  # rows of a tile: tokens times query heads per key/value head
CHUNK_ROWS: Final = 32
MAX_PARTIAL_BYTES: Final = 1 << 30  # maximum size of the partial results of segments
NUM_WARPS: Final = 4
DECODE_STAGES: Final = 3  # keys and values of the next blocks are read ahead
CHUNK_STAGES: Final = 1
SUMS: Final = tl.constexpr(16)  # minimum number of columns in a `tl.dot`
MERGE_STAGES: Final = tl.constexpr(4)  # partial results are read ahead


@dataclass(frozen=True, slots=True)
class Tiles:
    """Query tokens, grouped into tiles; a tile holds consecutive tokens of one text."""

    tokens: Tensor  # (tiles,) int32, row of the first token in the step
    counts: Tensor  # (tiles,) int32, number of tokens
    begins: Tensor  # (tiles,) int32, start of the context in `slots`
    lengths: Tensor  # (tiles,) int32, number of keys that the first token attends to
    slots: Tensor  # int32, slots of all contexts, concatenated
    max_tokens: int  # maximum number of tokens per tile
    max_keys: int  # keys of the longest context, if few programs are expected; 0: one program for each tile


def tile_tokens(heads: int, kv_heads: int, *, is_decode: bool) -> int:
    """Return the maximum number of tokens per tile."""
    return max(1, (DECODE_ROWS if is_decode else CHUNK_ROWS) // (heads // kv_heads))


def block_keys(head_dim: int) -> int:
    """Return the number of keys per block."""
    return 64 if head_dim <= 128 else 32


def attend(query: Tensor, pool: tuple[Tensor, Tensor], tiles: Tiles, rule: ScoreRule, out: Tensor) -> None:
    """Write the attention output of the tokens in `tiles` to `out`, as pieces.

    Args:
        query: (tokens, heads, head_dim) float32, contiguous.
        pool: keys and values, (num_slots, kv_heads, head_dim) float32 or bfloat16.
        tiles: the tokens and their contexts.
        rule: scale, window and soft cap of the scores.
        out: (num_pieces, tokens, heads * head_dim) bfloat16, contiguous; rows of other tokens are not
            changed.
    """
    keys, values = pool
    num_tiles = len(tiles.tokens)
    if num_tiles == 0:
        return
    heads, head_dim = query.shape[1:]
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    block_rows = max(16, triton.next_power_of_2(group * tiles.max_tokens))
    block_dim = max(16, triton.next_power_of_2(head_dim))
    num_parts, part_blocks = _split(tiles, kv_heads, block_keys(block_dim))
    if 4 * num_tiles * kv_heads * num_parts * block_rows * block_dim > MAX_PARTIAL_BYTES:
        num_parts = 1  # so many tiles fill the GPU by themselves
    partial = sums = out
    if num_parts > 1:
        places = num_tiles * kv_heads * num_parts * block_rows
        partial = torch.empty(places, block_dim, dtype=torch.float32, device=query.device)
        sums = torch.empty(2, places, dtype=torch.float32, device=query.device)
    sizes = {
        "group": group,
        "num_pieces": len(out),
        "block_rows": block_rows,
        "block_dim": block_dim,
        "block_keys": block_keys(block_dim),
        "segment_blocks": SEGMENT_BLOCKS,
        "num_warps": NUM_WARPS,
        "enable_fp_fusion": False,
        **launch.options(query.device),
    }
    window = NO_WINDOW if rule.window is None else rule.window
    shape = (kv_heads, head_dim, heads * head_dim, out.stride(0))
    _attention_kernel[(num_tiles, kv_heads, num_parts)](
        query,
        keys,
        values,
        tiles.tokens,
        tiles.counts,
        tiles.begins,
        tiles.lengths,
        tiles.slots,
        out,
        partial,
        sums,
        rule.scale,
        0.0 if rule.softcap is None else rule.softcap,
        window,
        part_blocks,
        *shape,
        has_softcap=rule.softcap is not None,
        is_split=num_parts > 1,
        num_stages=DECODE_STAGES if tiles.max_keys else CHUNK_STAGES,
        **sizes,
    )
    if num_parts > 1:
        _merge_kernel[(num_tiles, kv_heads)](
            tiles.tokens,
            tiles.counts,
            tiles.lengths,
            out,
            partial,
            sums,
            window,
            num_parts,
            part_blocks,
            *shape,
            **sizes,
        )


def _split(tiles: Tiles, kv_heads: int, keys: int) -> tuple[int, int]:
    """Return how many programs compute a tile, and how many blocks of `keys` keys each of them computes.

    A program computes one block or one segment: other numbers of blocks would be merged in another order.
    """
    num_blocks = max(1, triton.cdiv(tiles.max_keys, keys))
    num_segments = triton.cdiv(num_blocks, SEGMENT_BLOCKS)
    is_enough = len(tiles.tokens) * kv_heads * num_segments >= ENOUGH_PROGRAMS
    if is_enough or num_blocks > MAX_BLOCKS:
        return num_segments, SEGMENT_BLOCKS
    return num_blocks, 1


@triton.jit
def _merge(
    greatest: tl.tensor, total: tl.tensor, rows: tl.tensor, own_greatest: tl.tensor, own_total: tl.tensor,
    own_rows: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Merge the results of a block or segment (`own_...`) into those of the blocks or segments before it.

    Each result is the greatest score, the sum of exponentials, and the sum of weighted values, per row.
    """
    highest = tl.maximum(greatest, own_greatest)
    reference = tl.where(highest == float("-inf"), 0.0, highest)
    factor = tl.exp(greatest - reference)
    own_factor = tl.exp(own_greatest - reference)
    total = total * factor + own_total * own_factor
    rows = rows * factor[:, None] + own_rows * own_factor[:, None]
    return highest, total, rows


@triton.jit
def _store_rows(
    out: tl.tensor, total: tl.tensor, rows: tl.tensor, token: tl.tensor, head: tl.tensor, is_row: tl.tensor,
    head_dim: tl.tensor, width: tl.tensor, piece_stride: tl.tensor, num_pieces: tl.constexpr,
    block_dim: tl.constexpr,
) -> None:  # fmt: skip
    columns = tl.arange(0, block_dim)
    offsets = token.to(tl.int64)[:, None] * width + head[:, None] * head_dim + columns[None, :]
    mask = is_row[:, None] & (columns < head_dim)[None, :]
    store_pieces(out, offsets, mask, tl.div_rn(rows, total[:, None]), piece_stride, num_pieces)


@triton.jit
def _attention_kernel(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    tokens: tl.tensor,
    counts: tl.tensor,
    begins: tl.tensor,
    lengths: tl.tensor,
    slots: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    sums: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    part_blocks: tl.tensor,
    kv_heads: tl.tensor,
    head_dim: tl.tensor,
    width: tl.tensor,
    piece_stride: tl.tensor,
    has_softcap: tl.constexpr,
    is_split: tl.constexpr,
    group: tl.constexpr,
    num_pieces: tl.constexpr,
    block_rows: tl.constexpr,
    block_keys: tl.constexpr,
    block_dim: tl.constexpr,
    segment_blocks: tl.constexpr,
    is_early: tl.constexpr,
) -> None:
    wait_for_inputs(is_early)
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    places = tl.arange(0, block_rows)
    columns = tl.arange(0, block_dim)
    is_column = columns < head_dim
    count = tl.load(counts + tile)
    length = tl.load(lengths + tile)
    begin = tl.load(begins + tile)
    is_row = places < count * group
    token = tl.load(tokens + tile) + places // group
    head = kv_head * group + places % group
    seen = length + places // group  # number of keys that each row attends to
    row_mask = is_row[:, None] & is_column[None, :]
    queries = tl.load(
        query + token.to(tl.int64)[:, None] * width + head[:, None] * head_dim + columns[None, :],
        mask=row_mask,
        other=0.0,
    )
    end = length + count - 1
    first = tl.maximum(length - window, 0) // block_keys
    last = tl.cdiv(end, block_keys)
    if is_split:
        first = tl.maximum(first, tl.program_id(2) * part_blocks)
        last = tl.minimum(last, (tl.program_id(2) + 1) * part_blocks)
    greatest = tl.full([block_rows], float("-inf"), tl.float32)
    total = tl.zeros([block_rows], tl.float32)
    rows = tl.zeros([block_rows, block_dim], tl.float32)
    ones = tl.full([block_keys, SUMS], 1.0, tl.float32)
    for segment in range(first // segment_blocks, tl.cdiv(last, segment_blocks)):
        own_greatest = tl.full([block_rows], float("-inf"), tl.float32)
        own_total = tl.zeros([block_rows], tl.float32)
        own_rows = tl.zeros([block_rows, block_dim], tl.float32)
        first_block = tl.maximum(first, segment * segment_blocks)
        for block in range(first_block, tl.minimum(last, (segment + 1) * segment_blocks)):
            positions = block * block_keys + tl.arange(0, block_keys)
            is_key = positions < end
            slot = tl.load(slots + begin + positions, mask=is_key, other=0).to(tl.int64)
            key_places = (slot[:, None] * kv_heads + kv_head) * head_dim + columns[None, :]
            key_mask = is_key[:, None] & is_column[None, :]
            key = tl.load(keys + key_places, mask=key_mask, other=0.0).to(tl.float32)
            value = tl.load(values + key_places, mask=key_mask, other=0.0).to(tl.float32)
            scores = tl.dot(queries, tl.trans(key), input_precision="tf32x3") * scale
            if has_softcap:
                scores = tanh(scores / softcap) * softcap
            is_seen = (positions[None, :] < seen[:, None]) & (positions[None, :] >= seen[:, None] - window)
            scores = tl.where(is_seen, scores, float("-inf"))
            highest = tl.max(scores, 1)
            weights = tl.exp(scores - tl.where(highest == float("-inf"), 0.0, highest)[:, None])
            own_greatest, own_total, own_rows = _merge(
                own_greatest,
                own_total,
                own_rows,
                highest,
                tl.max(tl.dot(weights, ones, input_precision="tf32x3"), 1),
                tl.dot(weights, value, input_precision="tf32x3"),
            )
        greatest, total, rows = _merge(greatest, total, rows, own_greatest, own_total, own_rows)
    if is_split:
        part = tl.program_id(2)
        place = _part_places(tile, kv_head, part, kv_heads, tl.num_programs(2), places, block_rows)
        num_places = tl.num_programs(0).to(tl.int64) * kv_heads * tl.num_programs(2) * block_rows
        is_stored = places < tl.where(first < last, count * group, 0)
        tl.store(sums + place, greatest, mask=is_stored)
        tl.store(sums + num_places + place, total, mask=is_stored)
        tl.store(
            partial + place[:, None] * block_dim + columns[None, :],
            rows,
            mask=is_stored[:, None] & is_column[None, :],
        )
    else:
        _store_rows(
            out, total, rows, token, head, is_row, head_dim, width, piece_stride, num_pieces, block_dim
        )


@triton.jit
def _part_places(
    tile: tl.tensor, kv_head: tl.tensor, part: tl.tensor, kv_heads: tl.tensor, num_parts: tl.tensor,
    places: tl.tensor, block_rows: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the places of a tile's rows among the partial results."""
    return ((tile * kv_heads + kv_head) * num_parts + part).to(tl.int64) * block_rows + places


@triton.jit
def _merge_kernel(
    tokens: tl.tensor,
    counts: tl.tensor,
    lengths: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    sums: tl.tensor,
    window: tl.tensor,
    num_parts: tl.tensor,
    part_blocks: tl.tensor,
    kv_heads: tl.tensor,
    head_dim: tl.tensor,
    width: tl.tensor,
    piece_stride: tl.tensor,
    group: tl.constexpr,
    num_pieces: tl.constexpr,
    block_rows: tl.constexpr,
    block_keys: tl.constexpr,
    block_dim: tl.constexpr,
    segment_blocks: tl.constexpr,
    is_early: tl.constexpr,
) -> None:
    wait_for_inputs(is_early)
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    places = tl.arange(0, block_rows)
    columns = tl.arange(0, block_dim)
    count = tl.load(counts + tile)
    length = tl.load(lengths + tile)
    is_row = places < count * group
    mask = is_row[:, None] & (columns < head_dim)[None, :]
    num_places = tl.num_programs(0).to(tl.int64) * kv_heads * num_parts * block_rows
    first = tl.maximum(length - window, 0) // block_keys // part_blocks
    last = tl.cdiv(tl.cdiv(length + count - 1, block_keys), part_blocks)
    segment_parts = segment_blocks // part_blocks
    greatest = tl.full([block_rows], float("-inf"), tl.float32)
    total = tl.zeros([block_rows], tl.float32)
    rows = tl.zeros([block_rows, block_dim], tl.float32)
    for segment in range(first // segment_parts, tl.cdiv(last, segment_parts)):
        own_greatest = tl.full([block_rows], float("-inf"), tl.float32)
        own_total = tl.zeros([block_rows], tl.float32)
        own_rows = tl.zeros([block_rows, block_dim], tl.float32)
        first_part = tl.maximum(first, segment * segment_parts)
        for part in tl.range(
            first_part, tl.minimum(last, (segment + 1) * segment_parts), num_stages=MERGE_STAGES
        ):
            place = _part_places(tile, kv_head, part, kv_heads, num_parts, places, block_rows)
            part_greatest = tl.load(sums + place, mask=is_row, other=0.0)
            part_total = tl.load(sums + num_places + place, mask=is_row, other=1.0)
            part_rows = tl.load(partial + place[:, None] * block_dim + columns[None, :], mask=mask, other=0.0)
            own_greatest, own_total, own_rows = _merge(
                own_greatest, own_total, own_rows, part_greatest, part_total, part_rows
            )
        greatest, total, rows = _merge(greatest, total, rows, own_greatest, own_total, own_rows)
    token = tl.load(tokens + tile) + places // group
    head = kv_head * group + places % group
    _store_rows(out, total, rows, token, head, is_row, head_dim, width, piece_stride, num_pieces, block_dim)
