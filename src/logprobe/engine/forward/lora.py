"""LoRA weights in the forward pass: rows of one step, each under those that its request names.

Each step says which rows run under which weights; rows without any, and steps without any, take the model's
own path untouched.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, TypeAlias, final

import torch
from torch import nn

from logprobe.kernels.layers.panels import panel_stage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from logprobe.engine.protocol import StepBatch
    from logprobe.models.lora import LoraWeights, LowRank

Groups: TypeAlias = "list[tuple[LoraWeights, torch.Tensor]]"
"""Weights → their rows of the step's packed tokens, (num_rows,) int64."""
MOST_OF_A_THREAD = 1 << 18  # multiply-adds that one does before a second one would have begun


def by_torch(part: LowRank, x: torch.Tensor) -> torch.Tensor:
    """(M, inputs) → (M, outputs), in any dtype and on any device; bits of a row depend on the others."""
    return x @ part.down @ part.up


def by_panels(part: LowRank, x: torch.Tensor) -> torch.Tensor:
    """The same by the kernels of the model's own layers (CPU, float32): bits of a row are its own."""
    num_rows = len(x)
    for panels in part.panels:
        out = x.new_empty(num_rows, panels.num_outputs)
        is_small = num_rows * panels.num_inputs * panels.num_outputs <= MOST_OF_A_THREAD
        panel_stage(x, panels, out).run(num_threads=1 if is_small else None)
        x = out
    return x


class LoraRows:
    """Which rows of the present step run under which weights."""

    def __init__(self, multiply: Callable[[LowRank, torch.Tensor], torch.Tensor] = by_torch) -> None:
        self.groups: Groups = []
        self._multiply = multiply

    def select(self, batch: StepBatch, device: torch.device | str) -> None:
        """Note which rows of the step about to run run under which weights; none where the batch has none."""
        rows: dict[int, list[torch.Tensor]] = {}
        loras: dict[int, LoraWeights] = {}
        for index, lora in enumerate(batch.loras):
            if lora is not None:
                span = batch.span(index)
                loras[lora.number] = lora
                rows.setdefault(lora.number, []).append(torch.arange(span.start, span.stop))
        self.groups = [(loras[number], torch.cat(parts).to(device)) for number, parts in rows.items()]

    def change(self, names: Sequence[str]) -> bool:
        """Whether some row's weights change one of these layers."""
        return any(name in lora.parts for lora, _ in self.groups for name in names)

    def add_(
        self,
        name: str,
        out: torch.Tensor,
        x: torch.Tensor,
        *,
        columns: slice = slice(None),
        factor: float = 1.0,
    ) -> None:
        """Add `factor` times what the weights make of `x` to `out`.

        Args:
            name: of the linear layer, by its place in the model.
            out: (num_tokens, outputs).
            x: (num_tokens, inputs).
            columns: the outputs of the layer that `out` has.
            factor: see above.
        """
        for lora, rows in self.groups:
            part = lora.parts.get(name)  # they may leave this layer alone
            if part is not None:
                is_whole = len(rows) == len(x)
                product = self._multiply(part, x if is_whole else x.index_select(0, rows))[:, columns]
                if is_whole and factor == 1.0:
                    out += product
                else:  # a row by itself: a factor rounds otherwise at the end of a vector
                    out.index_add_(0, rows, product, alpha=factor)


class LoraLinear(nn.Module):
    """A linear layer of transformers' module, plus each row's own low-rank product."""

    def __init__(self, linear: nn.Module, name: str, rows: LoraRows) -> None:
        super().__init__()
        self.linear = linear
        self._name, self._rows = name, rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in_features) → (..., out_features)."""
        out: torch.Tensor = self.linear(x)
        self._rows.add_(self._name, out.view(-1, out.shape[-1]), x.reshape(-1, x.shape[-1]))
        return out


@final
class LoraRoom:
    """Room for LoRA weights in transformers' module; it may be made on any thread while steps run."""

    def __init__(self, model: Any, rows: LoraRows) -> None:
        self._model, self._rows = model, rows
        self._lock = threading.Lock()

    def make(self, lora: LoraWeights) -> None:
        """Let weights that were loaded for this model or one of its shape run."""
        with self._lock:
            for name in lora.parts:
                parent_name, _, own_name = name.rpartition(".")
                parent: Any = self._model.get_submodule(parent_name)
                module = getattr(parent, own_name)
                if not isinstance(module, LoraLinear):
                    setattr(parent, own_name, LoraLinear(module, name, self._rows))
