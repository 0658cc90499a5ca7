"""Access to a model's weights by the names of its modules."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of one module; they are converted to float64 when they are read."""

    arrays: Mapping[str, NDArray[Any]]  # every weight of the model, by full name
    module: str = ""  # names are relative to this module
    is_transposed: bool = False  # matrices are stored as (inputs, outputs), else as (outputs, inputs)

    def within(self, name: str, *, is_transposed: bool = False) -> Weights:
        """Return the weights of submodule `name`; matrices are stored as `is_transposed` says."""
        return replace(self, module=self._full(name), is_transposed=is_transposed)

    def __contains__(self, name: str) -> bool:
        return self._full(name) in self.arrays

    def __getitem__(self, name: str) -> Array:
        return self.arrays[self._full(name)].astype(np.float64)

    def get(self, name: str) -> Array | None:
        """Return the weight with this name; None if the model does not have it."""
        array = self.arrays.get(self._full(name))
        return None if array is None else array.astype(np.float64)

    def rows(self, name: str, indices: NDArray[np.int64]) -> Array:
        """Return rows of a matrix, (len(indices), columns)."""
        return self.arrays[self._full(name)][indices].astype(np.float64)

    def linear(self, name: str, x: Array) -> Array:
        """Return x · Wᵀ + b of the linear layer `name`: (positions, inputs) → (positions, outputs)."""
        weight, bias = self[f"{name}.weight"], self.get(f"{name}.bias")
        outputs = x @ (weight if self.is_transposed else weight.T)
        return outputs if bias is None else outputs + bias

    def _full(self, name: str) -> str:
        return f"{self.module}.{name}" if self.module else name
