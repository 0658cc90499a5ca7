"""Sampling in plain torch, row by row: the reference for the kernels, and the fallback if there are none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from logprobe.kernels.draw.params import Drawn

if TYPE_CHECKING:
    from torch import Tensor

    from logprobe.kernels.draw.params import DrawParams


def draw_reference(logits: Tensor, params: DrawParams) -> Drawn:
    """Sample one token per row, as `draw` does, by sorting whole rows in float64."""
    drawn = Drawn.empty(len(logits))
    for row in range(len(logits)):
        values = logits[row].double()
        order = torch.sort(values, descending=True, stable=True).indices
        best = values[order[0]]
        drawn.is_valid[row] = bool(torch.isfinite(best)) and not bool(values.isnan().any())
        drawn.token_ids[row], drawn.cut_logits[row], drawn.cut_ids[row] = order[0], -np.inf, len(values)
        if drawn.is_valid[row] and params.temperatures[row] > 0:
            kept = order[: _num_kept(values[order], params, row)]
            if len(kept) < len(values):
                drawn.cut_logits[row], drawn.cut_ids[row] = values[kept[-1]], kept[-1]
            kept = kept.sort().values
            weights = torch.exp((values[kept] - best) / params.temperatures[row])
            sums = weights.cumsum(0)
            hit = torch.searchsorted(sums, sums[-1] * params.uniforms[row], right=True)
            drawn.token_ids[row] = kept[min(int(hit), len(kept) - 1)]
    return drawn


def _num_kept(descending: Tensor, params: DrawParams, row: int) -> int:
    """Return how many tokens top-k, top-p and min-p keep; `descending` is the row's sorted logits."""
    weights = torch.exp((descending - descending[0]) / params.temperatures[row])
    count = len(weights)
    if params.top_ks[row] > 0:
        count = min(count, int(params.top_ks[row]))
    if params.top_ps[row] < 1:
        sums = weights[:count].cumsum(0)
        count = min(count, int((sums < sums[-1] * params.top_ps[row]).sum()) + 1)
    if params.min_ps[row] > 0:
        count = min(count, int((weights >= params.min_ps[row]).sum()))
    return max(count, 1)
