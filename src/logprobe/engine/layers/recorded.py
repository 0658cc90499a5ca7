"""A decoder step of a few rows as one launch (CPU, weights as they were published).

At one row, hundreds of launches from Python cost more than the products they start. Where all layers are of
the fused form on our own kernels, they are recorded once, on buffers of their own, which a step fills in.
"""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from logprobe.engine.layers.fused import FusedLayer
from logprobe.engine.layers.packed import PackedNorm
from logprobe.engine.layers.published import PublishedGatedMLP, PublishedJoinedMLP, PublishedLinear
from logprobe.kernels.attention.api import RowPlan, rows_stage
from logprobe.kernels.layers.norm import norm_stage
from logprobe.kernels.layers.rotary import rotary_stage
from logprobe.kernels.threads.series import Series

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from logprobe.engine.forward.attention import AttentionPlan
    from logprobe.engine.forward.pool import KVPool
    from logprobe.kernels.attention.api import Array
    from logprobe.kernels.threads.parallel import Stage

    Rotary = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, (M, key_dim) each

KIND = "layer_type"  # what transformers' rotary embeddings are asked by where layers have several
MOST_ROWS = 64  # of a recorded step; the products serve any number


@dataclass(frozen=True, slots=True)
class Buffers:
    """What the stages of a step read and write, for one number of rows M."""

    hidden: torch.Tensor  # (M, hidden size)
    normed: torch.Tensor  # (M, hidden size)
    branch: torch.Tensor  # (M, hidden size): what a layer's part gives where a norm follows it
    projected: torch.Tensor  # (M, queries + keys + values)
    rotary: dict[str | None, Rotary]  # by kind of layer
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
            branch=self.branch[:num_rows],
            projected=self.projected[:num_rows],
            rotary={
                kind: (cosines[:num_rows], sines[:num_rows]) for kind, (cosines, sines) in self.rotary.items()
            },
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
        kinds = rotary_kinds(decoder)
        self._layers = [_Layer(layer, kind) for layer, kind in zip(decoder.layers, kinds, strict=True)]
        self._buffers = self._make_buffers(MOST_ROWS)

    def can_run(self, plan: AttentionPlan) -> bool:
        """Whether a step has few rows, each attended by the row kernel."""
        return plan.rows is not None and not plan.chunks and len(plan.slots) <= MOST_ROWS

    def run(self, token_ids: Array, positions: Array, plan: AttentionPlan) -> torch.Tensor:
        """(M,) ids and positions → the last hidden states, (M, hidden size), good until the next step."""
        assert plan.rows is not None
        num_rows = len(token_ids)
        if num_rows not in self._recorded:
            self._recorded[num_rows] = self._record(num_rows)
        buffers, series = self._recorded[num_rows]
        ids, places = (torch.from_numpy(array.astype(np.int64)) for array in (token_ids, positions))
        buffers.hidden.copy_(self._decoder.embed_tokens(ids))
        for kind, own in buffers.rotary.items():
            for buffer, angles in zip(own, self._angles(kind, buffers.hidden, places), strict=True):
                buffer.copy_(angles)
        buffers.slots.copy_(plan.slots)
        contexts, rows = buffers.contexts, plan.rows
        contexts.begins[:], contexts.lengths[:] = rows.begins, rows.lengths
        contexts.slots[: len(rows.slots)] = rows.slots
        series.run()
        return buffers.normed

    def _angles(self, kind: str | None, hidden: torch.Tensor, places: torch.Tensor) -> list[torch.Tensor]:
        """Cosines and sines of (M,) positions, (M, rotary_dim) each."""
        options = {} if kind is None else {KIND: kind}
        rotary = self._decoder.rotary_emb(hidden[None], position_ids=places[None], **options)
        return [angles[0] for angles in rotary]

    def _record(self, num_rows: int) -> tuple[Buffers, Series]:
        buffers = self._buffers.first(num_rows)
        return buffers, Series([*self._stages(buffers)])

    def _make_buffers(self, num_rows: int) -> Buffers:
        layer = self._layers[0]
        keys, values = self._pool.keys[layer.index], self._pool.values[layer.index]
        width, key_dim = layer.output.out_features, keys.shape[2]
        heads = layer.attention.widths[0] // key_dim

        def make(*shape: int) -> torch.Tensor:
            return torch.zeros(num_rows, *shape)

        kinds = {one.kind for one in self._layers}
        first = torch.zeros(1, dtype=torch.int64)
        dims = {kind: self._angles(kind, torch.zeros(1, width), first)[0].shape[1] for kind in kinds}
        contexts = RowPlan(
            queries=np.arange(num_rows, dtype=np.int32),
            begins=np.zeros(num_rows, dtype=np.int32),
            lengths=np.zeros(num_rows, dtype=np.int32),
            slots=np.zeros(num_rows * self._max_len, dtype=np.int32),
        )
        return Buffers(
            hidden=make(width),
            normed=make(width),
            branch=make(width),
            projected=make(layer.projection.out_features),
            rotary={layer.kind: (make(dims[layer.kind]), make(dims[layer.kind])) for layer in self._layers},
            query=make(heads, key_dim),
            attended=make(heads, values.shape[2]),
            inner=make(layer.mlp.down_proj.in_features),
            slots=torch.zeros(num_rows, dtype=torch.int64),
            contexts=contexts,
        )

    def _stages(self, buffers: Buffers) -> Iterator[Stage]:
        for layer in self._layers:
            yield from self._layer_stages(layer, buffers)
        yield _norm(self._decoder.norm, buffers.hidden, buffers.normed)

    def _layer_stages(self, layer: _Layer, buffers: Buffers) -> Iterator[Stage]:
        keys, values = self._pool.keys[layer.index], self._pool.values[layer.index]
        attention, query, attended = layer.attention, buffers.query, buffers.attended
        normed = yield from _before(layer.before_attention, buffers)
        yield from layer.projection.stages(normed, buffers.projected)
        head_norms = (attention.q_norm, attention.k_norm)
        for part, norm in zip(attention.split(buffers.projected), head_norms, strict=False):
            if norm is not None:
                yield _norm(norm, part, part)
        nothing = torch.empty(len(buffers.slots), 0)
        rotary = buffers.rotary[layer.kind] if attention.rotates else (nothing, nothing)
        projections = attention.by_head(buffers.projected)
        yield rotary_stage(projections, rotary, (keys, values), buffers.slots, query)
        yield rows_stage(query, keys, values, buffers.contexts, attended, attention.rule)
        yield from _add_product(layer.output, attended.flatten(1), layer.after_attention, buffers)
        normed = yield from _before(layer.before_mlp, buffers)
        yield from layer.mlp.inner_stages(normed, buffers.inner)
        yield from _add_product(layer.down_proj, buffers.inner, layer.after_mlp, buffers)


class _Layer:
    """What a layer's stages are made of, before any lora wraps a part of it."""

    def __init__(self, layer: FusedLayer, kind: str | None) -> None:
        self.attention, self.kind = layer.fused_attention, kind
        self.mlp: Any = layer.mlp
        self.index = self.attention.layer_idx
        self.projection, self.output = self.attention.projection, self.attention.output
        self.down_proj = self.mlp.down_proj
        form = layer.form
        self.before_attention, self.after_attention, self.before_mlp, self.after_mlp = (
            None if name is None else getattr(layer, name)
            for name in (form.before_attention, form.after_attention, form.before_mlp, form.after_mlp)
        )


def rotary_kinds(decoder: Any) -> list[str | None]:
    """What transformers calls each layer's rotary frequencies, where layers have others; else None."""
    kinds = decoder.config.layer_types if KIND in signature(decoder.rotary_emb.forward).parameters else None
    return [None if kinds is None else kinds[layer.fused_attention.layer_idx] for layer in decoder.layers]


def _before(norm: PackedNorm | None, buffers: Buffers) -> Generator[Stage, None, torch.Tensor]:
    """What a layer's part reads: the hidden states, normed where the layer does."""
    if norm is None:
        return buffers.hidden
    yield _norm(norm, buffers.hidden, buffers.normed)
    return buffers.normed


def _add_product(linear: Any, x: torch.Tensor, norm: PackedNorm | None, buffers: Buffers) -> Iterator[Stage]:
    """A product, normed where a norm follows, added to the hidden states."""
    if norm is None:
        yield from linear.stages(x, buffers.hidden, buffers.hidden)
    else:
        yield from linear.stages(x, buffers.branch)
        yield _norm(norm, buffers.branch, buffers.hidden, buffers.hidden)


def record_steps(decoder: Any, pool: KVPool, max_len: int) -> RecordedSteps | None:
    """The recorded form of a decoder's steps; None where some part of it is of another form."""
    layers = getattr(decoder, "layers", [])
    if not layers or not all(map(_is_known, layers)) or type(decoder.norm) is not PackedNorm:
        return None
    are_alike = len({_sizes(layer, pool) for layer in layers}) == 1  # they share their buffers
    return RecordedSteps(decoder, pool, max_len) if are_alike else None


def _is_known(layer: Any) -> bool:
    known_mlps = PublishedGatedMLP | PublishedJoinedMLP
    if not isinstance(layer, FusedLayer) or layer.is_parallel or not isinstance(layer.mlp, known_mlps):
        return False
    attention = layer.fused_attention
    linears = (attention.projection, attention.output, layer.mlp.down_proj)
    norms = [getattr(layer, name) for name in layer.form.norms]
    head_norms = [norm for norm in (attention.q_norm, attention.k_norm) if norm is not None]
    return all(type(linear) is PublishedLinear for linear in linears) and all(
        type(norm) is PackedNorm for norm in (*norms, *head_norms)
    )


def _sizes(layer: Any, pool: KVPool) -> tuple[Any, ...]:
    attention = layer.fused_attention
    keys, values = pool.keys[attention.layer_idx], pool.values[attention.layer_idx]
    return (
        *attention.widths,
        attention.output.out_features,
        layer.mlp.down_proj.in_features,
        keys.shape,
        values.shape,
    )


def _norm(
    norm: PackedNorm, x: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None = None
) -> Stage:
    return norm_stage(x, norm.factor, out, norm.epsilon, residual)
