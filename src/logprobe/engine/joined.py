"""Linear layers of one input joined into one product, and what keeps their places for adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Sequence


class JoinedPart(nn.Module):
    """The place of a projection that was joined with others; an adapter may take it."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def adapt_(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Leave the joined product as it is."""


def join(linears: Sequence[nn.Linear]) -> nn.Linear:
    """One layer whose outputs are those of several, one after another."""
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    num_outputs = sum(linear.out_features for linear in linears)
    joined = nn.Linear(linears[0].in_features, num_outputs, bias=False, device="meta")
    joined.weight = nn.Parameter(
        torch.cat([linear.weight.detach() for linear in linears]), requires_grad=False
    )
    if biases:
        joined.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    return joined
