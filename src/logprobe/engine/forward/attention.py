"""Attention over the KV cache, also registered as an attention implementation of transformers.

transformers passes each layer's packed queries, keys and values to `pooled_attention`. It writes keys and
values to their slots, then each span of tokens attends to its own context: prompt chunks by matrix products,
short spans (a generated token with its draft tokens, the end of a mostly cached prompt) row by row. On CPUs
with native kernels, both read the KV cache in place, and give the same bits for a row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from logprobe.errors import UnsupportedModelError
from logprobe.kernels.attention.api import RowPlan, RowPlanBuilder, ScoreRule, attend_rows
from logprobe.kernels.attention.chunk import attend_chunk

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from logprobe.engine.forward.kv_cache import KVPool
    from logprobe.engine.protocol import StepBatch

NAME = "logprobe"
# Tensor options of the interface that are allowed: `score_rule` applies `scaling` and `s_aux`; the others do
# not change scores (the queries are already rotated by position).
KNOWN_OPTIONS = {
    "scaling",
    "s_aux",
    "position_ids",
    "cache_position",
    "position_embeddings",
    "output_router_logits",
}
# Up to these sizes, the row kernel is faster (measured: docs/dev/kernels.md).
FEW_ROWS = 4
FEW_SCORES = 4096


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows [start, end) of the packed tokens; they are the last tokens of the context in `slots`."""

    start: int
    end: int
    slots: torch.Tensor  # (context length,) int64

    @property
    def has_prefix(self) -> bool:
        """True if part of the context was computed before this step."""
        return len(self.slots) > self.end - self.start


@dataclass(slots=True)
class AttentionPlan:
    """The KV slots of a step's tokens, and the context that each attends to."""

    pool: KVPool
    slots: torch.Tensor  # (num_tokens,) int64
    chunks: list[Chunk]
    rows: RowPlan | None
    uses_kernels: bool = False  # run chunks by `attend_chunk`; else by torch operations
    masks: dict[tuple[int, int | None], torch.Tensor] = field(default_factory=dict)

    @property
    def longest_chunk(self) -> int:
        """Tokens in the longest context of a chunk; 0 without chunks."""
        return max((len(chunk.slots) for chunk in self.chunks), default=0)

    def mask(self, index: int, window: int | None) -> torch.Tensor | None:
        """Return the mask of chunk `index`, (rows, context) bool, True = visible; None: plain causal mask."""
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
            self.masks[key] = sees(rows[:, None], columns[None, :], window)
        return self.masks[key]


def sees(row: torch.Tensor, column: torch.Tensor, window: int | None) -> torch.Tensor:
    """Return True where the token at index `row` attends to the one at `column`; both broadcast.

    `window` counts the visible tokens, the token itself included; None: no sliding window.
    """
    distance = row - column
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


@dataclass(slots=True)
class CurrentStep:
    """State of the running step, shared by all modules of a transformers model.

    It is an attribute of the modules because some families do not pass keyword arguments on to attention.
    """

    plan: AttentionPlan | None = None
    is_long: bool = False  # tokens use the long rotary frequencies
    windows: dict[int, int | None] = field(default_factory=dict)  # by layer, read from the model's masks
    rules: dict[int, ScoreRule] = field(default_factory=dict)  # by layer, from its attention call at load
    key_dims: dict[int, int] = field(default_factory=dict)  # by layer, from its attention call at load
    masks: dict[int, torch.Tensor | None] = field(default_factory=dict)  # by layer, only while rules are read

    def reach(self, model: torch.nn.Module) -> None:
        """Set this object as attribute `logprobe_step` of every module of `model`."""
        for module in model.modules():
            module.logprobe_step = self  # type: ignore[assignment]


def is_short(num_rows: int, context: int) -> bool:
    """Return True if the row kernel runs the last `num_rows` tokens of `context` tokens."""
    return num_rows <= FEW_ROWS or num_rows * context <= FEW_SCORES


def plan_attention(pool: KVPool, batch: StepBatch, device: str) -> AttentionPlan:
    """Return the plan of a step: short spans use the row kernel if it reads the cache; others are chunks."""
    chunks: list[Chunk] = []
    rows = RowPlanBuilder()
    is_readable = pool.is_readable_in_place
    bounds = batch.starts.tolist()
    for start, end, context in zip(bounds, bounds[1:], batch.context_slots, strict=False):
        if is_readable and is_short(end - start, len(context)):
            rows.add(start, len(context) - (end - start), context)
        else:
            chunks.append(Chunk(start, end, _to_device(context, device)))
    slots = _to_device(batch.slots, device)
    uses_kernels = bool(chunks) and is_readable
    return AttentionPlan(pool, slots, chunks, rows.build(), uses_kernels=uses_kernels)


def all_attention_paths(
    pool: KVPool, prompts: Sequence[torch.Tensor]
) -> Iterator[tuple[list[int], AttentionPlan]]:
    """Yield plans that run `prompts`, each given by its slots, through each attention path.

    The first plan runs whole prompts and fills the cache; the others run whole prompts or their second
    halves. Each plan comes with the index of the first token of each prompt that it runs.
    """
    whole, halves = [0] * len(prompts), [len(slots) // 2 for slots in prompts]
    yield whole, _chunked(pool, prompts, whole, uses_kernels=False)
    yield halves, _chunked(pool, prompts, halves, uses_kernels=False)
    if pool.is_readable_in_place:
        yield whole, _chunked(pool, prompts, whole, uses_kernels=True)
        rows = RowPlanBuilder()
        first = 0
        for slots, start in zip(prompts, halves, strict=True):
            rows.add(first, start, slots.numpy().astype(np.int32))
            first += len(slots) - start
        yield halves, AttentionPlan(pool, _packed(prompts, halves), [], rows.build())


def _chunked(
    pool: KVPool, prompts: Sequence[torch.Tensor], starts: Sequence[int], *, uses_kernels: bool
) -> AttentionPlan:
    chunks: list[Chunk] = []
    for slots, start in zip(prompts, starts, strict=True):
        first = chunks[-1].end if chunks else 0
        chunks.append(Chunk(first, first + len(slots) - start, slots))
    return AttentionPlan(pool, _packed(prompts, starts), chunks, None, uses_kernels=uses_kernels)


def _packed(prompts: Sequence[torch.Tensor], starts: Sequence[int]) -> torch.Tensor:
    return torch.cat([slots[start:] for slots, start in zip(prompts, starts, strict=True)])


def pooled_attention(
    module: Any,
    query: torch.Tensor,  # (1, heads, num_tokens, key_dim)
    key: torch.Tensor,  # (1, kv_heads, num_tokens, key_dim)
    value: torch.Tensor,  # (1, kv_heads, num_tokens, value_dim)
    attention_mask: torch.Tensor | None,  # noqa: ARG001 - the plan defines what is visible
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Implement transformers' attention interface: (1, num_tokens, heads, value_dim) and no weights."""
    step: CurrentStep = module.logprobe_step
    layer, plan = module.layer_idx, step.plan
    check_call(query, key, options)
    assert plan is not None, "the plan is set before the model runs"
    plan.pool.store(layer, plan.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
    rule = score_rule(query, options, step.windows.get(layer))
    return attend(plan, layer, query[0].transpose(0, 1), rule)[None], None


def attend(
    plan: AttentionPlan, layer: int, query: torch.Tensor, rule: ScoreRule, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Attend with (num_tokens, heads, key_dim) queries; return (num_tokens, heads, value_dim)."""
    keys, values = plan.pool.keys[layer], plan.pool.values[layer]
    if out is None:
        out = query.new_empty(*query.shape[:2], values.shape[2])
    if plan.rows is not None:
        attend_rows(query, keys, values, plan.rows, out, rule)
    for index, chunk in enumerate(plan.chunks):
        queries, attended = query[chunk.start : chunk.end], out[chunk.start : chunk.end]
        if plan.uses_kernels:
            attend_chunk(queries, keys, values, chunk.slots, rule, attended)
        else:
            seen, given = (part.index_select(0, chunk.slots).transpose(0, 1) for part in (keys, values))
            mask = plan.mask(index, rule.window)
            attended.copy_(_attend(queries.transpose(0, 1), seen, given, mask, rule).transpose(0, 1))
    return out


def check_call(query: torch.Tensor, key: torch.Tensor, options: dict[str, Any]) -> None:
    """Check that an attention call passes one key per query token and only known tensor options.

    Raises:
        UnsupportedModelError: the call has more or fewer keys, or an unknown tensor option, which may change
            the scores.
    """
    if key.shape[2] != query.shape[2]:
        raise UnsupportedModelError("its attention does not read exactly one key per token")
    for name, option in options.items():
        if name not in KNOWN_OPTIONS and isinstance(option, torch.Tensor):
            raise UnsupportedModelError(f"its attention uses `{name}`, which is not supported")


def score_rule(query: torch.Tensor, options: dict[str, Any], window: int | None) -> ScoreRule:
    """Return the score rule of a call of transformers' attention interface; `window` comes from its mask."""
    scale = options.get("scaling")
    return ScoreRule(
        query.shape[3] ** -0.5 if scale is None else float(scale),
        window,
        options.get("softcap"),
        options.get("s_aux"),
    )


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, rule: ScoreRule
) -> torch.Tensor:
    """Compute `attend_chunk` with torch operations, on any device and dtype: (heads, rows, value_dim)."""
    if rule.softcap is None and rule.sinks is None:
        attended = functional.scaled_dot_product_attention(
            query[None], key[None], value[None],
            attn_mask=mask, is_causal=mask is None, scale=rule.scale, enable_gqa=True,
        )  # fmt: skip
        return attended[0]
    groups = query.shape[0] // key.shape[0]
    heads = [
        _attend_head(rows, key[head // groups], value[head // groups], mask, rule, head)
        for head, rows in enumerate(query)
    ]
    return torch.stack(heads)


def _attend_head(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    rule: ScoreRule,
    head: int,
) -> torch.Tensor:
    """Attend with one head whose scores have a soft cap (Gemma 2) or an attention sink (gpt-oss)."""
    scores = (query @ key.T) * rule.scale
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    if mask is None:
        mask = torch.ones_like(scores, dtype=torch.bool).tril()
    scores = scores.masked_fill(~mask, -torch.inf)
    if rule.sinks is None:
        return torch.softmax(scores, dim=-1) @ value
    sink = rule.sinks[head].to(scores.dtype).expand(len(scores), 1)
    return torch.softmax(torch.cat([scores, sink], dim=-1), dim=-1)[:, :-1] @ value


def _to_device(slots: np.ndarray[Any, Any], device: str) -> torch.Tensor:
    return torch.from_numpy(slots.astype(np.int64)).to(device)
