"""Mixture of experts: a router selects a few expert MLPs for each token (Shazeer et al. 2017).

An expert can only run once the router has chosen the expert's rows. Experts run in order of their numbers, so
that the sum in a row does not depend on the other rows of the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from logprobe.engine.forward.cpu.linear import GatedPanels, Linear
    from logprobe.kernels.arrays import Array


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a layer, and the router that selects a few of them for each token."""

    router: Linear
    inner: Sequence[GatedPanels]
    down: Sequence[Linear]
    num_chosen: int  # experts per token
    normalises: bool  # scale the weights of a token's experts so that they sum to 1

    def add_(self, hidden: Array, x: Array, route: Callable[[Array], Array] | None = None) -> None:
        """Add the weighted sum of each row's expert outputs to `hidden`, in place.

        Args:
            hidden: (M, hidden size) float32.
            x: (M, hidden size) float32, the input of the layer's MLP.
            route: called with the router's choice, (M, experts per token), most likely first; returns the
                experts to use. Their weights are still the router's.
        """
        # In float64: float32 functions may round differently in the scalar tail of a vector loop.
        scores = self.router(x).astype(np.float64)
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        chosen = np.argsort(-shares, axis=-1, kind="stable")[:, : self.num_chosen]
        if route is not None:
            chosen = route(chosen)
        weights = np.take_along_axis(shares, chosen, axis=-1)
        if self.normalises:
            weights /= weights.sum(axis=-1, keepdims=True)
        weights = weights.astype(np.float32)
        for number in np.unique(chosen).tolist():
            rows, places = np.nonzero(chosen == number)
            made = self.down[number](self.inner[number](x[rows]))
            hidden[rows] += made * weights[rows, places, None]
