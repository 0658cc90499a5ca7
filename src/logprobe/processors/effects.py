"""Effect of a processor on one position, which requests with `explain` get."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor


class ProcessorEffect(msgspec.Struct, frozen=True):
    """The effect of one processor on one position.

    `changes` maps each returned candidate whose logit changed to the difference in nats: -inf if it was
    masked, +inf if it was unmasked. `mass_moved` is the total variation distance between the distributions
    before and after, in [0, 1]: half the sum of all absolute changes in probability.
    """

    processor: str
    changes: dict[int, float]
    mass_moved: float


class RowEffect(msgspec.Struct):
    """A row of logits before and after one processor, (V,) float32 each."""

    processor: str
    before: Tensor
    after: Tensor

    def among(self, token_ids: Iterable[int]) -> ProcessorEffect:
        """Return the effect, with `changes` for these candidates; ids may repeat, in any order."""
        import torch

        ids = torch.tensor(sorted(set(token_ids)), dtype=torch.int64)
        before, after = self.before[ids].cpu(), self.after[ids].cpu()
        is_changed = before != after
        changes = zip(ids[is_changed].tolist(), (after - before)[is_changed].tolist(), strict=True)
        moved = self.before.softmax(0, dtype=torch.float64) - self.after.softmax(0, dtype=torch.float64)
        return ProcessorEffect(self.processor, dict(changes), float(moved.abs().sum().cpu() / 2))
