"""LoRA weights in decoders that compute with torch tensors; see `lora`."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, final
from weakref import WeakKeyDictionary

import torch
from torch import nn

from logprobe.engine.forward.torch.transformers_linear import PanelEmbedding, PanelLinear
from logprobe.kernels.placement import as_tensor
from logprobe.models.lora import bound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from logprobe.engine.protocol import StepBatch
    from logprobe.kernels.arrays import Array
    from logprobe.models.lora import Dense, LoraWeights, LowRank, OwnLayer

Groups: TypeAlias = "list[tuple[LoraWeights, torch.Tensor]]"
"""LoRA weights, each with the indices of the packed tokens that use them, (num_rows,) int64."""


def by_torch(part: Dense | LowRank, x: torch.Tensor) -> torch.Tensor:
    """Return the product of (M, inputs) `x` with the matrices of `part`, (M, outputs), by torch.

    Works on any device and dtype. A row's bits may depend on the other rows.
    """
    for matrix in part.matrices:
        x = x @ matrix
    return x


class TensorLoraRows:
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
        self.groups: Groups = []
        self._device, self._dtype = device, dtype
        self._multiply = multiply
        self._bound: WeakKeyDictionary[LoraWeights, dict[str, LowRank]] = WeakKeyDictionary()

    def bind(self, lora: LoraWeights, own_layer: Callable[[str], OwnLayer]) -> dict[str, LowRank]:
        """Combine `lora` with the base layers that it changes, at its first use, and cache the result.

        Args:
            lora: the LoRA weights.
            own_layer: returns the base layer of a module name.

        Returns:
            The LoRA's matrices by module name.
        """
        if lora not in self._bound:
            parts = bound(lora, own_layer)
            self._bound[lora] = {name: part.mapped(self._tensor) for name, part in parts.items()}
        return self._bound[lora]

    def _tensor(self, values: Array) -> torch.Tensor:
        tensor: torch.Tensor = as_tensor(values).to(self._device, self._dtype)
        return tensor

    def select(self, batch: StepBatch) -> None:
        """Set which rows use which LoRA weights in the next step."""
        rows: dict[int, list[torch.Tensor]] = {}
        loras: dict[int, LoraWeights] = {}
        for index, lora in enumerate(batch.loras):
            if lora is not None:
                span = batch.span(index)
                loras[lora.number] = lora
                rows.setdefault(lora.number, []).append(torch.arange(span.start, span.stop))
        self.groups = [(loras[number], torch.cat(parts).to(self._device)) for number, parts in rows.items()]

    @contextmanager
    def only(self, lora: LoraWeights | None, num_rows: int) -> Iterator[None]:
        """Use `lora` for rows [0, num_rows) within the `with` block; None: no row uses LoRA weights."""
        groups = self.groups
        self.groups = [] if lora is None else [(lora, torch.arange(num_rows, device=self._device))]
        try:
            yield
        finally:
            self.groups = groups

    def change(self, names: Sequence[str]) -> bool:
        """Return True if the LoRA weights of any row change one of the layers with these module names."""
        return any(name in lora.parts for lora, _ in self.groups for name in names)

    def add_(
        self,
        name: str,
        out: torch.Tensor,
        x: torch.Tensor,
        *,
        columns: slice = slice(None),
        factor: float = 1.0,
        linear: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """Add `factor` times the LoRA product of each row of `x` to `out`, in place.

        Args:
            name: module name of the linear layer.
            out: (num_tokens, outputs).
            x: (num_tokens, inputs).
            columns: the slice of the layer's outputs that `out` holds.
            factor: multiplies the LoRA product.
            linear: computes the base layer's product; needed if `out` holds more than that product.
        """
        for lora, rows in self.groups:
            part = self._part(lora, name)
            if part is None:  # the adapter does not change this layer
                continue
            is_whole = len(rows) == len(x)
            inputs = x if is_whole else x.index_select(0, rows)
            product = self._multiply(part, inputs)[:, columns]
            if part.weight is not None:  # the output head, whose weight this LoRA replaces
                own = self._multiply(part.weight, inputs)
                out[rows] = own
            elif part.gain is not None:
                own = out[rows] if linear is None else linear(inputs)
            # Separate multiply and add: a fused one may round differently in the tail of a vector loop.
            if part.gain is not None:
                product = product + own * part.gain[columns]
            if part.shift is not None:
                product = product + part.shift[columns]
            if is_whole and factor == 1.0:
                out += product
            else:  # row by row: with a factor, the tail of a vector loop may round differently
                out.index_add_(0, rows, product, alpha=factor)

    def embed_(self, name: str, out: torch.Tensor, token_ids: torch.Tensor, *, scale: float = 1.0) -> None:
        """Apply the LoRA weights of each row to the row's embedding, in place.

        Args:
            name: module name of the embedding.
            out: (num_tokens, hidden size), the embeddings, already multiplied by `scale`.
            token_ids: (num_tokens,) integers.
            scale: factor that the embeddings in `out` were multiplied by.
        """
        for lora, rows in self.groups:
            part = self._part(lora, name)
            if part is None:
                continue
            ids = token_ids.index_select(0, rows)
            own = out[rows] if part.weight is None else part.weight.values[ids] * scale
            if part.up.shape[0]:
                added = self._multiply(part.last, part.down[ids]) * scale
                own = (own if part.gain is None else own + own * part.gain) + added
            out[rows] = own

    def _part(self, lora: LoraWeights, name: str) -> LowRank | None:
        return self._bound[lora].get(name)


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
