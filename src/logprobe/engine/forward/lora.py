"""LoRA weights in the forward pass: rows of one step, each under those that its request names.

Each step says which rows run under which weights; rows without any, and steps without any, take the model's
own path untouched.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, final
from weakref import WeakKeyDictionary

import torch
from torch import nn

from logprobe.engine.forward.linear import PanelEmbedding, PanelLinear
from logprobe.kernels.layers.panels import panel_stage
from logprobe.models.lora import bound

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from logprobe.engine.protocol import StepBatch
    from logprobe.models.lora import Dense, LoraWeights, LowRank, OwnLayer

Groups: TypeAlias = "list[tuple[LoraWeights, torch.Tensor]]"
"""Weights → their rows of the step's packed tokens, (num_rows,) int64."""
MAX_OF_A_THREAD = 1 << 18  # multiply-adds that one does before a second one would have begun


def by_torch(part: Dense | LowRank, x: torch.Tensor) -> torch.Tensor:
    """(M, inputs) → (M, outputs), in any dtype and on any device; bits of a row depend on the others."""
    for matrix in part.matrices:
        x = x @ matrix
    return x


def by_panels(part: Dense | LowRank, x: torch.Tensor) -> torch.Tensor:
    """The same by the kernels of the model's own layers (CPU, float32): bits of a row are its own."""
    num_rows = len(x)
    if not part.panels:
        return x.new_zeros(num_rows, part.matrices[-1].shape[1])
    for panels in part.panels:
        out = x.new_empty(num_rows, panels.num_outputs)
        is_small = num_rows * panels.num_inputs * panels.num_outputs <= MAX_OF_A_THREAD
        panel_stage(x, panels, out).run(num_threads=1 if is_small else None)
        x = out
    return x


class LoraRows:
    """Which rows of the present step run under which weights."""

    def __init__(self, multiply: Callable[[Dense | LowRank, torch.Tensor], torch.Tensor] = by_torch) -> None:
        self.groups: Groups = []
        self._multiply = multiply
        self._bound: WeakKeyDictionary[LoraWeights, dict[str, LowRank]] = WeakKeyDictionary()

    def bind(self, lora: LoraWeights, own_layer: Callable[[str], OwnLayer]) -> dict[str, LowRank]:
        """The parts of weights on the model's own layers, kept for the steps that name them."""
        if lora not in self._bound:
            self._bound[lora] = bound(lora, own_layer)
        return self._bound[lora]

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

    @contextmanager
    def only(self, lora: LoraWeights | None, num_rows: int, device: torch.device | str) -> Iterator[None]:
        """Run all rows under these weights, or none, while the block lasts."""
        groups = self.groups
        self.groups = [] if lora is None else [(lora, torch.arange(num_rows, device=device))]
        try:
            yield
        finally:
            self.groups = groups

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
        linear: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """Add `factor` times what the weights make of `x` to `out`.

        Args:
            name: of the linear layer, by its place in the model.
            out: (num_tokens, outputs).
            x: (num_tokens, inputs).
            columns: the outputs of the layer that `out` has.
            factor: see above.
            linear: the layer itself, where `out` holds more than its product.
        """
        for lora, rows in self.groups:
            part = self._part(lora, name)
            if part is None:  # they may leave this layer alone
                continue
            is_whole = len(rows) == len(x)
            inputs = x if is_whole else x.index_select(0, rows)
            product = self._multiply(part, inputs)[:, columns]
            if part.weight is not None:  # the output head, whose own product is in `out`
                own = self._multiply(part.weight, inputs)
                out[rows] = own
            elif part.gain is not None:
                own = out[rows] if linear is None else linear(inputs)
            # Products and sums one by one: a fused one rounds otherwise at the end of a vector.
            if part.gain is not None:
                product = product + own * part.gain[columns]
            if part.shift is not None:
                product = product + part.shift[columns]
            if is_whole and factor == 1.0:
                out += product
            else:  # a row by itself: a factor rounds otherwise at the end of a vector
                out.index_add_(0, rows, product, alpha=factor)

    def embed_(self, name: str, out: torch.Tensor, token_ids: torch.Tensor, *, scale: float = 1.0) -> None:
        """Bring the embeddings of tokens, (num_tokens, hidden size) times `scale`, under their weights."""
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
    """A linear layer of transformers' module, plus each row's own low-rank product."""

    def __init__(self, linear: nn.Module, name: str, rows: LoraRows) -> None:
        super().__init__()
        self.linear = linear
        self._name, self._rows = name, rows

    @property
    def weight(self) -> torch.Tensor:
        """The layer's own, for the few modules that read it."""
        weight: torch.Tensor = self.linear.weight  # type: ignore[assignment]
        return weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in_features) → (..., out_features)."""
        out: torch.Tensor = self.linear(x)
        self._rows.add_(self._name, out.view(-1, out.shape[-1]), x.reshape(-1, x.shape[-1]))
        return out


class LoraEmbedding(nn.Module):
    """The input embedding of transformers' module, each row under its own weights."""

    def __init__(self, embedding: nn.Module, name: str, rows: LoraRows) -> None:
        super().__init__()
        self.embedding = embedding
        self._name, self._rows = name, rows
        self._scale = float(getattr(embedding, "embed_scale", 1.0))

    @property
    def weight(self) -> torch.Tensor:
        """The layer's own, for the few modules that read it."""
        weight: torch.Tensor = self.embedding.weight  # type: ignore[assignment]
        return weight

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """(...) ids → (..., hidden size)."""
        out: torch.Tensor = self.embedding(token_ids)
        if self._rows.groups:
            out = out.clone()
            rows = out.view(-1, out.shape[-1])
            self._rows.embed_(self._name, rows, token_ids.reshape(-1), scale=self._scale)
        return out


@dataclass(frozen=True, slots=True)
class ModuleLayer:
    """The weights of a layer of transformers' module, as `bound` reads them."""

    module: Any

    @property
    def bias(self) -> torch.Tensor | None:
        """(out_features,)."""
        bias: torch.Tensor | None = getattr(self.module, "bias", None)
        return bias

    def rows(self, start: int, end: int) -> torch.Tensor:
        """Some rows of the matrix."""
        rows: torch.Tensor
        if isinstance(self.module, PanelLinear | PanelEmbedding):
            rows = self.module.rows(start, end)
        else:
            rows = self.module.weight[start:end]
        return rows


@final
class LoraRoom:
    """Room for LoRA weights in transformers' module; it may be made on any thread while steps run."""

    def __init__(self, model: Any, rows: LoraRows, head: Any) -> None:
        self._model, self._rows, self._head = model, rows, head
        self._lock = threading.Lock()

    def make(self, lora: LoraWeights) -> None:
        """Let weights that were loaded for this model or one of its shape run."""
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
