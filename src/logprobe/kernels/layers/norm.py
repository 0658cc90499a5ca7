"""Normalisation of rows by their root mean square or about their mean (CPU): one kernel for six operators.

Before it: hidden states inside the model. After it: the next layer's linear products.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from logprobe.kernels.threads.parallel import Stage, block_rows, worker_of

if TYPE_CHECKING:
    from torch import Tensor

worker = worker_of("layers.norm")
MOST_ROWS = 16  # of an item
ROWS_FOR_THREADS = 64  # below, starting the threads costs more than they save


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Give `x / sqrt(mean(x²) + epsilon) · weight` over the last dimension (Zhang & Sennrich 2019).

    Args:
        x: (..., width) float32 on the CPU.
        weight: (width,) float32.
        epsilon: added to the mean square.
    """
    rows = x.contiguous().view(-1, x.shape[-1])
    out = rows.new_empty(rows.shape)
    norm_stage(rows, weight, out, epsilon).run()
    return out.view(x.shape)


def norm_stage(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    epsilon: float,
    residual: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    is_centred: bool = False,
) -> Stage:
    """`rms_norm` or, centred, LayerNorm (Ba et al. 2016) of each part of some rows into `out`, ready to run.

    Args:
        x: (num_rows, parts · width) float32, each row contiguous.
        weight: (width,) float32.
        out: of x's shape, each row contiguous; it may be x.
        epsilon: added to the mean square, or to the variance.
        residual: added to the result, laid out as `out`, which it may be.
        bias: (width,) float32, added after the weight of a centred row.
        is_centred: the mean is taken off first.
    """
    width, num_rows = len(weight), len(x)
    parts = x.shape[1] // width
    assert residual is None or residual.stride() == out.stride()
    assert bias is None or is_centred
    settings = np.array([epsilon], dtype=np.float32)
    block = block_rows(num_rows, MOST_ROWS)
    context = [
        x.data_ptr(), x.stride(0), weight.data_ptr(), 0 if bias is None else bias.data_ptr(),
        out.data_ptr(), out.stride(0), 0 if residual is None else residual.data_ptr(),
        width, parts, num_rows, settings.ctypes.data, is_centred, block,
    ]  # fmt: skip
    keeps = (x, weight, out, settings, residual, bias)
    return Stage(
        worker(),
        context,
        -(-num_rows // block),
        keeps,
        is_small=num_rows < ROWS_FOR_THREADS,
    )
