"""Feed-forward parts of several experts, of which each token has a few (Shazeer et al. 2017).

Which rows an expert has is known when the router has run, so its products are launched then, expert by expert
in their order: the sum of a row depends on nothing beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.engine.forward.linear import GatedPanels, Linear


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a layer, and what chooses among them."""

    router: Linear
    inner: Sequence[GatedPanels]
    down: Sequence[Linear]
    num_chosen: int  # of each token
    normalises: bool  # whether the weights of those chosen add up to 1

    def add_(self, hidden: torch.Tensor, x: torch.Tensor) -> None:
        """Add what the experts of each row make of it to `hidden`.

        Args:
            hidden: (M, hidden size).
            x: (M, hidden size), what the layer's feed-forward part reads.
        """
        # In float64: torch's float32 differs by a bit between the lanes of a vector and what is left over.
        weights, chosen = self.router(x).double().softmax(-1).topk(self.num_chosen)
        if self.normalises:
            weights /= weights.sum(-1, keepdim=True)
        weights = weights.float()
        for number in np.unique(chosen.numpy()).tolist():
            rows, places = torch.where(chosen == number)
            made = self.down[number](self.inner[number](x[rows]))
            hidden.index_add_(0, rows, made * weights[rows, places, None])
