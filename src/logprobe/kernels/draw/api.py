"""Sample a token from each row of logits: temperature, top-k, top-p, min-p.

A row is sampled by inverting its cumulative distribution, in order of token ids, at one uniform random
number. So the result depends only on the row and that number, not on other rows. Truncation keeps the first
tokens in order of descending logit and, among equals, ascending id. The last token kept is called the cut; it
is stored as its logit and id.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from logprobe.kernels.draw.params import Drawn
from logprobe.kernels.draw.reference import draw_reference
from logprobe.kernels.info import kernel_of, native_library
from logprobe.kernels.stages import Stage

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from logprobe.kernels.draw.params import DrawParams, FloatArray


def draw(logits: Tensor, params: DrawParams) -> Drawn:
    """Sample one token per row from (B, V) float32 logits.

    On a GPU with Triton, rows without truncation are sampled on the GPU; other rows are copied to the host.
    """
    if kernel_of(logits.device.type) == "triton":
        with torch.cuda.device_of(logits):  # type: ignore[no-untyped-call]  # Triton launches on the current GPU
            return _draw_on_gpu(logits, params)
    return _draw_on_host(logits, params)


def _draw_on_gpu(logits: Tensor, params: DrawParams) -> Drawn:
    from logprobe.kernels.draw.triton import draw_rows

    if not params.is_truncated.any():
        return draw_rows(logits, params)
    drawn = Drawn.empty(len(logits))
    for is_own, draw_own in ((~params.is_truncated, draw_rows), (params.is_truncated, _draw_on_host)):
        if len(rows := is_own.nonzero()[0]):
            own = logits.index_select(0, torch.from_numpy(rows).to(logits.device))
            drawn.put(rows, draw_own(own, params.rows(rows)))
    return drawn


def _draw_on_host(logits: Tensor, params: DrawParams) -> Drawn:
    if logits.is_cuda:  # copies to pinned memory are several times faster
        logits = torch.empty(logits.shape, dtype=logits.dtype, pin_memory=True).copy_(logits)
    if native_library() is None:
        return draw_reference(logits, params)
    drawn = Drawn.empty(len(logits))
    _draw_rows(logits.numpy(force=True), params, drawn)
    return drawn


def _draw_rows(logits: NDArray[np.float32], params: DrawParams, drawn: Drawn) -> None:
    """Sample one token per row from (B, V) float32 logits with the native kernel, and write it to `drawn`."""
    Stage(
        "draw",
        "DrawArgs",
        num_items=len(logits),
        logits=logits,
        vocab_size=logits.shape[1],
        temperatures=np.ascontiguousarray(params.temperatures, np.float32),
        top_ks=np.ascontiguousarray(params.top_ks, np.float32),
        top_ps=np.ascontiguousarray(params.top_ps, np.float32),
        min_ps=np.ascontiguousarray(params.min_ps, np.float32),
        uniforms=np.ascontiguousarray(params.uniforms, np.float64),
        token_ids=drawn.token_ids,
        cut_logits=drawn.cut_logits,
        cut_ids=drawn.cut_ids,
        is_valid=drawn.is_valid,
    ).run()


def truncated_(logits: Tensor, drawn: Drawn, rows: list[int], temperatures: FloatArray) -> Tensor:
    """Convert logits to the logits that tokens were sampled from, in place; return them.

    Tokens that truncation excluded get -inf. If the temperature is not 0, the row's maximum is subtracted
    from the other logits, which are then divided by the temperature.

    Args:
        logits: (len(rows), V) float32.
        drawn: result of `draw` for the whole batch.
        rows: for each row of `logits`, its index in the batch.
        temperatures: (B,), for the whole batch.
    """
    ids = torch.arange(logits.shape[1], device=logits.device)
    for position, row in enumerate(rows):
        cut, cut_id = float(drawn.cut_logits[row]), int(drawn.cut_ids[row])
        values = logits[position]
        values.masked_fill_((values < cut) | ((values == cut) & (ids > cut_id)), -torch.inf)
        if temperatures[row] > 0:
            # Subtract the maximum first, so that a small temperature causes no overflow to +inf.
            values.sub_(values.max()).div_(float(temperatures[row]))
    return logits
