"""Sample a token from each row of logits: temperature, top-k, top-p, min-p.

A row is sampled by inverting its cumulative distribution, in order of token ids, at one uniform random
number. So the result depends only on the row and that number, not on other rows. Truncation keeps the first
tokens in order of descending logit and, among equals, ascending id. The last token kept is called the cut; it
is stored as its logit and id.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from logprobe.kernels.draw.params import Drawn
from logprobe.kernels.draw.reference import draw_reference
from logprobe.kernels.info import kernel_of, native_library
from logprobe.kernels.placement import as_rows, like
from logprobe.kernels.stages import Stage

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from logprobe.kernels.draw.params import DrawParams, FloatArray
    from logprobe.kernels.placement import Rows


def draw(logits: Rows, params: DrawParams) -> Drawn:
    """Sample one token per row from (B, V) float32 logits.

    On a GPU with Triton, rows without truncation are sampled on the GPU; other rows are copied to the host.
    """
    logits = as_rows(logits)
    if isinstance(logits, np.ndarray):
        return _draw_on_host(logits, params)
    if kernel_of(logits.device.type) == "triton":
        from torch.cuda import device_of

        with device_of(logits):  # type: ignore[no-untyped-call]  # Triton launches on the current GPU
            return _draw_on_gpu(logits, params)
    return _draw_on_host(_copied(logits), params)


def _draw_on_gpu(logits: Tensor, params: DrawParams) -> Drawn:
    from logprobe.kernels.draw.triton import draw_rows

    if not params.is_truncated.any():
        return draw_rows(logits, params)
    drawn = Drawn.empty(len(logits))
    if len(rows := np.flatnonzero(~params.is_truncated)):
        drawn.put(rows, draw_rows(logits[like(rows, logits)], params.rows(rows)))
    rows = np.flatnonzero(params.is_truncated)
    drawn.put(rows, _draw_on_host(_copied(logits[like(rows, logits)]), params.rows(rows)))
    return drawn


def _copied(logits: Tensor) -> NDArray[np.float32]:
    """Copy logits to the host; from a GPU to pinned memory, which is several times faster."""
    if not logits.is_cuda:
        return logits.numpy(force=True)
    import torch

    pinned = torch.empty(logits.shape, dtype=logits.dtype, pin_memory=True)
    return pinned.copy_(logits).numpy()


def _draw_on_host(logits: NDArray[np.float32], params: DrawParams) -> Drawn:
    if native_library() is None:
        return draw_reference(logits, params)
    drawn = Drawn.empty(len(logits))
    Stage(
        "draw",
        "DrawArgs",
        num_items=len(logits),
        logits=logits,
        vocab_size=logits.shape[1],
        temperatures=params.temperatures,
        top_ks=params.top_ks,
        top_ps=params.top_ps,
        min_ps=params.min_ps,
        uniforms=params.uniforms,
        token_ids=drawn.token_ids,
        cut_logits=drawn.cut_logits,
        cut_ids=drawn.cut_ids,
        is_valid=drawn.is_valid,
    ).run()
    return drawn


def truncated_(logits: Rows, drawn: Drawn, rows: list[int], temperatures: FloatArray) -> Rows:
    """Convert logits to the logits that tokens were sampled from, in place; return them.

    Tokens that truncation excluded get -inf. If the temperature is not 0, the row's maximum is subtracted
    from the other logits, which are then divided by the temperature.

    Args:
        logits: (len(rows), V) float32.
        drawn: result of `draw` for the whole batch.
        rows: for each row of `logits`, its index in the batch.
        temperatures: (B,), for the whole batch.
    """
    ids = like(np.arange(logits.shape[1]), logits)
    with np.errstate(invalid="ignore", over="ignore"):  # of invalid rows, and of quotients below -3.4e38
        for position, row in enumerate(rows):
            cut, cut_id = float(drawn.cut_logits[row]), int(drawn.cut_ids[row])
            values: Any = logits[position]
            if cut > -np.inf:
                values[(values < cut) | ((values == cut) & (ids > cut_id))] = -np.inf
            if temperatures[row] > 0:
                # Subtract the maximum first, so that a small temperature causes no overflow to +inf.
                values -= values.max()
                values /= float(temperatures[row])
    return logits
