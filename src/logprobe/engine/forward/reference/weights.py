"""Access to a model's weights by the names of its modules."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    Array = NDArray[np.float64]

PIECE_NUMBERS: Final = 1 << 22  # numbers of a matrix held as float64 at a time


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of one module; they are converted to float64 when they are read."""

    # Every weight of the model by full name: arrays, or objects that read what is indexed from a file.
    arrays: Mapping[str, NDArray[Any]]
    module: str = ""  # names are relative to this module
    is_transposed: bool = False  # matrices are stored as (inputs, outputs), else as (outputs, inputs)

    def within(self, name: str, *, is_transposed: bool = False) -> Weights:
        """Return the weights of submodule `name`; `is_transposed` tells how its matrices are stored."""
        return replace(self, module=self._full(name), is_transposed=is_transposed)

    def __contains__(self, name: str) -> bool:
        return self._full(name) in self.arrays

    def __getitem__(self, name: str) -> Array:
        return self.arrays[self._full(name)][:].astype(np.float64)

    def get(self, name: str) -> Array | None:
        """Return the weight with this name; None if the model does not have it."""
        has_it = self._full(name) in self.arrays
        return self[name] if has_it else None

    def rows(self, name: str, index: NDArray[np.int64] | slice | int) -> Array:
        """Return the rows of an array that an index selects."""
        return self.arrays[self._full(name)][index].astype(np.float64)

    def linear(self, name: str, x: Array) -> Array:
        """Return x · Wᵀ + b of the linear layer `name`: (positions, inputs) → (positions, outputs)."""
        matrix, bias = f"{name}.weight", self.get(f"{name}.bias")
        if self.is_transposed:
            outputs = x @ self[matrix]
        else:
            num_outputs, step = len(self.arrays[self._full(matrix)]), max(1, PIECE_NUMBERS // x.shape[1])
            starts = range(0, num_outputs, step)
            parts = [x @ self.rows(matrix, slice(start, start + step)).T for start in starts]
            outputs = np.concatenate(parts, axis=-1)
        return outputs if bias is None else outputs + bias

    def _full(self, name: str) -> str:
        return f"{self.module}.{name}" if self.module else name
