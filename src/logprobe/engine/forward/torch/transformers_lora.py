"""LoRA weights in decoders that compute with torch tensors; see `lora`."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn

from logprobe.engine.forward.cpu.lora import LoraRows
from logprobe.engine.forward.torch.transformers_linear import PanelEmbedding, PanelLinear
from logprobe.kernels.placement import as_tensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from logprobe.kernels.arrays import Array
    from logprobe.models.lora import Dense, LoraWeights, LowRank


def by_torch(part: Dense | LowRank, x: torch.Tensor) -> torch.Tensor:
    """Multiply `x`, (M, inputs), by the matrices of `part` with torch; return (M, outputs).

    Works on any device and dtype. A row's bits may depend on the other rows.
    """
    for matrix in part.matrices:
        x = x @ matrix
    return x


class TensorLoraRows(LoraRows):
    """The LoRA weights that each row of the current step uses, for decoders that compute with tensors."""

    def __init__(
        self,
        device: torch.device | str,
        dtype: torch.dtype,
        multiply: Callable[[Dense | LowRank, torch.Tensor], torch.Tensor] = by_torch,
    ) -> None:
        """Create an instance without LoRA weights.

        Args:
            device: device of the decoder.
            dtype: dtype of the decoder's layers.
            multiply: multiplies rows with the matrices of LoRA weights.
        """
        super().__init__(multiply)
        self._device, self._dtype = device, dtype

    def _values(self, values: Array) -> torch.Tensor:
        tensor: torch.Tensor = as_tensor(values).to(self._device, self._dtype)
        return tensor

    def _indices(self, rows: Array) -> torch.Tensor:
        return torch.from_numpy(rows).to(self._device)

    def _add(self, out: torch.Tensor, rows: torch.Tensor, product: torch.Tensor, factor: float) -> None:
        if len(rows) == len(out) and factor == 1.0:
            out += product
        else:  # row by row: with a factor, the tail of a vector loop may round differently
            out.index_add_(0, rows, product, alpha=factor)


class LoraLinear(nn.Module):
    """Wraps a linear layer in a transformers model, and adds each row's LoRA product to the output."""

    def __init__(self, linear: nn.Module, name: str, rows: TensorLoraRows) -> None:
        super().__init__()
        self.linear = linear
        self._name, self._rows = name, rows

    @property
    def weight(self) -> torch.Tensor:
        """The base layer's weight, for modules that read it directly."""
        weight: torch.Tensor = self.linear.weight  # type: ignore[assignment]
        return weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (..., out_features) for `x` of shape (..., in_features)."""
        out: torch.Tensor = self.linear(x)
        self._rows.add_(self._name, out.view(-1, out.shape[-1]), x.reshape(-1, x.shape[-1]))
        return out


class LoraEmbedding(nn.Module):
    """Wraps the input embedding in a transformers model, and applies each row's LoRA weights."""

    def __init__(self, embedding: nn.Module, name: str, rows: TensorLoraRows) -> None:
        super().__init__()
        self.embedding = embedding
        self._name, self._rows = name, rows
        self._scale = float(getattr(embedding, "embed_scale", 1.0))

    @property
    def weight(self) -> torch.Tensor:
        """The base embedding's weight, for modules that read it directly."""
        weight: torch.Tensor = self.embedding.weight  # type: ignore[assignment]
        return weight

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of `token_ids`, with shape `(*token_ids.shape, hidden size)`."""
        out: torch.Tensor = self.embedding(token_ids)
        if self._rows.groups:
            out = out.clone()
            rows = out.view(-1, out.shape[-1])
            self._rows.embed_(self._name, rows, token_ids.reshape(-1), scale=self._scale)
        return out


@dataclass(frozen=True, slots=True)
class ModuleLayer:
    """Base weights of a layer in a transformers model, with the interface that `models.lora.bound` needs."""

    module: Any

    @property
    def bias(self) -> torch.Tensor | None:
        """The layer's bias, (out_features,), or None."""
        bias: torch.Tensor | None = getattr(self.module, "bias", None)
        return bias

    def rows(self, start: int, end: int) -> torch.Tensor:
        """Return rows [start, end) of the weight matrix, (end - start, inputs)."""
        rows: torch.Tensor
        if isinstance(self.module, PanelLinear | PanelEmbedding):
            rows = self.module.rows(start, end)
        else:
            rows = self.module.weight[start:end]
        return rows


@final
class LoraRoom:
    """Wraps the layers of a transformers model that LoRA weights change; may be used while steps run."""

    def __init__(self, model: Any, rows: TensorLoraRows, head: Any) -> None:
        self._model, self._rows, self._head = model, rows, head
        self._lock = threading.Lock()

    def make(self, lora: LoraWeights) -> None:
        """Prepare `lora`, which must fit the model's shapes, and wrap the layers that `lora` changes."""
        with self._lock:
            self._rows.bind(lora, self._own_layer)
            for name in lora.parts:
                module = self._model.get_submodule(name)
                if isinstance(module, LoraLinear | LoraEmbedding):
                    continue
                kind = LoraEmbedding if name == lora.embedding else LoraLinear
                wrapped = kind(module, name, self._rows)
                self._model.set_submodule(name, wrapped)
                if name == lora.head:
                    self._head.set_submodule(name, wrapped)

    def _own_layer(self, name: str) -> ModuleLayer:
        module = self._model.get_submodule(name)
        if isinstance(module, LoraLinear):
            module = module.linear
        elif isinstance(module, LoraEmbedding):
            module = module.embedding
        return ModuleLayer(module)
