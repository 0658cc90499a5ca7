"""The native decoder for GPUs: runs the model families of `families` on Triton kernels.

Hidden states, queries and scores are float32. Inputs of matrix products are split into bfloat16 pieces
(`kernels.triton.pieces`), which tensor cores multiply with the weights of the checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import torch

from logprobe.engine.forward.families import FAMILIES
from logprobe.engine.forward.kv_cache import KVPool
from logprobe.engine.forward.torch.cuda.graphs import StepGraphs
from logprobe.engine.forward.torch.cuda.plan import SpanPlan, step_arrays
from logprobe.engine.forward.torch.transformers_lora import TensorLoraRows
from logprobe.errors import UnsupportedModelError
from logprobe.kernels.attention.api import ScoreRule
from logprobe.kernels.triton.attention import attend
from logprobe.kernels.triton.blocks import BlockWeight, joined
from logprobe.kernels.triton.layers import Norm, add, gate, norm, rotate_and_store
from logprobe.kernels.triton.pieces import NUM_PIECES, join
from logprobe.kernels.triton.products import linear, linear_parts, narrowed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, MutableMapping, Sequence

    from numpy.typing import NDArray
    from torch import Tensor

    from logprobe.engine.forward.config import DecoderSpec
    from logprobe.engine.forward.torch.cuda.plan import StepArrays
    from logprobe.engine.protocol import Capture, StepBatch
    from logprobe.kernels.arrays import Array
    from logprobe.models.lora import Dense, LoraWeights, LowRank

EXACT: Final = "bf16x3"
Weight: TypeAlias = "Tensor | BlockWeight"
"""A matrix in float32, float16 or bfloat16, or quantized."""


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer, or several layers with the same input whose outputs are concatenated."""

    names: dict[str, int]  # module name of each layer → number of outputs
    weight: Weight  # (outputs, inputs)
    bias: Tensor | None  # (outputs,) float32

    def __call__(self, x: Tensor) -> Tensor:
        """Return (rows, outputs) float32 for `x`, (num_pieces, rows, inputs) bfloat16."""
        return linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class FeedForward:
    """The MLP of a layer: down(activation(gates) * values), or down(activation(gates))."""

    inner: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a layer; a router selects a few of them for each token (Shazeer et al. 2017)."""

    router: Linear
    inner: Tensor  # (experts, 2 * width, hidden size)
    down: Tensor  # (experts, hidden size, width)


@dataclass(frozen=True, slots=True)
class Layer:
    """One transformer layer."""

    index: int
    projection: Linear  # queries, keys and values
    head_norms: tuple[Norm | None, Norm | None]  # norms of queries and keys
    output: Linear
    mlp: FeedForward | None  # None: the layer has only routed experts
    experts: Experts | None
    shared_gate: Linear | None  # set if `mlp` is the shared expert
    before_attention: Norm | None
    after_attention: Norm | None
    before_mlp: Norm | None
    after_mlp: Norm | None
    rotary: str | None  # name of the rotary frequencies; None: no rotary embedding
    rule: ScoreRule


@dataclass(frozen=True, slots=True)
class OwnLayer:
    """Base weights of one of the layers in a `Linear`, with the interface that `models.lora.bound` needs."""

    linear: Linear
    start: int  # first output of the layer in `linear`
    bias: Tensor | None

    def rows(self, start: int, end: int) -> Tensor:
        """Return rows [start, end) of the layer's weight matrix, (end - start, inputs) float32."""
        return self.linear.weight[self.start + start : self.start + end].float()


def by_pieces(part: Dense | LowRank, x: Tensor) -> Tensor:
    """Multiply `x` (rows, inputs) by the matrices of `part`; return (rows, outputs) float32.

    Uses the Triton kernels.
    """
    for matrix in part.matrices:
        pieces = x.new_empty(3, *x.shape, dtype=torch.bfloat16)
        x = linear(norm(x.contiguous(), None, pieces), matrix.T.contiguous())
    return x


class CudaDecoder:
    """Computes the final hidden states of a step's packed tokens, and logits from hidden states."""

    def __init__(
        self,
        spec: DecoderSpec,
        tensors: MutableMapping[str, Weight],
        *,
        device: torch.device | str = "cuda",
        arithmetic: str = EXACT,
        kv_dtype: torch.dtype = torch.float32,
    ) -> None:
        """Assemble the layers, and remove the tensors that they use from `tensors`.

        Args:
            spec: structure of the decoder.
            tensors: parameters by name in transformers' module, and the rotary frequencies from
                `native_decoder.frequencies`; all on `device`.
            device: device of the decoder.
            arithmetic: `bf16x3` (matrix products with float32 accuracy) or `bf16`.
            kv_dtype: dtype of cached keys and values, float32 or bfloat16.

        Raises:
            KeyError: a parameter is missing.
            ValueError: shapes do not match.
        """
        self.spec, self.family = spec, FAMILIES[spec.family]
        self.device, self.arithmetic, self.kv_dtype = torch.device(device), arithmetic, kv_dtype
        self.num_pieces = NUM_PIECES[arithmetic]
        self.loras = TensorLoraRows(self.device, torch.float32, by_pieces)
        self._tensors = tensors
        self._parts: dict[str, tuple[Linear, int]] = {}  # by module name: layer and first output
        self._own: dict[str, Weight] = {}  # by parameter name: the tensors in use, or views of them
        self.embedding_name = f"{spec.path}.{self.family.embedding}"
        embedding = self._linear([self.embedding_name])
        self.embedding = _as_tensor(embedding.weight)
        is_tied = f"{spec.head}.weight" not in tensors
        self.lm_head = embedding if is_tied else self._linear([spec.head])
        if is_tied:
            self._parts[spec.head] = embedding, 0
        positions = self.family.positions
        self.positions = None if positions is None else self._take(f"{spec.path}.{positions}.weight")
        self.layers = [self._layer(index) for index in range(len(spec.rules))]
        self.last_norm = self._norm(f"{spec.path}.{self.family.last_norm}")
        self.frequencies = {
            name: _as_tensor(tensors.pop(name)) for name in list(tensors) if "inv_freq." in name
        }
        self.unplaced = sorted(tensors)
        self.vocab_size, self.hidden_size = self.lm_head.weight.shape
        sizes = {(*layer.projection.names.values(), *layer.output.weight.shape) for layer in self.layers}
        if len(sizes) != 1:
            raise ValueError("its layers have different sizes")
        first = self.layers[0]
        query_width = first.output.weight.shape[1]
        key_width = (len(first.projection.weight) - query_width) // 2
        self.widths = [query_width, key_width, key_width]
        self.num_heads, self.num_kv_heads = query_width // spec.head_dim, key_width // spec.head_dim
        self.graphs: StepGraphs | None = None

    @property
    def kv_shapes(self) -> dict[int, tuple[tuple[int, ...], tuple[int, ...]]]:
        """Shapes of one token's keys and values, by layer."""
        shape = (self.num_kv_heads, self.spec.head_dim)
        return {layer.index: (shape, shape) for layer in self.layers}

    def new_pool(self, num_slots: int) -> KVPool:
        """Return a KV cache with every layer of this decoder allocated."""
        pool = KVPool(num_slots)
        pool.lay_out(self.kv_shapes, partial(torch.zeros, dtype=self.kv_dtype, device=self.device))
        return pool

    def check_lora(self, lora: LoraWeights) -> None:
        """Check that every layer that `lora` changes supports LoRA weights, and prepare `lora` for steps.

        Raises:
            UnsupportedModelError: `lora` changes a layer that does not support LoRA weights.
        """
        for name in lora.parts:
            if name.startswith(f"{self.spec.path}.") and name not in self._parts:
                raise UnsupportedModelError(f"lora {lora.name!r} changes {name}, which is not supported")
        self.make_room(lora)

    def make_room(self, lora: LoraWeights) -> None:
        """Prepare `lora` for steps with the base weights."""
        self.loras.bind(lora, self._own_layer)

    def record_on(self, pool: KVPool, max_len: int) -> None:
        """Run decode steps on `pool` as CUDA graphs from now on, unless the model has experts."""
        if self.device.type == "cuda" and all(layer.experts is None for layer in self.layers):
            self.graphs = StepGraphs(self.forward, pool, max_len, self.device)

    def plan(self, pool: KVPool, batch: StepBatch) -> SpanPlan:
        """Return the plan of a scheduled step."""
        return SpanPlan(pool, batch.context_slots, np.diff(batch.starts).tolist(), self.device)

    def all_plans(self, pool: KVPool, prompts: Sequence[Array]) -> Iterator[tuple[list[int], SpanPlan]]:
        """Yield three plans for `prompts`: whole prompts, their second halves, and their last tokens.

        The first plan fills the cache. `prompts` has the slots of each prompt's tokens. Each is yielded as a
        pair: for every prompt, the index of the first token that the plan runs; and the plan.
        """
        contexts = [slots.astype(np.int32) for slots in prompts]
        for starts in (
            [0 for _ in contexts],
            [len(slots) // 2 for slots in contexts],
            [len(slots) - 1 for slots in contexts],
        ):
            lengths = [len(slots) - start for slots, start in zip(contexts, starts, strict=True)]
            yield starts, SpanPlan(pool, contexts, lengths, self.device)

    @torch.inference_mode()
    def __call__(
        self,
        token_ids: NDArray[Any],
        positions: NDArray[Any],
        plan: SpanPlan,
        *,
        is_long: bool = False,
        capture: Capture | None = None,
    ) -> Tensor:
        """Run packed tokens; return their final hidden states, (num_tokens, hidden size) float32.

        Args:
            token_ids: (num_tokens,) integers.
            positions: (num_tokens,) integers, position of each token in its text.
            plan: KV cache slot of each token, and the context that the token attends to.
            is_long: use the long rotary frequencies (longrope).
            capture: activations to keep; such a step is not recorded.
        """
        graphs = None if self.loras.groups or capture is not None else self.graphs
        if graphs is not None and graphs.can_run(plan):
            return graphs.run(token_ids, positions, plan, is_long=is_long)
        arrays = step_arrays(plan, token_ids, positions, self.num_heads, self.num_kv_heads)
        return self.forward(arrays, plan.pool, is_long=is_long, capture=capture)

    @torch.inference_mode()
    def head(self, hidden: Tensor, lora: LoraWeights | None = None) -> Tensor:
        """Return float32 logits (rows, vocabulary) of states (rows, hidden size); all rows use `lora`."""
        logits = self.lm_head(norm(hidden, None, self._new_pieces(*hidden.shape)))
        if lora is not None:
            with self.loras.only(lora, len(hidden)):
                self.loras.add_(self.spec.head, logits, hidden)
        factors = self.spec.factors
        if factors.logits != 1.0:
            logits *= factors.logits
        if factors.softcap is not None:
            logits = torch.tanh(logits.div_(factors.softcap)).mul_(factors.softcap)
        return logits

    @torch.inference_mode()
    def normed(self, hidden: Array) -> Tensor:
        """Apply the final norm to float32 states (rows, hidden size)."""
        rows = torch.from_numpy(hidden).to(self.device)
        return norm(rows, self.last_norm, rows)

    def forward(
        self, step: StepArrays, pool: KVPool, *, is_long: bool, capture: Capture | None = None
    ) -> Tensor:
        """Run a step whose arrays are on the device; return the final hidden states.

        The host waits for the device only in layers with experts, and for a capture.
        """
        ids, places = step.token_ids.long(), step.positions.long()
        hidden = self._embedded(ids, places)
        rotary = self._rotary(places, is_long=is_long)
        factors = self.spec.factors
        scales = None
        if factors.queries is not None:
            beta, length = factors.queries
            scales = 1 + beta * torch.log(1 + torch.floor(places.float() / length))
        num_rows = len(ids)
        normed, other = (self._new_pieces(num_rows, self.hidden_size) for _ in range(2))
        query = hidden.new_empty(num_rows, self.num_heads, self.spec.head_dim)
        attended = self._new_pieces(num_rows, self.widths[0])
        norm(hidden, self.layers[0].before_attention, normed)
        for layer in self.layers:
            if capture is not None and layer.index in capture.layers:
                capture.keep(layer.index, hidden.cpu().numpy())
            mlp_rows = normed
            if self.spec.is_parallel and layer.before_mlp is not None:
                mlp_rows = norm(hidden, layer.before_mlp, other)
            kept = pool.keys[layer.index], pool.values[layer.index]
            self._project(layer, normed, rotary, kept, step.slots, query, scales)
            for tiles in step.tiles:
                attend(query, kept, tiles, layer.rule, attended)
            if self.spec.is_parallel:
                self._add(layer.output, attended, hidden, after=layer.after_attention)
            else:
                self._add(
                    layer.output, attended, hidden, layer.before_mlp, normed, after=layer.after_attention
                )
            is_last = layer.index + 1 == len(self.layers)
            following = None if is_last else self.layers[layer.index + 1].before_attention
            route = None
            if capture is not None and layer.experts is not None:
                route = partial(
                    capture.route, sum(one.experts is not None for one in self.layers[: layer.index])
                )
            self._feed_forward(layer, mlp_rows, hidden, following, None if is_last else normed, route)
        return norm(hidden, self.last_norm, hidden)

    def state(self) -> dict[str, Tensor]:
        """Return float32 copies of the model's weights on the host, by name in transformers' module."""
        return {name: _as_tensor(one).to("cpu", torch.float32, copy=True) for name, one in self._own.items()}

    def _embedded(self, ids: Tensor, places: Tensor) -> Tensor:
        rows = self.embedding.index_select(0, ids).float()
        if self.loras.groups:
            self.loras.embed_(self.embedding_name, rows, ids)
        if self.spec.factors.embedding != 1.0:
            rows *= self.spec.factors.embedding
        if self.positions is not None:
            rows += self.positions.index_select(0, places).float()
        return rows

    def _rotary(self, places: Tensor, *, is_long: bool) -> dict[str, tuple[Tensor, Tensor]]:
        """Return cosines and sines, (num_tokens, pairs) each, by name of the rotary frequencies."""
        rotary = {}
        for kind, scaling in self.spec.rotary_scaling.items():
            frequencies = self.frequencies[f"{'long_' if is_long else ''}inv_freq.{kind}"]
            angles = places[:, None].float() * frequencies
            rotary[kind] = angles.cos() * scaling, angles.sin() * scaling
        return rotary

    def _head_places(self) -> tuple[tuple[int, int, int], int]:
        """Return the offsets of the first query, key and value in a projected row, and the head stride."""
        head_dim = self.spec.head_dim
        if self.family.is_by_head:
            return (0, head_dim, 2 * head_dim), 3 * head_dim
        return (0, self.widths[0], self.widths[0] + self.widths[1]), head_dim

    def _new_pieces(self, num_rows: int, width: int) -> Tensor:
        return torch.empty(self.num_pieces, num_rows, width, dtype=torch.bfloat16, device=self.device)

    def _product(self, layer: Linear, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the partial products of a layer for the pieces `x`, which are to be added up, and its bias.

        If LoRA weights are in use, there is one product, which includes the bias and each row's LoRA product.
        """
        if not self.loras.groups:
            return linear_parts(x, layer.weight), layer.bias
        out, rows = layer(x), join(x)
        start = 0
        for name, width in layer.names.items():
            self.loras.add_(name, out[:, start : start + width], rows)
            start += width
        return out[None], None

    def _project(
        self,
        layer: Layer,
        x: Tensor,
        rotary: dict[str, tuple[Tensor, Tensor]],
        kept: tuple[Tensor, Tensor],
        slots: Tensor,
        query: Tensor,
        query_scales: Tensor | None,
    ) -> None:
        """Compute queries, keys and values from pieces `x`; store keys and values in their slots."""
        norms = layer.head_norms
        if any(one is not None and len(one.weight) != self.spec.head_dim for one in norms):  # over all heads
            projected = self._whole(layer.projection, x)
            for one, part in zip(norms, torch.split(projected, self.widths, dim=1), strict=False):
                norm(part, one, part)
            parts, bias, norms = projected[None], None, (None, None)
        else:
            parts, bias = self._product(layer.projection, x)
        rotate_and_store(
            parts,
            bias,
            *self._head_places(),
            None if layer.rotary is None else rotary[layer.rotary],
            kept,
            slots,
            query,
            norms=norms,
            is_paired=self.family.is_paired,
            query_scales=query_scales,
        )

    def _add(
        self,
        layer: Linear,
        x: Tensor,
        hidden: Tensor,
        following: Norm | None = None,
        out: Tensor | None = None,
        *,
        after: Norm | None,
    ) -> None:
        """Add a layer's product, normalized by `after` if given, to the hidden states, in place.

        If `out` is given, the new hidden states, normalized by `following` if given, are written to it as
        pieces.
        """
        parts, bias = self._product(layer, x)
        factor = 1.0 if after is not None else self.spec.factors.residual
        add(parts, bias, hidden, factor=factor, after=after, following=following, out=out)

    def _feed_forward(
        self,
        layer: Layer,
        x: Tensor,
        hidden: Tensor,
        following: Norm | None,
        out: Tensor | None,
        route: Callable[[Array], Array] | None,
    ) -> None:
        """Add the output of the MLP or the experts for pieces `x` to the hidden states, in place.

        `following` and `out` are as in `_add`; `route` is as in `_add_experts`.
        """
        if layer.experts is not None:
            self._add_experts(layer.experts, x, hidden, route)
        if layer.mlp is not None and layer.shared_gate is None:
            inner = self._gated(*self._product(layer.mlp.inner, x))
            self._add(layer.mlp.down, inner, hidden, following, out, after=layer.after_mlp)
            return
        if layer.mlp is not None and layer.shared_gate is not None:
            gates = self._whole(layer.shared_gate, x).double().sigmoid().float()
            hidden += gates * self._whole(layer.mlp.down, self._gated(*self._product(layer.mlp.inner, x)))
        if out is not None:
            norm(hidden, following, out)

    def _whole(self, layer: Linear, x: Tensor) -> Tensor:
        """Return a layer's product for pieces `x`, (rows, outputs), with each row's LoRA product added."""
        return self._product(layer, x)[0][0] if self.loras.groups else layer(x)

    def _gated(self, parts: Tensor, bias: Tensor | None = None) -> Tensor:
        has_values = self.family.is_gated
        _, num_rows, width = parts.shape
        out = self._new_pieces(num_rows, width // (2 if has_values else 1))
        return gate(parts, bias, self.spec.activation, out, has_values=has_values)

    def _add_experts(
        self, experts: Experts, x: Tensor, hidden: Tensor, route: Callable[[Array], Array] | None
    ) -> None:
        """Add the weighted sum of each row's expert outputs to `hidden`, in order of the experts' numbers.

        `route` is called with the router's choice, and returns the experts to use.
        """
        shares = experts.router(x).double().softmax(-1)
        weights, chosen = shares.topk(self.spec.experts_per_token)
        if route is not None:
            chosen = torch.from_numpy(route(chosen.cpu().numpy())).to(self.device)
            weights = shares.gather(-1, chosen)
        if self.spec.normalises_experts:
            weights /= weights.sum(-1, keepdim=True)
        weights = weights.float()
        for number in torch.unique(chosen).tolist():
            rows, places = torch.where(chosen == number)
            inner = self._gated(linear_parts(x[:, rows].contiguous(), experts.inner[number]))
            hidden.index_add_(0, rows, linear(inner, experts.down[number]) * weights[rows, places, None])

    def _layer(self, index: int) -> Layer:
        family, spec = self.family, self.spec
        prefix = f"{spec.path}.{family.layers}.{index}"
        norms = [self._norm(f"{prefix}.{name}") for name in family.head_norms]
        experts, shared_gate, mlp = None, None, None
        facts = family.experts
        names, down = family.gates, family.down
        has_experts = facts is not None and f"{prefix}.{facts.router}.weight" in self._tensors
        if facts is not None and has_experts:
            experts = Experts(
                self._linear([f"{prefix}.{facts.router}"], takes_lora=False),
                self._take(f"{prefix}.{facts.gates}"),
                self._take(f"{prefix}.{facts.down}"),
            )
            names, down = facts.shared, facts.shared_down
            if facts.shared_gate is not None:
                shared_gate = self._linear([f"{prefix}.{facts.shared_gate}"])
        if not has_experts or shared_gate is not None:
            mlp = FeedForward(
                self._linear([f"{prefix}.{name}" for name in names]), self._linear([f"{prefix}.{down}"])
            )
        rule = spec.rules[index]
        before_attention, after_attention, before_mlp, after_mlp = (
            None if name is None else self._norm(f"{prefix}.{name}")
            for name in family.layer_norms(is_parallel=spec.is_parallel)
        )
        return Layer(
            index=index,
            projection=self._linear([f"{prefix}.{name}" for name in family.projections]),
            head_norms=(norms[0], norms[1]) if norms else (None, None),
            output=self._linear([f"{prefix}.{family.output}"]),
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

    def _linear(self, names: Sequence[str], *, takes_lora: bool = True) -> Linear:
        """Join the linear layers with these module names, and remove their parameters from `tensors`."""
        weights: list[Weight] = []
        biases = []
        is_transposed = self.family.is_transposed and names[0].startswith(
            f"{self.spec.path}.{self.family.layers}."
        )
        for name in names:
            weight = self._tensors.pop(f"{name}.weight")
            weights.append(_as_tensor(weight).T if is_transposed else weight)
            biases.append(self._vector(f"{name}.bias"))
        whole = _joined(weights)
        sizes = [len(part) for part in weights]
        bias = None
        if any(part is not None for part in biases):
            bias = torch.cat(
                [
                    torch.zeros(size, device=self.device) if part is None else part
                    for part, size in zip(biases, sizes, strict=True)
                ]
            )
        made = Linear(dict(zip(names, sizes, strict=True)), whole, bias)
        start = 0
        for name, size in made.names.items():
            if takes_lora:
                self._parts[name] = made, start
            own = made.weight[start : start + size]
            self._own[f"{name}.weight"] = own.T if is_transposed and isinstance(own, torch.Tensor) else own
            start += size
        return made

    def _take(self, name: str) -> Tensor:
        self._own[name] = tensor = _as_tensor(self._tensors.pop(name))
        return tensor

    def _vector(self, name: str) -> Tensor | None:
        return self._take(name).float() if name in self._tensors else None

    def _norm(self, name: str) -> Norm:
        kind = self.family.norm
        is_centred = kind == "layer"
        weight = self._vector(f"{name}.weight")
        if weight is None:
            if self.family.has_norm_weights:
                raise KeyError(f"{name}.weight")
            weight = torch.ones(len(self.embedding[0]), device=self.device)
        bias = self._vector(f"{name}.bias") if is_centred else None
        return Norm(weight + 1.0 if kind == "rms from one" else weight, bias, self.spec.epsilon, is_centred)

    def _own_layer(self, name: str) -> OwnLayer:
        made, start = self._parts[name]
        bias = (
            None if made.bias is None else made.bias[start : start + made.names.get(name, len(made.weight))]
        )
        return OwnLayer(made, start, bias)


def _as_tensor(weight: Weight) -> Tensor:
    """Return quantized weights as float32, and others as they are."""
    return weight if isinstance(weight, torch.Tensor) else weight.float()


def _joined(parts: Sequence[Weight]) -> Weight:
    """Concatenate the outputs of all parts in one contiguous matrix of the smallest exact format."""
    if len({part.shape[1] for part in parts}) != 1:
        raise ValueError("linear layers of one product have different numbers of inputs")
    blocks = [part for part in parts if isinstance(part, BlockWeight)]
    if len(blocks) == len(parts) and (whole := joined(blocks)) is not None:
        return whole
    floats = [part if isinstance(part, torch.Tensor) else narrowed(part.float()) for part in parts]
    dtype = max((part.dtype for part in floats), key=_digits)
    return torch.cat([part.to(dtype) for part in floats]).contiguous()


def _digits(dtype: torch.dtype) -> int:
    """Return the precision rank of a weight dtype; joined layers use the dtype with the highest rank."""
    return (torch.bfloat16, torch.float16, torch.float32).index(dtype)
