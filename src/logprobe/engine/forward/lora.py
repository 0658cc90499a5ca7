"""LoRA weights in the forward pass: rows of one step, each under those that its request names.

A linear layer that some weights change is wrapped once. Each step tells the wrappers which rows run under
which weights; rows without any, and steps without any, take the model's own path untouched.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, TypeAlias, final

import torch
from torch import nn
from torch.nn import functional

from logprobe.engine.layers.packed import added

if TYPE_CHECKING:
    from logprobe.engine.protocol import StepBatch
    from logprobe.models.lora import LoraWeights

Groups: TypeAlias = "list[tuple[LoraWeights, torch.Tensor]]"
"""Weights → their rows of the step's packed tokens, (num_rows,) int64."""


class StepRows:
    """Which rows of the present step run under which weights; shared by all wrappers."""

    def __init__(self) -> None:
        self.groups: Groups = []


class LoraLinear(nn.Module):
    """A linear layer, plus each row's own low-rank product; `name` is the layer's in the model."""

    def __init__(self, linear: nn.Module, name: str, rows: StepRows) -> None:
        super().__init__()
        self.linear = linear
        self._name = name
        self._rows = rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in_features) → (..., out_features)."""
        out: torch.Tensor = self.linear(x)
        self.add_lora_(out.view(-1, out.shape[-1]), x.reshape(-1, x.shape[-1]))
        return out

    def add_lora_(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Add what the weights make of `x`, (num_tokens, in_features), to `out`, one row a token too."""
        for lora, rows in self._rows.groups:
            part = lora.parts.get(self._name)  # they may leave this layer alone
            if part is not None:
                out.index_add_(0, rows, x.index_select(0, rows) @ part.down @ part.up)

    def activated(self, x: torch.Tensor, name: str, algorithm: str) -> torch.Tensor:
        """`forward` and an activation, for a fused MLP around it; fused itself while no LoRA weights run."""
        linear: Any = self.linear
        if not self._rows.groups:
            out: torch.Tensor = linear.activated(x, name, algorithm)
            return out
        return (
            functional.silu(self(x)) if name == "swish" else functional.gelu(self(x), approximate=algorithm)
        )

    def multiplied(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """`forward` times `factor`, likewise."""
        linear: Any = self.linear
        if not self._rows.groups:
            out: torch.Tensor = linear.multiplied(x, factor)
            return out
        product: torch.Tensor = self(x)
        return product.mul_(factor.view_as(product))

    def added(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """`forward` plus `residual`, likewise."""
        if not self._rows.groups:
            return added(self.linear, x, residual)
        product: torch.Tensor = self(x)
        return product.add_(residual)


@final
class Loras:
    """Room for LoRA weights in one model's layers; it may be made on any thread while steps run."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._rows = StepRows()
        self._lock = threading.Lock()

    def make_room(self, lora: LoraWeights) -> None:
        """Let weights that were loaded for this model or one of its shape run."""
        with self._lock:
            for module_name in lora.parts:
                self._wrap(module_name)

    def close(self) -> None:
        """Let the model go."""
        self._model = None

    def select(self, batch: StepBatch) -> None:
        """Note which rows of the step about to run run under which weights; none where the batch has none."""
        rows: dict[int, list[torch.Tensor]] = {}
        loras: dict[int, LoraWeights] = {}
        for index, lora in enumerate(batch.loras):
            if lora is not None:
                span = batch.span(index)
                loras[lora.number] = lora
                rows.setdefault(lora.number, []).append(torch.arange(span.start, span.stop))
        device = self._model.device
        self._rows.groups = [(loras[number], torch.cat(parts).to(device)) for number, parts in rows.items()]

    def _wrap(self, module_name: str) -> None:
        parent_name, _, name = module_name.rpartition(".")
        parent: Any = self._model.get_submodule(parent_name)
        module = getattr(parent, name)
        if not isinstance(module, LoraLinear):
            setattr(parent, name, LoraLinear(module, module_name, self._rows))
