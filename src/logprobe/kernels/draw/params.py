"""Parameters and results of sampling one token per row."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

FloatArray: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class DrawParams:
    """Sampling parameters of B rows; all arrays have shape (B,) and are contiguous."""

    temperatures: FloatArray  # 0: greedy
    top_ks: FloatArray  # 0: disabled
    top_ps: FloatArray  # 1: disabled
    min_ps: FloatArray  # 0: disabled
    uniforms: NDArray[np.float64]  # in [0, 1)

    def rows(self, rows: Any) -> DrawParams:
        """Return the parameters of `rows`: a slice without a step, or an array of indices or of booleans."""
        return DrawParams(*(getattr(self, column.name)[rows] for column in fields(self)))

    @property
    def is_truncated(self) -> NDArray[np.bool_]:
        """(B,) bool, True if top-k, top-p or min-p may exclude tokens in the row."""
        cuts = (self.top_ks > 0) | (self.top_ps < 1) | (self.min_ps > 0)
        return cuts & (self.temperatures > 0)


@dataclass(frozen=True, slots=True)
class Drawn:
    """The tokens sampled from B rows, and the last token that truncation kept in each row."""

    token_ids: NDArray[np.int32]  # (B,)
    cut_logits: FloatArray  # (B,), smallest logit that truncation kept; -inf: all tokens were kept
    cut_ids: NDArray[np.int32]  # (B,), largest id kept among the tokens with that logit
    is_valid: NDArray[np.bool_]  # (B,), False: the row contains NaN or +inf, or only -inf

    @classmethod
    def empty(cls, num_rows: int) -> Drawn:
        """Return uninitialized arrays for `num_rows` rows."""
        return cls(
            np.empty(num_rows, dtype=np.int32),
            np.empty(num_rows, dtype=np.float32),
            np.empty(num_rows, dtype=np.int32),
            np.empty(num_rows, dtype=np.bool_),
        )

    def put(self, rows: Any, drawn: Drawn) -> None:
        """Copy `drawn` to the given rows of this object: a slice, or an array of indices or of booleans."""
        for column in fields(self):
            getattr(self, column.name)[rows] = getattr(drawn, column.name)
