"""Mixture of experts: a router selects a few expert MLPs for each token (Shazeer et al. 2017).

An expert can only run once the router has chosen the expert's rows. Experts run in order of their numbers, so
that the sum in a row does not depend on the other rows of the batch.
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
    """The experts of a layer, and the router that selects a few of them for each token."""

    router: Linear
    inner: Sequence[GatedPanels]
    down: Sequence[Linear]
    num_chosen: int  # experts per token
    normalises: bool  # scale the weights of a token's experts so that they sum to 1

    def add_(self, hidden: torch.Tensor, x: torch.Tensor) -> None:
        """Add the weighted sum of each row's expert outputs to `hidden`, in place.

        Args:
            hidden: (M, hidden size) float32.
            x: (M, hidden size) float32, the input of the layer's MLP.
        """
        # In float64: torch's float32 softmax may round differently in the scalar tail of its vector loop.
        weights, chosen = self.router(x).double().softmax(-1).topk(self.num_chosen)
        if self.normalises:
            weights /= weights.sum(-1, keepdim=True)
        weights = weights.float()
        for number in np.unique(chosen.numpy()).tolist():
            rows, places = torch.where(chosen == number)
            made = self.down[number](self.inner[number](x[rows]))
            hidden.index_add_(0, rows, made * weights[rows, places, None])
