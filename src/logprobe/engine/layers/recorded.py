"""A decoder step of a few rows as one launch (CPU, weights in 8 bits or as they were published).

At one row, hundreds of launches from Python cost more than the products they start. Where all layers are of
the fused form on our own kernels, they are recorded once, on buffers of their own, which a step fills in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from logprobe.engine.layers.fused import FusedLayer
from logprobe.engine.layers.int8 import Int8GatedMLP, Int8Linear
from logprobe.engine.layers.packed import PackedNorm
from logprobe.engine.layers.published import PublishedGatedMLP, PublishedLinear
from logprobe.kernels.attention.api import RowPlan, rows_stage
from logprobe.kernels.layers.norm import norm_stage
from logprobe.kernels.layers.rotary import Projections, rotary_stage
from logprobe.kernels.threads.series import Series

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logprobe.engine.forward.attention import AttentionPlan
    from logprobe.engine.forward.pool import KVPool
    from logprobe.kernels.attention.api import Array
    from logprobe.kernels.threads.parallel import Stage

# Above, oneDNN's products gain more than launches cost; our own kernels serve any number (docs/decisions.md).
MOST_ROWS = {Int8Linear: 8, PublishedLinear: 64}


@dataclass(frozen=True, slots=True)
class Buffers:
    """What the stages of a step read and write, for one number of rows M."""

    hidden: torch.Tensor  # (M, hidden size)
    normed: torch.Tensor  # (M, hidden size)
    projected: torch.Tensor  # (M, queries + keys + values)
    rotary: tuple[torch.Tensor, torch.Tensor]  # cosines and sines, (M, key_dim)
    query: torch.Tensor  # (M, heads, key_dim)
    attended: torch.Tensor  # (M, heads, value_dim)
    inner: torch.Tensor  # (M, feed-forward size)
    slots: torch.Tensor  # (M,) int64
    contexts: RowPlan  # of M rows

    def first(self, num_rows: int) -> Buffers:
        """Views of the first rows."""
        plan = self.contexts
        return Buffers(
            hidden=self.hidden[:num_rows],
            normed=self.normed[:num_rows],
            projected=self.projected[:num_rows],
            rotary=(self.rotary[0][:num_rows], self.rotary[1][:num_rows]),
            query=self.query[:num_rows],
            attended=self.attended[:num_rows],
            inner=self.inner[:num_rows],
            slots=self.slots[:num_rows],
            contexts=RowPlan(
                plan.queries[:num_rows], plan.begins[:num_rows], plan.lengths[:num_rows], plan.slots
            ),
        )


class RecordedSteps:
    """Runs the decoder for a few rows; recorded for each number of rows when it first comes."""

    def __init__(self, decoder: Any, pool: KVPool, max_len: int) -> None:
        self._decoder, self._pool, self._max_len = decoder, pool, max_len
        self._recorded: dict[int, tuple[Buffers, Series]] = {}
        self._layers = [_Layer(layer) for layer in decoder.layers]
        self.most_rows = MOST_ROWS[type(self._layers[0].down_proj)]
        self._buffers = self._make_buffers(self.most_rows)

    def can_run(self, plan: AttentionPlan) -> bool:
        """Whether a step has few rows, each attended by the row kernel."""
        return plan.rows is not None and not plan.chunks and len(plan.slots) <= self.most_rows

    def run(self, token_ids: Array, positions: Array, plan: AttentionPlan) -> torch.Tensor:
        """(M,) ids and positions → the last hidden states, (M, hidden size), good until the next step."""
        assert plan.rows is not None
        num_rows = len(token_ids)
        if num_rows not in self._recorded:
            self._recorded[num_rows] = self._record(num_rows)
        buffers, series = self._recorded[num_rows]
        ids, places = (torch.from_numpy(array.astype(np.int64)) for array in (token_ids, positions))
        buffers.hidden.copy_(self._decoder.embed_tokens(ids))
        rotary = self._decoder.rotary_emb(buffers.hidden[None], position_ids=places[None])
        for buffer, angles in zip(buffers.rotary, rotary, strict=True):
            buffer.copy_(angles[0])
        buffers.slots.copy_(plan.slots)
        contexts, rows = buffers.contexts, plan.rows
        contexts.begins[:], contexts.lengths[:] = rows.begins, rows.lengths
        contexts.slots[: len(rows.slots)] = rows.slots
        series.run()
        return buffers.normed

    def _record(self, num_rows: int) -> tuple[Buffers, Series]:
        buffers = self._buffers.first(num_rows)
        return buffers, Series([*self._stages(buffers)])

    def _make_buffers(self, num_rows: int) -> Buffers:
        layer = self._decoder.layers[0]
        index = layer.self_attn.layer_idx
        keys, values = self._pool.keys[index], self._pool.values[index]
        width, key_dim = layer.self_attn.o_proj.out_features, keys.shape[2]
        heads = layer.self_attn.q_proj.out_features // key_dim

        def make(*shape: int) -> torch.Tensor:
            return torch.zeros(num_rows, *shape)

        contexts = RowPlan(
            queries=np.arange(num_rows, dtype=np.int32),
            begins=np.zeros(num_rows, dtype=np.int32),
            lengths=np.zeros(num_rows, dtype=np.int32),
            slots=np.zeros(num_rows * self._max_len, dtype=np.int32),
        )
        return Buffers(
            hidden=make(width),
            normed=make(width),
            projected=make(layer.self_attn.qkv_proj.out_features),
            rotary=(make(key_dim), make(key_dim)),
            query=make(heads, key_dim),
            attended=make(heads, values.shape[2]),
            inner=make(layer.mlp.down_proj.in_features),
            slots=torch.zeros(num_rows, dtype=torch.int64),
            contexts=contexts,
        )

    def _stages(self, buffers: Buffers) -> Iterator[Stage]:
        for layer in self._layers:
            yield from self._layer_stages(layer, buffers)
        yield _norm(self._decoder.norm, buffers)

    def _layer_stages(self, layer: _Layer, buffers: Buffers) -> Iterator[Stage]:
        hidden, normed = buffers.hidden, buffers.normed
        keys, values = self._pool.keys[layer.index], self._pool.values[layer.index]
        parts = Projections(*torch.split(buffers.projected, layer.widths, dim=1))
        query, attended = buffers.query, buffers.attended
        yield _norm(layer.input_norm, buffers)
        yield from layer.qkv_proj.stages(normed, buffers.projected)
        yield rotary_stage(parts, buffers.rotary, (keys, values), buffers.slots, query)
        yield rows_stage(query, keys, values, buffers.contexts, attended, layer.rule)
        yield from layer.o_proj.stages(attended.flatten(1), hidden, hidden)
        yield _norm(layer.inner_norm, buffers)
        yield from layer.mlp.inner_stages(normed, buffers.inner)
        yield from layer.down_proj.stages(buffers.inner, hidden, hidden)


class _Layer:
    """What a layer's stages are made of, before any lora wraps a part of it."""

    def __init__(self, layer: Any) -> None:
        attention, self.mlp = layer.self_attn, layer.mlp
        self.index, self.widths, self.rule = attention.layer_idx, attention.widths, attention.rule
        self.qkv_proj, self.o_proj, self.down_proj = attention.qkv_proj, attention.o_proj, layer.mlp.down_proj
        self.input_norm, self.inner_norm = layer.input_layernorm, layer.post_attention_layernorm


def record_steps(decoder: Any, pool: KVPool, max_len: int) -> RecordedSteps | None:
    """The recorded form of a decoder's steps; None where some part of it is of another form."""
    layers = getattr(decoder, "layers", [])
    if not layers or not all(map(_is_known, layers)) or type(decoder.norm) is not PackedNorm:
        return None
    are_alike = len({_sizes(layer, pool) for layer in layers}) == 1  # they share their buffers
    return RecordedSteps(decoder, pool, max_len) if are_alike else None


def _is_known(layer: Any) -> bool:
    if not isinstance(layer, FusedLayer) or not isinstance(layer.mlp, Int8GatedMLP | PublishedGatedMLP):
        return False
    attention = layer.self_attn
    linears = (attention.qkv_proj, attention.o_proj, layer.mlp.down_proj)
    norms = (layer.input_layernorm, layer.post_attention_layernorm)
    return (
        attention.q_norm is None
        and attention.k_norm is None
        and type(linears[0]) in MOST_ROWS
        and all(type(linear) is type(linears[0]) for linear in linears)
        and all(type(norm) is PackedNorm for norm in norms)
    )


def _sizes(layer: Any, pool: KVPool) -> tuple[Any, ...]:
    attention = layer.self_attn
    keys, values = pool.keys[attention.layer_idx], pool.values[attention.layer_idx]
    return (
        *attention.widths,
        attention.o_proj.out_features,
        layer.mlp.down_proj.in_features,
        keys.shape,
        values.shape,
    )


def _norm(norm: PackedNorm, buffers: Buffers) -> Stage:
    return norm_stage(buffers.hidden, norm.factor, buffers.normed, norm.epsilon)
