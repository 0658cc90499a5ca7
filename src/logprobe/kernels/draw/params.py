"""What a draw of one token a row is asked for, and what it gives."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

FloatArray: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class DrawParams:
    """How each of B rows is drawn, all (B,) float32 but `uniforms`."""

    temperatures: FloatArray  # 0: the most likely token
    top_ks: FloatArray  # 0: all
    top_ps: FloatArray  # 1: all
    min_ps: FloatArray  # 0: all
    uniforms: NDArray[np.float64]  # in [0, 1)

    def rows(self, rows: Any) -> DrawParams:
        """Return some rows: a slice, or an array of indices or of booleans."""
        return DrawParams(*(getattr(self, column.name)[rows] for column in fields(self)))

    @property
    def is_truncated(self) -> NDArray[np.bool_]:
        """(B,): whether top-k, top-p or min-p may exclude tokens of a row."""
        cuts = (self.top_ks > 0) | (self.top_ps < 1) | (self.min_ps > 0)
        return cuts & (self.temperatures > 0)


@dataclass(frozen=True, slots=True)
class Drawn:
    """What was drawn, and what truncation kept."""

    token_ids: NDArray[np.int32]  # (B,)
    cut_logits: FloatArray  # (B,), -inf: nothing cut
    cut_ids: NDArray[np.int32]  # (B,), of the tokens at cut_logits those with ids up to this are kept
    is_valid: NDArray[np.bool_]  # (B,), False: the row held NaN or +inf, or nothing but -inf

    @classmethod
    def empty(cls, num_rows: int) -> Drawn:
        """Return arrays for `num_rows` draws, not initialised."""
        return cls(
            np.empty(num_rows, dtype=np.int32),
            np.empty(num_rows, dtype=np.float32),
            np.empty(num_rows, dtype=np.int32),
            np.empty(num_rows, dtype=np.bool_),
        )

    def put(self, rows: Any, drawn: Drawn) -> None:
        """Fill some rows: a slice, or an array of indices or of booleans."""
        for column in fields(self):
            getattr(self, column.name)[rows] = getattr(drawn, column.name)
