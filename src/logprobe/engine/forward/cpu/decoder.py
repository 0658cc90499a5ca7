"""The native decoder for CPUs (float32): runs the model families of `families` on packed weight panels.

A step is a list of operations (`Decoder.operations`): kernel stages for norms, matrix products, rotary
embedding and attention, and host operations for experts and LoRA weights. Steps with few rows run as one
recorded launch (`launch`); larger steps run operation by operation. Families differ only in their entries in
`families`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from logprobe.engine.forward.cpu.attention import all_attention_paths, attend, plan_attention
from logprobe.engine.forward.cpu.launch import MAX_ROWS, HostOperation, Launches, Step
from logprobe.engine.forward.cpu.linear import (
    HALVES,
    Experts,
    GatedPanels,
    Linear,
    embedded,
    split_columns,
    state_of,
)
from logprobe.engine.forward.cpu.lora import LoraRows, by_panels
from logprobe.engine.forward.families import FAMILIES
from logprobe.engine.forward.kv_cache import KVPool
from logprobe.errors import UnsupportedModelError
from logprobe.kernels.attention.api import ScoreRule
from logprobe.kernels.layers.forms import arithmetic_of
from logprobe.kernels.layers.panels import panel_stage
from logprobe.kernels.layers.rows import Projections, gate_stage, norm_stage, rotary_stage, softcap_stage

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from logprobe.engine.forward.config import DecoderSpec
    from logprobe.engine.forward.cpu.attention import AttentionPlan
    from logprobe.engine.forward.cpu.launch import Attend, Operation
    from logprobe.engine.forward.families import ExpertFacts
    from logprobe.engine.protocol import Capture, StepBatch
    from logprobe.kernels.arrays import Array
    from logprobe.kernels.layers.forms import PanelWeights
    from logprobe.kernels.stages import Stage
    from logprobe.models.lora import LoraWeights, ModelModules

    Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Norm:
    """LayerNorm or RMSNorm, applied to whole rows or to equal parts (heads) of each row."""

    weight: Array  # (width,)
    bias: Array | None
    epsilon: float
    is_centred: bool  # True: LayerNorm; False: RMSNorm

    def stage(self, x: Array, out: Array, residual: Array | None = None) -> Stage:
        """Return the stage that writes norm(`x`) + `residual` to `out`."""
        return norm_stage(
            x, self.weight, out, self.epsilon, residual, bias=self.bias, is_centred=self.is_centred
        )


@dataclass(frozen=True, slots=True)
class FeedForward:
    """The MLP of a layer: down(activation(gates) · values), or down(activation(gates)) without values."""

    gate_names: tuple[str, ...]  # modules that compute gates and values
    inner: GatedPanels
    down_name: str
    down: Linear

    @property
    def width(self) -> int:
        """Number of intermediate values per row (the intermediate size)."""
        return self.down.num_inputs


@dataclass(frozen=True, slots=True)
class Layer:
    """One transformer layer; LoRA weights refer to its matrices by module name."""

    index: int
    projections: dict[str, int]  # modules that compute queries, keys and values → number of outputs
    projection: Linear  # the modules in `projections`, joined
    head_norms: tuple[Norm | None, Norm | None]  # norms of queries and keys
    output_name: str
    output: Linear
    mlp: FeedForward | None  # None: the layer has only routed experts
    experts: Experts | None
    shared_gate: tuple[str, Linear] | None  # set if `mlp` is the shared expert: name and layer of its gate
    before_attention: Norm | None
    after_attention: Norm | None
    before_mlp: Norm | None
    after_mlp: Norm | None
    rotary: str | None  # name of the rotary frequencies; None: no rotary embedding
    rule: ScoreRule

    @property
    def names(self) -> tuple[str, ...]:
        """Module names of all matrices except those of the experts and the router."""
        mlp = () if self.mlp is None else (*self.mlp.gate_names, self.mlp.down_name)
        shared = () if self.shared_gate is None else (self.shared_gate[0],)
        return (*self.projections, self.output_name, *mlp, *shared)


@dataclass(frozen=True, slots=True)
class PanelLayer:
    """The base weights of a linear layer, with the interface that `models.lora.bound` needs."""

    parts: list[PanelWeights]  # their outputs, concatenated, are the layer's
    bias: Array | None  # (outputs,)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the weight matrix, (outputs, inputs)."""
        return sum(part.num_outputs for part in self.parts), self.parts[0].num_inputs

    def rows(self, start: int, end: int) -> Array:
        """Return rows [start, end) of the weight matrix, (end - start, inputs) float32."""
        found = []
        for part in self.parts:
            if start < part.num_outputs and end > 0:
                outputs = np.arange(max(start, 0), min(end, part.num_outputs))
                found.append(part.rows(outputs))
            start, end = start - part.num_outputs, end - part.num_outputs
        return np.concatenate(found)


class Decoder:
    """Computes the final hidden states of a step's packed tokens, and logits from hidden states."""

    def __init__(
        self, spec: DecoderSpec, tensors: Mapping[str, Array], panels: Mapping[str, PanelWeights]
    ) -> None:
        """Assemble the layers.

        Args:
            spec: structure of the decoder.
            tensors: vectors (biases, norm weights, rotary frequencies); the keys are their names in
                transformers' module.
            panels: packed matrices by module name.

        Raises:
            KeyError: a tensor or matrix is missing.
            ValueError: shapes do not match.
        """
        self.spec, self.family = spec, FAMILIES[spec.family]
        self.tensors, self._panels = dict(tensors), panels
        self.device = "cpu"
        self.names = {f"{spec.head}.weight"}  # tensors of transformers' module that this decoder uses
        self.launches: Launches | None = None  # recorded steps with few rows; set by `record_on`
        self.embedding_name = f"{spec.path}.{self.family.embedding}"
        self.embedding = self._panels_of(self.embedding_name)
        self.arithmetic = arithmetic_of(panels.values())
        self.loras = LoraRows(partial(by_panels, arithmetic=self.arithmetic))
        self.positions = (
            None if self.family.positions is None else self._panels_of(f"{spec.path}.{self.family.positions}")
        )
        self.hidden_size = self.embedding.num_inputs
        self.lm_head = self._linear(spec.head) if spec.head in panels else Linear([self.embedding])
        self.layers = [self._layer(index) for index in range(len(spec.rules))]
        self.last_norm = self._norm(f"{spec.path}.{self.family.last_norm}")
        mlps = [layer.mlp for layer in self.layers if layer.mlp is not None]
        self.mlp_width = max((mlp.width for mlp in mlps), default=0)
        sizes = {(*layer.projections.values(), layer.output.num_inputs) for layer in self.layers}
        if len(sizes) != 1:
            raise ValueError("its layers have different sizes")
        first = self.layers[0]
        self.vocab_size = self.lm_head.num_outputs
        query_width = first.output.num_inputs
        key_width = (first.projection.num_outputs - query_width) // 2
        self.widths = [query_width, key_width, key_width]
        self.num_heads, self.num_kv_heads = query_width // spec.head_dim, key_width // spec.head_dim

    @property
    def kv_shapes(self) -> dict[int, tuple[Shape, Shape]]:
        """Shapes of one token's keys and values, by layer."""
        shape = (self.num_kv_heads, self.spec.head_dim)
        return {layer.index: (shape, shape) for layer in self.layers}

    @property
    def weight_bytes(self) -> int:
        """Size of all matrices, in bytes."""
        return sum({panels.address: panels.num_bytes for panels in self._panels.values()}.values())

    def new_pool(self, num_slots: int) -> KVPool:
        """Return a KV cache with every layer of this decoder allocated."""
        pool = KVPool(num_slots)
        pool.lay_out(self.kv_shapes, partial(np.zeros, dtype=np.float32))
        return pool

    def modules(self) -> ModelModules:
        """Return the modules that LoRA weights may change."""
        from logprobe.models.lora import ModelModules

        layers = f"{self.spec.path}.{self.family.layers}."
        names = {name for layer in self.layers for name in layer.names}
        if self.family.is_transposed:  # not linear layers in transformers
            names = {name for name in names if not name.startswith(layers)}
        linear = {name: self._lora_base(name).shape for name in names}
        linear[self.spec.head] = self.vocab_size, self.hidden_size
        return ModelModules(
            linear=linear,
            biased={name for name in linear if f"{name}.bias" in self.tensors},
            embedding=self.embedding_name,
            embedding_shape=(self.embedding.num_outputs, self.hidden_size),
            head=self.spec.head,
            is_tied=not self._has_own_head,
        )

    @property
    def _has_own_head(self) -> bool:
        """False if the output head shares the embedding's weight."""
        head = self._panels.get(self.spec.head)
        return head is not None and head.address != self.embedding.address

    def check_lora(self, lora: LoraWeights) -> None:
        """Check that every layer that `lora` changes supports LoRA weights, and prepare `lora` for steps.

        Raises:
            UnsupportedModelError: `lora` changes a layer that does not support LoRA weights.
        """
        taken = {name for layer in self.layers for name in layer.names} | {self.embedding_name}
        for name in lora.parts:
            if name.startswith(f"{self.spec.path}.") and name not in taken:
                raise UnsupportedModelError(f"lora {lora.name!r} changes {name}, which is not supported")
        self.make_room(lora)

    def make_room(self, lora: LoraWeights) -> None:
        """Combine `lora` with the base weights that it changes, so that no step has to pack panels."""
        self.loras.bind(lora, self._lora_base)

    def _lora_base(self, name: str) -> PanelLayer:
        """Return the weights of a module without LoRA."""
        if name == self.spec.head:
            return PanelLayer([self.lm_head.parts[0]], self.tensors.get(f"{name}.bias"))
        names = [name] if name in self._panels else [f"{name}{half}" for half in HALVES]
        return PanelLayer([self._panels[part] for part in names], self.tensors.get(f"{name}.bias"))

    def record_on(self, pool: KVPool, max_len: int) -> None:
        """Run steps with few rows on `pool` as recorded launches from now on.

        Contexts may have at most `max_len` tokens. Models with experts are not recorded, because which
        products a step computes depends on the routing.
        """
        if all(layer.experts is None for layer in self.layers):
            step = self.new_step(MAX_ROWS, pool)
            self.launches = Launches(step, max_len)

    def plan(self, pool: KVPool, batch: StepBatch) -> AttentionPlan:
        """Return the attention plan of a scheduled step."""
        return plan_attention(pool, batch)

    def all_plans(self, pool: KVPool, prompts: Sequence[Array]) -> Iterator[tuple[list[int], AttentionPlan]]:
        """Yield plans that run `prompts` through each attention path; see `all_attention_paths`."""
        return all_attention_paths(pool, prompts)

    def __call__(
        self,
        token_ids: NDArray[Any],
        positions: NDArray[Any],
        plan: AttentionPlan,
        *,
        is_long: bool = False,
        capture: Capture | None = None,
    ) -> Array:
        """Run packed tokens; return their final hidden states, (num_tokens, hidden size) float32.

        Args:
            token_ids: (num_tokens,) integers.
            positions: (num_tokens,) integers, position of each token in its text.
            plan: KV cache slot of each token, and the context that the token attends to.
            is_long: use the long rotary frequencies (longrope).
            capture: activations to keep; such a step is not recorded.
        """
        ids, places = (array.astype(np.int64) for array in (token_ids, positions))
        launches = None if self.loras.groups or capture is not None else self.launches
        if launches is not None and launches.can_run(plan):
            return launches.run(
                ids, places, plan, is_long=is_long, fill=self.fill, operations=self.operations
            )
        step = self.new_step(len(ids), plan.pool)
        step.slots, step.loras = plan.slots, self.loras if self.loras.groups else None
        step.capture = capture
        self.fill(step, ids, places, is_long=is_long)
        for operation in self.operations(step, partial(_attend_by, plan)):
            operation.run()
        return step.normed

    def head(self, hidden: Array, lora: LoraWeights | None = None) -> Array:
        """Return float32 logits (rows, vocabulary) of states (rows, hidden size); all rows use `lora`."""
        logits = self.lm_head(hidden)
        if lora is not None:
            with self.loras.only(lora, len(hidden)):
                self.loras.add_(self.spec.head, logits, hidden)
        factors = self.spec.factors
        if factors.logits != 1.0:
            logits *= factors.logits
        if factors.softcap is not None:
            softcap_stage(logits, factors.softcap).run()
        return logits

    def normed(self, hidden: Array) -> Array:
        """Apply the final norm to float32 states (rows, hidden size)."""
        out = np.empty_like(hidden)
        self.last_norm.stage(hidden, out).run()
        return out

    def new_step(self, num_rows: int, pool: KVPool) -> Step:
        """Allocate the buffers for a step with `num_rows` rows."""

        def make(*shape: int) -> Array:
            return np.empty((num_rows, *shape), np.float32)

        heads = (self.num_heads, self.spec.head_dim)
        kinds = {layer.rotary for layer in self.layers if layer.rotary is not None}
        widths = {kind: 2 * len(self.tensors[f"inv_freq.{kind}"]) for kind in kinds}
        return Step(
            hidden=make(self.hidden_size),
            normed=make(self.hidden_size),
            branch=make(self.hidden_size),
            projected=make(sum(self.widths)),
            query=make(*heads),
            attended=make(*heads),
            inner=make(self.mlp_width),
            values=make(self.mlp_width),
            angles={kind: (make(width), make(width)) for kind, width in widths.items()},
            query_scales=None if self.spec.factors.queries is None else make(),
            slots=np.zeros(num_rows, np.int64),
            pool=pool,
        )

    def fill(self, step: Step, ids: Array, places: Array, *, is_long: bool) -> None:
        """Write the inputs of a step to its buffers: embeddings, and cosines and sines of rotary angles.

        Args:
            step: the step's buffers, M rows.
            ids: (M,) int64 token ids.
            places: (M,) int64 positions.
            is_long: use the long rotary frequencies (longrope).
        """
        rows = embedded(self.embedding, ids)
        if step.loras is not None:
            step.loras.embed_(self.embedding_name, rows, ids)
        factors = self.spec.factors
        if factors.embedding != 1.0:
            rows *= factors.embedding
        if self.positions is not None:
            rows += embedded(self.positions, places)
        step.hidden[:] = rows
        for kind, (cosines, sines) in step.angles.items():
            frequencies = self.tensors[f"{'long_' if is_long else ''}inv_freq.{kind}"]
            # Angles in float32, as transformers computes them; the functions in float64, because float32
            # versions round differently on other platforms.
            angles = (places[:, None].astype(np.float32) * frequencies).astype(np.float64)
            for part, function in ((cosines, np.cos), (sines, np.sin)):
                values = function(angles).astype(np.float32) * self.spec.rotary_scaling[kind]
                part[:, : values.shape[1]] = part[:, values.shape[1] :] = values
        if step.query_scales is not None:
            assert factors.queries is not None
            beta, length = factors.queries
            periods = np.floor(places.astype(np.float32) / length).astype(np.float64)
            step.query_scales[:] = 1 + beta * np.log1p(periods).astype(np.float32)

    def operations(self, step: Step, attend: Attend) -> list[Operation]:
        """Return the operations of a step in order, without running them."""
        operations: list[Operation] = []
        for layer in self.layers:
            if step.capture is not None and layer.index in step.capture.layers:
                operations.append(HostOperation(partial(step.capture.keep, layer.index, step.hidden)))
            operations += self._layer_operations(layer, step, attend)
        operations.append(self.last_norm.stage(step.hidden, step.normed))
        return operations

    def _layer_operations(self, layer: Layer, step: Step, attend: Attend) -> list[Operation]:
        attention_input, operations = _normed(layer.before_attention, step.hidden, step.normed)
        mlp_input = attention_input
        if self.spec.is_parallel and layer.before_mlp is not None:
            mlp_input, norms = _normed(layer.before_mlp, step.hidden, step.branch)
            operations += norms
        operations += self._attention_operations(layer, attention_input, step, attend)
        if not self.spec.is_parallel:
            mlp_input, norms = _normed(layer.before_mlp, step.hidden, step.normed)
            operations += norms
        if layer.experts is not None:
            route = None if step.capture is None else partial(step.capture.route, self._expert_place(layer))
            operations.append(HostOperation(partial(layer.experts.add_, step.hidden, mlp_input, route)))
        if layer.mlp is not None and layer.shared_gate is not None:
            operations += _shared_expert_operations(layer.mlp, layer.shared_gate, mlp_input, step)
        elif layer.mlp is not None:
            mlp, inner = layer.mlp, step.inner[:, : layer.mlp.width]
            operations += _inner_operations(mlp, mlp_input, inner, step)
            operations += self._add_operations(mlp.down, mlp.down_name, inner, layer.after_mlp, step)
        return operations

    def _expert_place(self, layer: Layer) -> int:
        """Return the index of a layer with experts among the layers with experts."""
        return sum(before.experts is not None for before in self.layers[: layer.index])

    def _attention_operations(self, layer: Layer, x: Array, step: Step, attend: Attend) -> list[Operation]:
        operations: list[Operation] = [*layer.projection.stages(x, step.projected)]
        start = 0
        for name, width in layer.projections.items():
            operations += step.lora_operations(name, step.projected[:, start : start + width], x)
            start += width
        parts = split_columns(step.projected, self.widths)
        for norm, part in zip(layer.head_norms, parts, strict=False):
            if norm is not None:
                operations.append(norm.stage(part, part))
        nothing = np.empty((len(step.slots), 0), np.float32)
        rotate_and_store = rotary_stage(
            self._by_head(step.projected),
            (nothing, nothing) if layer.rotary is None else step.angles[layer.rotary],
            (step.pool.keys[layer.index], step.pool.values[layer.index]),
            step.slots,
            step.query,
            is_paired=self.family.is_paired,
            query_scales=step.query_scales,
        )
        operations += [rotate_and_store, attend(step, layer.index, layer.rule)]
        attended = step.attended.reshape(len(step.attended), -1)
        operations += self._add_operations(
            layer.output, layer.output_name, attended, layer.after_attention, step
        )
        return operations

    def _add_operations(
        self, linear: Linear, name: str, x: Array, norm: Norm | None, step: Step
    ) -> list[Operation]:
        """Return the operations that add `linear(x)`, normalized by `norm` if given, to the hidden states."""
        if norm is None:
            factor = self.spec.factors.residual
            return [
                *linear.stages(x, step.hidden, step.hidden, factor),
                *step.lora_operations(name, step.hidden, x, factor=factor, linear=linear),
            ]
        return [
            *linear.stages(x, step.branch),
            *step.lora_operations(name, step.branch, x),
            norm.stage(step.branch, step.hidden, step.hidden),
        ]

    def _by_head(self, projected: Array) -> Projections:
        """Return views of the joint projection's output, (M, sum of widths), as queries, keys and values."""
        head_dim = self.spec.head_dim
        if self.family.is_by_head:
            heads = projected.reshape(len(projected), -1, 3, head_dim)
            return Projections(heads[:, :, 0], heads[:, :, 1], heads[:, :, 2])
        parts = split_columns(projected, self.widths)
        return Projections(*(part.reshape(len(part), -1, head_dim) for part in parts))

    def state(self) -> dict[str, Array]:
        """Return float32 copies of the model's weights, by parameter name in transformers' module."""
        linears = {name for layer in self.layers for name in layer.names}
        state = state_of(self._panels, linears if self.family.is_transposed else ())
        small = {name: tensor.copy() for name, tensor in self.tensors.items() if not is_frequency(name)}
        return state | small

    def _layer(self, index: int) -> Layer:
        family, spec = self.family, self.spec
        prefix = f"{spec.path}.{family.layers}.{index}"
        names = [f"{prefix}.{name}" for name in family.projections]
        linears = [self._linear(name) for name in names]
        norms = [self._norm(f"{prefix}.{name}") for name in family.head_norms]
        output = f"{prefix}.{family.output}"
        experts, shared_gate, mlp = None, None, None
        facts = family.experts
        if facts is not None and f"{prefix}.{facts.router}" in self._panels:
            experts = self._experts(prefix, facts)
            if facts.shared_gate is not None:
                gate_name = f"{prefix}.{facts.shared_gate}"
                shared_gate = gate_name, self._linear(gate_name)
                mlp = self._feed_forward(
                    [f"{prefix}.{name}" for name in facts.shared], f"{prefix}.{facts.shared_down}"
                )
        else:
            mlp = self._feed_forward([f"{prefix}.{name}" for name in family.gates], f"{prefix}.{family.down}")
        rule = spec.rules[index]
        before_attention, after_attention, before_mlp, after_mlp = (
            None if name is None else self._norm(f"{prefix}.{name}")
            for name in family.layer_norms(is_parallel=spec.is_parallel)
        )
        return Layer(
            index=index,
            projections={name: linear.num_outputs for name, linear in zip(names, linears, strict=True)},
            projection=linears[0].joined(linears[1:]),
            head_norms=(norms[0], norms[1]) if norms else (None, None),
            output_name=output,
            output=self._linear(output),
            mlp=mlp,
            experts=experts,
            shared_gate=shared_gate,
            before_attention=before_attention,
            after_attention=after_attention,
            before_mlp=before_mlp,
            after_mlp=after_mlp,
            rotary=spec.rotary[index],
            rule=ScoreRule(rule.scale, rule.window, rule.softcap),
        )

    def _panels_of(self, name: str) -> PanelWeights:
        panels, bias = self._panels[name], self.tensors.get(f"{name}.bias")
        self.names |= {f"{name}.weight", f"{name}.bias"}
        return panels if bias is None else panels.with_bias(bias)

    def _linear(self, name: str) -> Linear:
        return Linear([self._panels_of(name)])

    def _feed_forward(self, gates: list[str], down: str) -> FeedForward:
        return FeedForward(tuple(gates), self._gated(gates), down, self._linear(down))

    def _experts(self, prefix: str, facts: ExpertFacts) -> Experts:
        router = self._linear(f"{prefix}.{facts.router}")
        gates, downs = f"{prefix}.{facts.gates}", f"{prefix}.{facts.down}"
        self.names |= {gates, downs}
        numbers = range(router.num_outputs)
        halves = [[self._panels[f"{gates}[{number}]{half}"] for half in HALVES] for number in numbers]
        return Experts(
            router=router,
            inner=[GatedPanels(gates, values, self.spec.activation) for gates, values in halves],
            down=[Linear([self._panels[f"{downs}[{number}]"]]) for number in numbers],
            num_chosen=self.spec.experts_per_token,
            normalises=self.spec.normalises_experts,
        )

    def _gated(self, names: list[str]) -> GatedPanels:
        if len(names) > 1 or not self.family.is_gated:
            parts = [self._panels_of(name) for name in names]
        else:
            parts = [self._panels[f"{names[0]}{half}"] for half in HALVES]
            self.names |= {f"{names[0]}.weight", f"{names[0]}.bias"}
            if (bias := self.tensors.get(f"{names[0]}.bias")) is not None:
                biases = np.split(bias, 2)
                parts = [part.with_bias(half) for part, half in zip(parts, biases, strict=True)]
        values = parts[1] if self.family.is_gated else None
        return GatedPanels(parts[0], values, self.spec.activation)

    def _norm(self, name: str) -> Norm:
        kind = self.family.norm
        is_centred = kind == "layer"
        self.names |= {f"{name}.weight", f"{name}.bias"} if is_centred else {f"{name}.weight"}
        weight = (
            self.tensors[f"{name}.weight"]
            if self.family.has_norm_weights
            else np.ones(self.hidden_size, np.float32)
        )
        return Norm(
            weight + 1.0 if kind == "rms from one" else weight,
            self.tensors.get(f"{name}.bias") if is_centred else None,
            self.spec.epsilon,
            is_centred,
        )


def is_frequency(name: str) -> bool:
    """Return True if `name` names rotary frequencies, which are not parameters of the model."""
    return name.startswith(("inv_freq.", "long_inv_freq."))


def _attend_by(plan: AttentionPlan, step: Step, layer: int, rule: ScoreRule) -> HostOperation:
    return HostOperation(partial(attend, plan, layer, step.query, rule, step.attended))


def _normed(norm: Norm | None, x: Array, out: Array) -> tuple[Array, list[Operation]]:
    """Return the input of a sublayer, and the operations that compute it from `x`.

    Without a norm, the input is `x` and there are no operations; otherwise the input is `out`.
    """
    return (x, []) if norm is None else (out, [norm.stage(x, out)])


def _inner_operations(mlp: FeedForward, x: Array, out: Array, step: Step) -> list[Operation]:
    """Return the operations that write activation(gates) · values to `out`.

    One kernel computes gates and values, unless their weight formats differ or LoRA weights change either.
    """
    inner, width = mlp.inner, mlp.width
    is_changed = step.loras is not None and step.loras.change(mlp.gate_names)
    if inner.is_one_pass and not is_changed:
        return [inner.stage(x, out)]
    first, last = mlp.gate_names[0], mlp.gate_names[-1]
    operations: list[Operation] = [panel_stage(x, inner.gates, out)]
    operations += step.lora_operations(first, out, x, columns=slice(width))
    values = None
    if inner.values is not None:
        values = step.values[:, :width]
        operations.append(panel_stage(x, inner.values, values))
        start = width if first == last else 0  # in a joint gate_up layer, values are the second half
        operations += step.lora_operations(last, values, x, columns=slice(start, start + width))
    operations.append(gate_stage(out, values, out, inner.activation))
    return operations


def _shared_expert_operations(
    mlp: FeedForward, shared_gate: tuple[str, Linear], x: Array, step: Step
) -> list[Operation]:
    """Return the operations that add the shared expert's output, weighted by a sigmoid gate (Qwen2-MoE)."""

    def add() -> None:
        name, gate = shared_gate
        gates = gate(x)
        if step.loras is not None:
            step.loras.add_(name, gates, x)
        # In float64: float32 functions may round differently in the scalar tail of a vector loop.
        with np.errstate(over="ignore"):
            shares = 1 / (1 + np.exp(-gates.astype(np.float64)))
        step.hidden += shares.astype(np.float32) * step.branch

    inner = step.inner[:, : mlp.width]
    return [
        *_inner_operations(mlp, x, inner, step),
        *mlp.down.stages(inner, step.branch),
        *step.lora_operations(mlp.down_name, step.branch, inner),
        HostOperation(add),
    ]
