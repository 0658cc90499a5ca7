"""LoRA weights in the forward pass: the rows of one step may use different LoRA weights.

`LoraRows.select` assigns LoRA weights to rows before each step. Rows without LoRA weights get the same result
as in a step without any. The native decoder computes with NumPy arrays; `transformers_lora` has a subclass
for decoders that compute with torch tensors.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np

from logprobe.kernels.layers.panels import panel_stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from logprobe.engine.protocol import StepBatch
    from logprobe.kernels.arrays import Array
    from logprobe.models.lora import Dense, LoraWeights, LowRank, OwnLayer

Groups: TypeAlias = "list[tuple[LoraWeights, Any]]"
"""LoRA weights, each with the indices of the packed tokens that use them, (num_rows,) int64."""
MAX_OF_A_THREAD = 1 << 18  # up to this many multiply-adds, one thread is faster than several


def by_panels(part: Dense | LowRank, x: Array, arithmetic: str = "fma") -> Array:
    """Multiply `x` (M, inputs) by the matrices of `part`; return (M, outputs) float32.

    A row's bits do not depend on the other rows. `arithmetic` is `fma` or `bf16x3`.
    """
    num_rows = len(x)
    if not part.panels:
        return np.zeros((num_rows, part.matrices[-1].shape[1]), np.float32)
    for panels in part.panels:
        out = np.empty((num_rows, panels.num_outputs), np.float32)
        is_small = num_rows * panels.num_inputs * panels.num_outputs <= MAX_OF_A_THREAD
        stage = panel_stage(x, panels.multiplied_by(arithmetic), out)
        stage.run(num_threads=1 if is_small else None)
        x = out
    return x


class LoraRows:
    """The LoRA weights that each row of the current step uses.

    `multiply` and the methods with a leading underscore depend on the type of the decoder's arrays. All other
    code is the same for NumPy arrays and torch tensors.
    """

    def __init__(self, multiply: Callable[[Dense | LowRank, Any], Any]) -> None:
        """Create an instance without LoRA weights; `multiply` multiplies rows with matrices."""
        self.groups: Groups = []
        self._multiply = multiply
        self._bound: WeakKeyDictionary[LoraWeights, dict[str, LowRank]] = WeakKeyDictionary()

    def bind(self, lora: LoraWeights, own_layer: Callable[[str], OwnLayer]) -> dict[str, LowRank]:
        """Combine `lora` with the base layers that it changes; the result is cached after the first call.

        Args:
            lora: the LoRA weights.
            own_layer: returns the base layer of a module name.

        Returns:
            The LoRA's matrices by module name.
        """
        if lora not in self._bound:
            from logprobe.models.lora import bound

            parts = bound(lora, own_layer)
            self._bound[lora] = {name: part.mapped(self._values) for name, part in parts.items()}
        return self._bound[lora]

    def select(self, batch: StepBatch) -> None:
        """Set which rows use which LoRA weights in the next step."""
        rows: dict[int, list[Array]] = {}
        loras: dict[int, LoraWeights] = {}
        for index, lora in enumerate(batch.loras):
            if lora is not None:
                span = batch.span(index)
                loras[lora.number] = lora
                rows.setdefault(lora.number, []).append(np.arange(span.start, span.stop))
        self.groups = [
            (loras[number], self._indices(np.concatenate(parts))) for number, parts in rows.items()
        ]

    @contextmanager
    def only(self, lora: LoraWeights | None, num_rows: int) -> Iterator[None]:
        """Use `lora` for rows [0, num_rows) within the `with` block; None: no row uses LoRA weights."""
        groups = self.groups
        self.groups = [] if lora is None else [(lora, self._indices(np.arange(num_rows)))]
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
        out: Any,
        x: Any,
        *,
        columns: slice = slice(None),
        factor: float = 1.0,
        linear: Callable[[Any], Any] | None = None,
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
            inputs = x if len(rows) == len(x) else x[rows]
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
            self._add(out, rows, product, factor)

    def embed_(self, name: str, out: Any, token_ids: Any, *, scale: float = 1.0) -> None:
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
            ids = token_ids[rows]
            own = out[rows] if part.weight is None else part.weight.values[ids] * scale
            if part.up.shape[0]:
                added = self._multiply(part.last, part.down[ids]) * scale
                own = (own if part.gain is None else own + own * part.gain) + added
            out[rows] = own

    def _part(self, lora: LoraWeights, name: str) -> LowRank | None:
        return self._bound[lora].get(name)

    def _values(self, values: Array) -> Any:
        """Return LoRA values as the decoder's kind of array."""
        return values

    def _indices(self, rows: Array) -> Any:
        """Return indices of rows as the decoder's kind of array."""
        return rows

    def _add(self, out: Any, rows: Any, product: Any, factor: float) -> None:
        """Add `factor` times `product` to the rows of `out` with these indices, in place."""
        if factor != 1.0:
            product = product * factor
        if len(rows) == len(out):
            out += product
        else:
            out[rows] += product
