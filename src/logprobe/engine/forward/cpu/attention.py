"""Plans the attention of a step over the KV cache, and runs it with the CPU kernels.

Each span of tokens attends to its own context. Prompt chunks use matrix products; short spans (a generated
token with its drafts, or the end of a mostly cached prompt) run row by row. Both ways read the KV cache in
place, and a row's results have the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from logprobe.kernels.attention.api import RowPlan, RowPlanBuilder, ScoreRule, attend_rows
from logprobe.kernels.attention.chunk import attend_chunk

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from logprobe.engine.forward.kv_cache import KVPool
    from logprobe.engine.protocol import StepBatch
    from logprobe.kernels.arrays import Array

# Up to these sizes, the row kernel is faster (measurements in docs/dev/kernels.md).
FEW_ROWS = 4
FEW_SCORES = 4096


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows [start, end) of the packed tokens, which are the last tokens of the context in `slots`."""

    start: int
    end: int
    slots: Any  # (context length,) int64, an array; in a `TensorPlan` a tensor


@dataclass(slots=True)
class AttentionPlan:
    """The KV cache slots of a step's tokens, and the context that each token attends to."""

    pool: KVPool
    slots: Any  # (num_tokens,) int64, an array; in a `TensorPlan` a tensor
    chunks: list[Chunk]
    rows: RowPlan | None

    @property
    def longest_chunk(self) -> int:
        """Number of tokens in the longest context of a chunk; 0 without chunks."""
        return max((len(chunk.slots) for chunk in self.chunks), default=0)


def is_short(num_rows: int, context: int) -> bool:
    """Return True if the row kernel is to run the last `num_rows` tokens of a context of `context` tokens."""
    return num_rows <= FEW_ROWS or num_rows * context <= FEW_SCORES


def plan_attention(pool: KVPool, batch: StepBatch) -> AttentionPlan:
    """Return the attention plan of a step: short spans use the row kernel, all other spans become chunks.

    If the row kernel cannot read the KV cache, all spans become chunks.
    """
    chunks: list[Chunk] = []
    rows = RowPlanBuilder()
    bounds = batch.starts.tolist()
    for start, end, context in zip(bounds, bounds[1:], batch.context_slots, strict=False):
        if pool.is_readable_in_place and is_short(end - start, len(context)):
            rows.add(start, len(context) - (end - start), context)
        else:
            chunks.append(Chunk(start, end, context.astype(np.int64)))
    return AttentionPlan(pool, batch.slots.astype(np.int64), chunks, rows.build())


def all_attention_paths(pool: KVPool, prompts: Sequence[Array]) -> Iterator[tuple[list[int], AttentionPlan]]:
    """Yield plans that together run `prompts` through both kernels.

    The first plan runs whole prompts and fills the cache; the other plans run the prompts' second halves.

    Args:
        pool: the KV cache.
        prompts: for each prompt, the slots of its tokens, int64.

    Yields:
        For every prompt, the index of the first token that the plan runs; and the plan.
    """
    whole, halves = [0] * len(prompts), [len(slots) // 2 for slots in prompts]
    yield whole, chunked(pool, prompts, whole)
    yield halves, chunked(pool, prompts, halves)
    yield halves, by_rows(pool, prompts, halves)


def chunked(pool: KVPool, prompts: Sequence[Array], starts: Sequence[int]) -> AttentionPlan:
    """Return a plan that runs each prompt from its start as one chunk; see `all_attention_paths`."""
    chunks: list[Chunk] = []
    for slots, start in zip(prompts, starts, strict=True):
        first = chunks[-1].end if chunks else 0
        chunks.append(Chunk(first, first + len(slots) - start, slots))
    return AttentionPlan(pool, _packed(prompts, starts), chunks, None)


def by_rows(pool: KVPool, prompts: Sequence[Array], starts: Sequence[int]) -> AttentionPlan:
    """Return a plan that runs each prompt row by row, from its entry of `starts`.

    See `all_attention_paths`.
    """
    rows = RowPlanBuilder()
    first = 0
    for slots, start in zip(prompts, starts, strict=True):
        rows.add(first, start, slots.astype(np.int32))
        first += len(slots) - start
    return AttentionPlan(pool, _packed(prompts, starts), [], rows.build())


def _packed(prompts: Sequence[Array], starts: Sequence[int]) -> Array:
    return np.concatenate([slots[start:] for slots, start in zip(prompts, starts, strict=True)])


def attend(plan: AttentionPlan, layer: int, query: Array, rule: ScoreRule, out: Array) -> None:
    """Compute one layer's attention for the tokens in `plan`; their keys and values are already stored.

    Args:
        plan: the plan of the step.
        layer: index of the layer.
        query: (num_tokens, heads, key_dim).
        rule: how scores are computed.
        out: (num_tokens, heads, value_dim), to write the result to.
    """
    keys, values = plan.pool.keys[layer], plan.pool.values[layer]
    if plan.rows is not None:
        attend_rows(query, keys, values, plan.rows, out, rule)
    for chunk in plan.chunks:
        queries, attended = query[chunk.start : chunk.end], out[chunk.start : chunk.end]
        attend_chunk(queries, keys, values, chunk.slots, rule, attended)
