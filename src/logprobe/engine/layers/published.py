"""Linear layers on weights as they were published, each widened to float32 where it is used (CPU, float32).

The products and sums are those of a float32 load up to the order of the sums; only fewer bytes are read. The
same kernels serve one row and a whole prompt. Whatever is swapped here is proven by the probe at load.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import nn

from logprobe.engine.layers.packed import (
    GatedMLP,
    JoinedGatedMLP,
    as_packed_norm,
    children,
    is_gated_mlp,
    is_joined_mlp,
    is_linear,
    reads_weight,
    weight_of,
)
from logprobe.engine.layers.source import mentions
from logprobe.kernels.layers.forms import pack_floats
from logprobe.kernels.layers.panels import PLAIN, Finish, panel_stage
from logprobe.models.stored.panels import reading_order

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from transformers.pytorch_utils import Conv1D

    from logprobe.kernels.layers.forms import PanelWeights
    from logprobe.kernels.threads.parallel import Stage

# transformers' activation class -> the kernel's name for it
_ACTIVATIONS: Final = {
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "GELUTanh": "gelu_tanh",
    "GELUActivation": "gelu",
}
TRIAL_TOKENS = 6
_HALVES: Final = {"gate_up_proj": ("gates", "values")}  # of one layer; each in panels of its own
_JOINED: Final = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}  # what `fuse_` made one of


class PublishedLinear(nn.Module):
    """`nn.Linear` on panels; several, where parts of its outputs are of different forms."""

    def __init__(self, parts: Sequence[PanelWeights]) -> None:
        super().__init__()
        first, *others = parts
        joined = first.joined(others) if others else first
        self.parts = [*parts] if joined is None else [joined]
        self.in_features = first.num_inputs
        self.out_features = sum(part.num_outputs for part in parts)

    def joined(self, others: Sequence[PublishedLinear]) -> PublishedLinear:
        """One layer with the outputs of several, one after another."""
        return PublishedLinear([part for linear in (self, *others) for part in linear.parts])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in_features) → (..., out_features)."""
        return self._run(x)

    def added(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The product plus `residual`, in one pass over the result."""
        return self._run(x, residual.reshape(-1, self.out_features))

    def stages(
        self, x: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None = None
    ) -> Iterator[Stage]:
        """The product of rows, plus `residual`, into `out`, ready to run."""
        widths = [part.num_outputs for part in self.parts]
        summands = [None] * len(widths) if residual is None else torch.split(residual, widths, dim=1)
        for part, target, summand in zip(self.parts, torch.split(out, widths, dim=1), summands, strict=True):
            finish = PLAIN if summand is None else Finish(residual=summand)
            yield panel_stage(x, part, target, finish)

    def _run(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        out = rows.new_empty(len(rows), self.out_features)
        for stage in self.stages(rows, out, residual):
            stage.run()
        return out.view(*x.shape[:-1], self.out_features)


class PublishedGatedMLP(GatedMLP):
    """`down(act(gate(x)) * up(x))` with one pass over the weights of gate and up."""

    def __init__(self, mlp: Any) -> None:
        super().__init__(mlp)
        self.gate_proj, self.up_proj = mlp.gate_proj, mlp.up_proj
        self.act_fn = mlp.act_fn
        (gates,), (values,) = mlp.gate_proj.parts, mlp.up_proj.parts
        self._inner = GatedPanels(gates, values, _ACTIVATIONS[type(mlp.act_fn).__name__])

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        """(..., hidden size) → (..., feed-forward size)."""
        if not type(self.gate_proj) is type(self.up_proj) is PublishedLinear:
            halves: torch.Tensor = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
            return halves  # a lora adds to the halves before they meet
        return self._inner(x)

    def inner_stages(self, x: torch.Tensor, out: torch.Tensor) -> Iterator[Stage]:
        """`inner` of rows into `out`, ready to run."""
        yield self._inner.stage(x, out)


class PublishedJoinedMLP(JoinedGatedMLP):
    """Phi-3's, whose gates and values are the halves of one layer, with one pass over both."""

    def __init__(self, mlp: Any, halves: tuple[PanelWeights, PanelWeights]) -> None:
        super().__init__(mlp)
        self._inner = GatedPanels(*halves, _ACTIVATIONS[type(mlp.activation_fn).__name__])

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        """(..., hidden size) → (..., feed-forward size)."""
        return self._inner(x) if type(self.gate_up_proj) is PublishedLinear else super().inner(x)

    def inner_stages(self, x: torch.Tensor, out: torch.Tensor) -> Iterator[Stage]:
        """`inner` of rows into `out`, ready to run."""
        yield self._inner.stage(x, out)


@dataclass(frozen=True, slots=True)
class GatedPanels:
    """The panels of gates and of the values that they multiply."""

    gates: PanelWeights
    values: PanelWeights
    activation: str

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(..., hidden size) → (..., feed-forward size)."""
        rows = x.reshape(-1, x.shape[-1])
        out = rows.new_empty(len(rows), self.gates.num_outputs)
        self.stage(rows, out).run()
        return out.view(*x.shape[:-1], -1)

    def stage(self, x: torch.Tensor, out: torch.Tensor) -> Stage:
        """The same of rows into `out`, ready to run."""
        return panel_stage(x, self.gates, out, Finish(values=self.values, activation=self.activation))


class PublishedEmbedding(nn.Module):
    """`nn.Embedding` that widens the rows it is asked for, and multiplies them as Gemma does."""

    def __init__(self, weights: PanelWeights, factor: float = 1.0) -> None:
        super().__init__()
        self.weights, self.factor = weights, factor
        self.num_embeddings, self.embedding_dim = weights.num_outputs, weights.num_inputs
        # Transformers asks a model's first parameter for device and dtype, and there may be no other.
        self.no_weight = nn.Parameter(torch.empty(0), requires_grad=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """(...) ids → (..., embedding_dim) float32."""
        ids, places = np.unique(token_ids.reshape(-1).numpy(), return_inverse=True)
        rows = torch.from_numpy(self.weights.rows(ids))
        if self.factor != 1.0:
            rows *= self.factor
        return rows[torch.from_numpy(places)].view(*token_ids.shape, self.embedding_dim)


def publish_(model: nn.Module, kept: Mapping[str, PanelWeights]) -> None:
    """Replace linear layers, embedding and gated MLPs of a model by their forms on panels.

    Args:
        model: float32, its layers fused by now.
        kept: panels by the full name of a linear layer or the embedding, as the model's file had them; what
            is not there is kept in the smallest form of float that holds it exactly.
    """
    packer = _Packer(kept)
    # The embedding first: the file has its name, and a tied head takes its panels.
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            packer.one(name, module.weight)
    for parent_name, parent in list(model.named_modules()):
        for name, module in list(parent.named_children()):
            full_name = f"{parent_name}.{name}" if parent_name else name
            if is_linear(module) and not reads_weight(parent, name):
                setattr(parent, name, PublishedLinear(packer.linear(full_name, module)))
            elif isinstance(module, nn.Embedding):
                panels = packer.one(full_name, module.weight)  # also where only a tied head needs them
                published = PublishedEmbedding(panels, float(getattr(module, "embed_scale", 1.0)))
                if _gives_the_same(published, module) and not _is_read(model, f".{name}.weight"):
                    setattr(parent, name, published)
    for parent, name, module in list(children(model)):
        if (faster := _faster(module)) is not None:
            setattr(parent, name, faster)


def published_forms(model: nn.Module) -> set[str]:
    """The forms of a model's panels."""
    linears = [module for module in model.modules() if isinstance(module, PublishedLinear)]
    return {part.form.name for linear in linears for part in linear.parts}


def _faster(module: nn.Module) -> nn.Module | None:
    """A feed-forward part on panels, or a norm in one kernel; None for every other module."""
    if is_gated_mlp(module, _ACTIVATIONS, linear=PublishedLinear) and _is_of_one_form(module):
        return PublishedGatedMLP(module)
    if is_joined_mlp(module, linear=PublishedLinear) and (halves := _halves(module)) is not None:
        return PublishedJoinedMLP(module, halves)
    return as_packed_norm(module)


def named_panels(model: nn.Module) -> Iterator[tuple[tuple[str, ...], PanelWeights]]:
    """Panels of every linear layer and embedding, packed one by one, with the names of all that share one."""
    names: dict[int, list[str]] = {}
    weights: dict[int, torch.Tensor] = {}
    for name, module in model.named_modules():
        if is_linear(module) or isinstance(module, nn.Embedding):
            for part_name, weight in _packed_as_one(name, weight_of(module)):
                names.setdefault(weight.data_ptr(), []).append(part_name)
                weights[weight.data_ptr()] = weight
    for address in sorted(names, key=lambda address: reading_order(names[address][0])):
        yield tuple(names[address]), pack_floats(weights[address])


def _packed_as_one(name: str, weight: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """A weight, or its halves where a kernel reads these side by side, with their names."""
    words = _HALVES.get(name.rpartition(".")[2])
    if words is None:
        return [(name, weight)]
    return [(f"{name}.{word}", half) for word, half in zip(words, weight.chunk(2), strict=True)]


class _Packer:
    """Panels for the weights of a model, those that are tied packed once."""

    def __init__(self, kept: Mapping[str, PanelWeights]) -> None:
        self._kept = kept
        self._packed: dict[int, PanelWeights] = {}  # by the address of the weight

    def linear(self, name: str, linear: nn.Linear | Conv1D) -> list[PanelWeights]:
        """The panels of a layer, by parts where it was joined of some that the file had."""
        parent, _, last = name.rpartition(".")
        names = [f"{parent}.{part}" for part in _JOINED.get(last, ())]
        if names and all(part in self._kept for part in names):
            parts = [self._kept[part] for part in names]
        else:
            parts = [self.one(part, weight) for part, weight in _packed_as_one(name, weight_of(linear))]
        if linear.bias is None:
            return parts
        biases = torch.split(linear.bias.detach(), [part.num_outputs for part in parts])
        return [part.with_bias(bias) for part, bias in zip(parts, biases, strict=True)]

    def one(self, name: str, weight: torch.Tensor) -> PanelWeights:
        """The panels of one weight."""
        address = weight.data_ptr()
        if address not in self._packed:
            kept = self._kept.get(name)
            self._packed[address] = pack_floats(weight) if kept is None else kept
        return self._packed[address]


def _is_read(model: nn.Module, weight: str) -> bool:
    """Whether the forward pass of any module of a model takes a weight itself."""
    return any(mentions(type(module).forward, weight) for module in model.modules())


@torch.inference_mode()
def _gives_the_same(published: PublishedEmbedding, embedding: nn.Embedding) -> bool:
    ids = torch.arange(min(TRIAL_TOKENS, embedding.num_embeddings))[None]
    return torch.equal(published(ids), embedding(ids))


def _is_of_one_form(mlp: Any) -> bool:
    parts = [*mlp.gate_proj.parts, *mlp.up_proj.parts]
    return len(parts) == 2 and parts[0].form is parts[1].form and parts[0].num_outputs == parts[1].num_outputs


def _halves(mlp: Any) -> tuple[PanelWeights, PanelWeights] | None:
    if type(mlp.activation_fn).__name__ not in _ACTIVATIONS:
        return None
    parts: list[PanelWeights] = mlp.gate_up_proj.parts
    if len(parts) == 1:
        return parts[0].halves()
    gates, values = parts
    return (gates, values) if gates.form is values.form else None
