"""Single cells of a batch of logits, named by flat index tensors: one operation for all rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Cells:
    """n cells: (n,) int64 rows and (n,) int64 token ids."""

    rows: Tensor
    token_ids: Tensor

    @classmethod
    def of(cls, ids_by_row: Sequence[Sequence[int] | NDArray[Any]]) -> Cells | None:
        """The cells of each row's ids; None where there are none."""
        counts = [len(ids) for ids in ids_by_row]
        if not sum(counts):
            return None
        rows = np.repeat(np.arange(len(counts)), counts)
        ids = np.concatenate([np.asarray(ids, dtype=np.int64) for ids in ids_by_row if len(ids)])
        return cls(torch.from_numpy(rows), torch.from_numpy(ids))

    def on(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The indices into these logits, on their device."""
        return self.rows.to(logits.device), self.token_ids.to(logits.device)
