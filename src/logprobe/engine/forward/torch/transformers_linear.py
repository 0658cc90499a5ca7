"""Modules on packed weight panels that replace linear layers and embeddings of a transformers model (CPU)."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from logprobe.engine.forward.cpu.linear import Linear, dense, embedded, matrices_of_parameters
from logprobe.kernels.arrays import as_array

if TYPE_CHECKING:
    from collections.abc import Mapping

    from logprobe.engine.forward.cpu.linear import Matrix
    from logprobe.kernels.layers.forms import PanelWeights


class PanelLinear(nn.Module):
    """A linear layer on panels that replaces an `nn.Linear` or GPT-2's `Conv1D` in a transformers model."""

    def __init__(self, panels: PanelWeights) -> None:
        super().__init__()
        self._linear = Linear([panels])
        self.in_features, self.out_features = panels.num_inputs, panels.num_outputs
        self.bias = None if panels.bias is None else torch.from_numpy(panels.bias)

    @functools.cached_property
    def weight(self) -> torch.Tensor:
        """The whole weight, (outputs, inputs) float32, for modules that read it directly."""
        return torch.from_numpy(dense(self._linear.parts[0]))

    def rows(self, start: int, end: int) -> torch.Tensor:
        """Return rows [start, end) of the weight, (end - start, inputs) float32."""
        return torch.from_numpy(self._linear.parts[0].rows(np.arange(start, end)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (..., out_features) for `x` of shape (..., in_features)."""
        return torch.from_numpy(self._linear(as_array(x)))


class PanelEmbedding(nn.Module):
    """An embedding on panels that replaces an `nn.Embedding` in a transformers model."""

    def __init__(self, panels: PanelWeights) -> None:
        super().__init__()
        self._panels = panels
        self.num_embeddings, self.embedding_dim = panels.num_outputs, panels.num_inputs
        # transformers reads a model's device and dtype from its first parameter; this may be the only one.
        self.no_weight = nn.Parameter(torch.empty(0), requires_grad=False)

    @functools.cached_property
    def weight(self) -> torch.Tensor:
        """The whole weight, (num_embeddings, embedding_dim) float32, for modules that read it directly."""
        return torch.from_numpy(dense(self._panels))

    def rows(self, start: int, end: int) -> torch.Tensor:
        """Return rows [start, end) of the weight, (end - start, embedding_dim) float32."""
        return torch.from_numpy(self._panels.rows(np.arange(start, end)))

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of `token_ids`, float32, with shape `(*token_ids.shape, embedding_dim)`."""
        return torch.from_numpy(embedded(self._panels, as_array(token_ids)))


def use_panels_(model: nn.Module, panels: Mapping[str, PanelWeights]) -> None:
    """Replace the linear layers and embeddings in a transformers model that have panels, in place.

    `panels` is keyed by full module name. Modules of classes derived from `nn.Linear` or `nn.Embedding` are
    left unchanged.
    """
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if name not in panels:
            continue
        if is_linear(module):
            bias: Any = module.bias
            own = panels[name] if bias is None else panels[name].with_bias(bias)
            model.set_submodule(name, PanelLinear(own))
        elif type(module) is nn.Embedding:
            model.set_submodule(name, PanelEmbedding(panels[name]))


def is_linear(module: object) -> bool:
    """Return True if the module's class is exactly `nn.Linear` or GPT-2's `Conv1D`, not a derived class."""
    return type(module) is nn.Linear or is_transposed(module)


def is_transposed(module: object) -> bool:
    """Return True for GPT-2's `Conv1D`; compares names to avoid importing `transformers.pytorch_utils`."""
    kind = type(module)
    return (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")


def matrices_of(model: nn.Module, *, with_experts: bool) -> list[Matrix]:
    """Return all matrices of a model; see `matrices_of_parameters`.

    Without `with_experts`, 3-D parameters, which hold all experts of a layer, are left out.
    """
    shared: dict[int, list[str]] = {}
    for full_name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.dim() == 2 or (parameter.dim() == 3 and with_experts):
            shared.setdefault(id(parameter), []).append(full_name)
    shapes = {names[0]: tuple(model.get_parameter(names[0]).shape) for names in shared.values()}
    transposed = {f"{name}.weight" for name, module in model.named_modules() if is_transposed(module)}
    return matrices_of_parameters(shapes, {names[0]: names[1:] for names in shared.values()}, transposed)
