"""Attention over the KV cache as an attention implementation of transformers, on any device.

transformers passes each layer's packed queries, keys and values to `pooled_attention`, which first writes
keys and values to their slots. Then each span of tokens attends to its own context: by the CPU kernels if
they can read the KV cache, and otherwise by torch operations.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from logprobe.engine.forward.cpu.attention import AttentionPlan, by_rows, chunked
from logprobe.errors import UnsupportedModelError
from logprobe.kernels.arrays import as_array
from logprobe.kernels.attention.api import ScoreRule, attend_rows
from logprobe.kernels.attention.chunk import attend_chunk

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from logprobe.engine.forward.kv_cache import KVPool
    from logprobe.kernels.arrays import Array

NAME = "logprobe"
# Options of the interface that may be tensors. `score_rule` applies `scaling` and `s_aux`; the others do not
# change scores, because the queries have already been rotated by position.
KNOWN_OPTIONS = {
    "scaling",
    "s_aux",
    "position_ids",
    "cache_position",
    "position_embeddings",
    "output_router_logits",
}


@dataclass(slots=True)
class TensorPlan(AttentionPlan):
    """An `AttentionPlan` whose slots are tensors on the device."""

    uses_kernels: bool  # True: chunks run by `attend_chunk`; False: by torch operations
    masks: dict[tuple[int, int | None], torch.Tensor] = field(default_factory=dict)  # by chunk and window

    @classmethod
    def of(cls, plan: AttentionPlan, device: torch.device, *, uses_kernels: bool | None = None) -> TensorPlan:
        """Copy a plan to a device; by default, kernels are used if they can read the cache."""
        if uses_kernels is None:
            uses_kernels = plan.pool.is_readable_in_place
        chunks = [replace(chunk, slots=torch.from_numpy(chunk.slots).to(device)) for chunk in plan.chunks]
        slots = torch.from_numpy(plan.slots).to(device)
        return cls(plan.pool, slots, chunks, plan.rows, uses_kernels)

    def mask(self, index: int, window: int | None) -> torch.Tensor | None:
        """Return the mask of chunk `index`, (rows, context) bool, where True means visible.

        None means a causal mask.
        """
        chunk = self.chunks[index]
        context = len(chunk.slots)
        if window is None or context <= window:
            window = None
        if context == chunk.end - chunk.start and window is None:
            return None
        key = (index, window)
        if key not in self.masks:
            rows = torch.arange(context - (chunk.end - chunk.start), context, device=self.slots.device)
            columns = torch.arange(context, device=self.slots.device)
            self.masks[key] = sees(rows[:, None], columns[None, :], window)
        return self.masks[key]


def sees(row: torch.Tensor, column: torch.Tensor, window: int | None) -> torch.Tensor:
    """Return True where the token at index `row` attends to the token at index `column`, broadcast.

    `window` is the number of visible tokens, including the token itself; None: no sliding window.
    """
    distance = row - column
    return distance >= 0 if window is None else (distance >= 0) & (distance < window)


@dataclass(slots=True)
class CurrentStep:
    """State of the running step, shared by all modules of a transformers model.

    The modules find it as an attribute, because some families do not pass keyword arguments on to attention.
    """

    plan: TensorPlan | None = None
    is_long: bool = False  # tokens use the long rotary frequencies
    windows: dict[int, int | None] = field(default_factory=dict)  # by layer, read from the model's masks
    rules: dict[int, ScoreRule] = field(default_factory=dict)  # by layer, from the attention call at load
    key_dims: dict[int, int] = field(default_factory=dict)  # by layer, from the attention call at load
    masks: dict[int, torch.Tensor | None] = field(default_factory=dict)  # by layer, only during verification

    def reach(self, model: torch.nn.Module) -> None:
        """Set this object as attribute `logprobe_step` of every module of `model`."""
        for module in model.modules():
            module.logprobe_step = self  # type: ignore[assignment]


def all_tensor_paths(
    pool: KVPool, prompts: Sequence[Array], device: torch.device
) -> Iterator[tuple[list[int], TensorPlan]]:
    """Yield plans that together run `prompts` through every attention path.

    The first plan runs whole prompts and fills the cache; the others run whole prompts or their second
    halves.

    Args:
        pool: the KV cache.
        prompts: for each prompt, the slots of its tokens, int64.
        device: the model's device.

    Yields:
        For every prompt, the index of the first token that the plan runs; and the plan.
    """
    whole, halves = [0] * len(prompts), [len(slots) // 2 for slots in prompts]
    yield whole, TensorPlan.of(chunked(pool, prompts, whole), device, uses_kernels=False)
    yield halves, TensorPlan.of(chunked(pool, prompts, halves), device, uses_kernels=False)
    if pool.is_readable_in_place:
        yield whole, TensorPlan.of(chunked(pool, prompts, whole), device)
        yield halves, TensorPlan.of(by_rows(pool, prompts, halves), device)


def pooled_attention(
    module: Any,
    query: torch.Tensor,  # (1, heads, num_tokens, key_dim)
    key: torch.Tensor,  # (1, kv_heads, num_tokens, key_dim)
    value: torch.Tensor,  # (1, kv_heads, num_tokens, value_dim)
    attention_mask: torch.Tensor | None,  # noqa: ARG001 - the plan defines what is visible
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Implement transformers' attention interface over the KV cache.

    Returns the attention output, (1, num_tokens, heads, value_dim), and None for the attention weights.
    """
    step: CurrentStep = module.logprobe_step
    layer, plan = module.layer_idx, step.plan
    check_call(query, key, options)
    assert plan is not None, "the plan is set before the model runs"
    plan.pool.store(layer, plan.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
    rule = score_rule(query, options, step.windows.get(layer))
    return attend(plan, layer, query[0].transpose(0, 1), rule)[None], None


def attend(plan: TensorPlan, layer: int, query: torch.Tensor, rule: ScoreRule) -> torch.Tensor:
    """Compute one layer's attention for the tokens in `plan`; their keys and values are already stored.

    Args:
        plan: the plan of the step.
        layer: index of the layer.
        query: (num_tokens, heads, key_dim).
        rule: how scores are computed.

    Returns:
        The attention output, (num_tokens, heads, value_dim).
    """
    keys, values = plan.pool.keys[layer], plan.pool.values[layer]
    out = query.new_empty(*query.shape[:2], values.shape[2])
    if plan.rows is not None:
        operands = (as_array(query), as_array(keys), as_array(values))
        attend_rows(*operands, plan.rows, as_array(out), rule)
    for index, chunk in enumerate(plan.chunks):
        queries, attended = query[chunk.start : chunk.end], out[chunk.start : chunk.end]
        if plan.uses_kernels:
            operands = (as_array(queries), as_array(keys), as_array(values))
            attend_chunk(*operands, as_array(chunk.slots), rule, as_array(attended))
        else:
            seen, given = (part.index_select(0, chunk.slots).transpose(0, 1) for part in (keys, values))
            mask = plan.mask(index, rule.window)
            attended.copy_(_attend(queries.transpose(0, 1), seen, given, mask, rule).transpose(0, 1))
    return out


def check_call(query: torch.Tensor, key: torch.Tensor, options: dict[str, Any]) -> None:
    """Check that an attention call has one key per query token, and no unknown options that are tensors.

    Raises:
        UnsupportedModelError: the number of keys differs, or there is an unknown tensor, which may change the
            scores.
    """
    if key.shape[2] != query.shape[2]:
        raise UnsupportedModelError("its attention does not read exactly one key per token")
    for name, option in options.items():
        if name not in KNOWN_OPTIONS and isinstance(option, torch.Tensor):
            raise UnsupportedModelError(f"its attention uses `{name}`, which is not supported")


def score_rule(query: torch.Tensor, options: dict[str, Any], window: int | None) -> ScoreRule:
    """Return the score rule for a call of transformers' attention interface.

    Args:
        query: (1, heads, num_tokens, key_dim).
        options: keyword arguments of the call.
        window: sliding window in tokens, read from the layer's mask; None: no window.
    """
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
    """Do the same as `attend_chunk` with torch operations, on any device and dtype.

    Args:
        query: (heads, rows, key_dim).
        key: (kv_heads, context, key_dim).
        value: (kv_heads, context, value_dim).
        mask: (rows, context) bool; None: causal.
        rule: how scores are computed.

    Returns:
        (heads, rows, value_dim).
    """
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
    """Compute attention for one query head whose scores have a soft cap (Gemma 2) or sink (gpt-oss)."""
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
