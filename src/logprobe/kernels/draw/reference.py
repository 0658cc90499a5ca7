"""Sampling in NumPy, row by row: the reference for the kernels, and the fallback if there are none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from logprobe.kernels.arrays import as_array
from logprobe.kernels.draw.params import Drawn

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from logprobe.kernels.draw.params import DrawParams
    from logprobe.kernels.placement import Rows


def draw_reference(logits: Rows, params: DrawParams) -> Drawn:
    """Sample one token per row, as `draw` does, by sorting whole rows in float64; `logits` are on the CPU."""
    drawn = Drawn.empty(len(logits))
    for row, own in enumerate(as_array(logits)):
        values = own.astype(np.float64)
        order = np.argsort(-values, kind="stable")
        best = values[order[0]]
        drawn.is_valid[row] = bool(np.isfinite(best)) and not bool(np.isnan(values).any())
        drawn.token_ids[row], drawn.cut_logits[row], drawn.cut_ids[row] = order[0], -np.inf, len(values)
        if drawn.is_valid[row] and params.temperatures[row] > 0:
            kept = order[: _num_kept(values[order], params, row)]
            if len(kept) < len(values):
                drawn.cut_logits[row], drawn.cut_ids[row] = values[kept[-1]], kept[-1]
            kept = np.sort(kept)
            sums = _weights(values[kept], best, params, row).cumsum()
            hit = np.searchsorted(sums, sums[-1] * params.uniforms[row], side="right")
            drawn.token_ids[row] = kept[min(int(hit), len(kept) - 1)]
    return drawn


def _weights(
    values: NDArray[np.float64], best: np.float64, params: DrawParams, row: int
) -> NDArray[np.float64]:
    """Return the probabilities of logits, relative to that of the best one."""
    weights: NDArray[np.float64] = np.exp((values - best) / params.temperatures[row])
    return weights


def _num_kept(descending: NDArray[np.float64], params: DrawParams, row: int) -> int:
    """Return how many tokens top-k, top-p and min-p keep; `descending` is the row's sorted logits."""
    weights = _weights(descending, descending[0], params, row)
    count = len(weights)
    if params.top_ks[row] > 0:
        count = min(count, int(params.top_ks[row]))
    if params.top_ps[row] < 1:
        sums = weights[:count].cumsum()
        count = min(count, int((sums < sums[-1] * params.top_ps[row]).sum()) + 1)
    if params.min_ps[row] > 0:
        count = min(count, int((weights >= params.min_ps[row]).sum()))
    return max(count, 1)
