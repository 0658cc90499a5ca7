"""Attention over the key/value pool, as transformers' models call it.

transformers hands each layer's packed queries, keys and values to the function registered here. It
writes the keys and values to their slots, then lets every span of tokens attend to its own context:
prompt chunks on gathered slots, short spans (a generated token, the end of a mostly cached prompt) through
a kernel that reads the pool in place.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from logprobe.errors import UnsupportedModelError
from logprobe.kernels.attention.api import RowPlan, RowPlanBuilder, ScoreRule, attend_rows
from logprobe.kernels.attention.chunk import attend_chunk, can_attend_chunks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from logprobe.engine.forward.pool import KVPool
    from logprobe.engine.protocol import StepBatch

NAME = "logprobe"
# Below, the row kernel is the faster one (measured: docs/decisions.md).
FEW_ROWS = 4
FEW_SCORES = 4096


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows [start, end) of the packed tokens: the last tokens of the context in `slots`."""

    start: int
    end: int
    slots: torch.Tensor  # (context length,) int64

    @property
    def has_prefix(self) -> bool:
        """Whether some of the context was computed before this step."""
        return len(self.slots) > self.end - self.start


@dataclass(slots=True)
class AttentionPlan:
    """Where one step's tokens are stored and what each attends to."""

    pool: KVPool
    slots: torch.Tensor  # (num_tokens,) int64
    chunks: list[Chunk]
    rows: RowPlan | None
    uses_kernels: bool = False  # chunks go through our kernel; else through torch's fused attention
    rules: dict[int, ScoreRule] = field(default_factory=dict)  # as each layer's module stated them
    masks: dict[tuple[int, int | None], torch.Tensor] = field(default_factory=dict)

    def mask(self, index: int, window: int | None) -> torch.Tensor | None:
        """What the rows of chunk `index` may see, (rows, context) bool; None: plain causal attention."""
        chunk = self.chunks[index]
        context = len(chunk.slots)
        if window is None or context <= window:
            window = None
        if not chunk.has_prefix and window is None:
            return None
        key = (index, window)
        if key not in self.masks:
            rows = torch.arange(context - (chunk.end - chunk.start), context, device=self.slots.device)
            columns = torch.arange(context, device=self.slots.device)
            distance = rows[:, None] - columns[None, :]
            seen = distance >= 0
            self.masks[key] = seen if window is None else seen & (distance < window)
        return self.masks[key]


def is_short(num_rows: int, context: int) -> bool:
    """Whether the last `num_rows` tokens of a context are attended row by row."""
    return num_rows <= FEW_ROWS or num_rows * context <= FEW_SCORES


def plan_attention(
    pool: KVPool, batch: StepBatch, device: str, *, is_short: Callable[[int, int], bool] = is_short
) -> AttentionPlan:
    """Lay out one step: every span becomes a chunk, or rows of the row kernel where it is short."""
    chunks: list[Chunk] = []
    rows = RowPlanBuilder()
    is_readable = pool.is_readable_in_place
    uses_kernels = is_readable and can_attend_chunks()
    bounds = batch.starts.tolist()
    for start, end, context in zip(bounds, bounds[1:], batch.context_slots, strict=False):
        if is_readable and is_short(end - start, len(context)):
            rows.add(start, len(context) - (end - start), context)
        else:
            chunks.append(Chunk(start, end, _to_device(context, device)))
    slots = _to_device(batch.slots, device)
    return AttentionPlan(pool, slots, chunks, rows.build(), uses_kernels=uses_kernels)


def every_way(pool: KVPool, slots: torch.Tensor) -> Iterator[tuple[int, AttentionPlan]]:
    """Plans of one prompt in `slots`, by each way of attention that steps may take, with their first tokens.

    The first fills the pool, whole; those after it run the prompt again, or its last tokens.
    """
    whole = [Chunk(0, len(slots), slots)]
    yield 0, AttentionPlan(pool, slots, whole, None)
    if pool.is_readable_in_place:
        if can_attend_chunks():
            yield 0, AttentionPlan(pool, slots, whole, None, uses_kernels=True)
        start = len(slots) // 2
        rows = RowPlanBuilder()
        rows.add(0, start, slots.numpy().astype(np.int32))
        yield start, AttentionPlan(pool, slots[start:], [], rows.build())


def pooled_attention(
    module: Any,
    query: torch.Tensor,  # (1, heads, num_tokens, key_dim)
    key: torch.Tensor,  # (1, kv_heads, num_tokens, key_dim)
    value: torch.Tensor,  # (1, kv_heads, num_tokens, value_dim)
    attention_mask: torch.Tensor | None,  # noqa: ARG001 - the plan says who sees what
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Serve transformers' attention interface: (1, num_tokens, heads, value_dim) and no weights."""
    plan: AttentionPlan = options["logprobe_plan"]
    layer = module.layer_idx
    plan.pool.store(layer, plan.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
    plan.rules[layer] = _score_rule(query, options)
    return attend(plan, layer, query[0].transpose(0, 1), plan.rules[layer])[None], None


def attend(plan: AttentionPlan, layer: int, query: torch.Tensor, rule: ScoreRule) -> torch.Tensor:
    """Let a step's queries, (num_tokens, heads, key_dim), see the pool: (num_tokens, heads, value_dim)."""
    keys, values = plan.pool.keys[layer], plan.pool.values[layer]
    out = query.new_empty(*query.shape[:2], values.shape[2])
    if plan.rows is not None:
        attend_rows(query, keys, values, plan.rows, out, rule)
    for index, chunk in enumerate(plan.chunks):
        queries = query[chunk.start : chunk.end].transpose(0, 1)
        context_keys = keys.index_select(0, chunk.slots).transpose(0, 1)
        context_values = values.index_select(0, chunk.slots).transpose(0, 1)
        if plan.uses_kernels:
            attended = attend_chunk(queries, context_keys, context_values, rule)
        else:
            attended = _attend(queries, context_keys, context_values, plan.mask(index, rule.window), rule)
        out[chunk.start : chunk.end] = attended.transpose(0, 1)
    return out


def _score_rule(query: torch.Tensor, options: dict[str, Any]) -> ScoreRule:
    if options.get("s_aux") is not None:
        raise UnsupportedModelError("attention sinks are not supported; use a model without them")
    scale = options.get("scaling") or query.shape[3] ** -0.5
    return ScoreRule(scale, options.get("sliding_window"), options.get("softcap"))


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, rule: ScoreRule
) -> torch.Tensor:
    """The plain twin of `attend_chunk`, on any device and in any dtype: (heads, rows, value_dim)."""
    if rule.softcap is None:
        attended = functional.scaled_dot_product_attention(
            query[None], key[None], value[None],
            attn_mask=mask, is_causal=mask is None, scale=rule.scale, enable_gqa=True,
        )  # fmt: skip
        return attended[0]
    groups = query.shape[0] // key.shape[0]
    heads = [
        _attend_softcapped(rows, key[head // groups], value[head // groups], mask, rule)
        for head, rows in enumerate(query)
    ]
    return torch.stack(heads)


def _attend_softcapped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    rule: ScoreRule,
) -> torch.Tensor:
    """One head, scores squashed by softcap · tanh(score / softcap) (Gemma 2)."""
    assert rule.softcap is not None
    scores = torch.tanh((query @ key.T) * (rule.scale / rule.softcap)) * rule.softcap
    if mask is None:
        mask = torch.ones_like(scores, dtype=torch.bool).tril()
    return torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=-1) @ value


def _to_device(slots: np.ndarray[Any, Any], device: str) -> torch.Tensor:
    return torch.from_numpy(slots.astype(np.int64)).to(device)
