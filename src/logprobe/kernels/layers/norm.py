"""RMSNorm and LayerNorm of rows, and an optional residual addition, in one kernel (CPU)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from logprobe.kernels.arrays import as_array
from logprobe.kernels.stages import Stage, block_rows

if TYPE_CHECKING:
    from logprobe.kernels.arrays import Array

MAX_ROWS = 16  # maximum rows per work item
ROWS_FOR_THREADS = 64  # with fewer rows, one thread is faster than several


def rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    """Return `x / sqrt(mean(x²) + epsilon) · weight` over the last dimension (Zhang & Sennrich 2019).

    Args:
        x: (..., width) float32.
        weight: (width,) float32.
        epsilon: added to the mean square.
    """
    rows = np.ascontiguousarray(as_array(x)).reshape(-1, x.shape[-1])
    out = np.empty_like(rows)
    norm_stage(rows, weight, out, epsilon).run()
    return out.reshape(x.shape)


def norm_stage(
    x: Array,
    weight: Array,
    out: Array,
    epsilon: float,
    residual: Array | None = None,
    *,
    bias: Array | None = None,
    is_centred: bool = False,
) -> Stage:
    """Return the stage that writes RMSNorm or LayerNorm (Ba et al. 2016) of each part of each row to `out`.

    Args:
        x: (num_rows, parts · width) float32, each row contiguous.
        weight: (width,) float32.
        out: (num_rows, parts · width) float32, each row contiguous; may be `x` itself.
        epsilon: added to the mean square, or to the variance.
        residual: added to the result; has the shape and strides of `out`, and may be `out` itself.
        bias: (width,) float32, added after multiplying by the weight; only for LayerNorm.
        is_centred: True: LayerNorm, which first subtracts the mean; False: RMSNorm.
    """
    width, num_rows = len(weight), len(x)
    parts = x.shape[1] // width
    assert residual is None or as_array(residual).strides == as_array(out).strides
    assert bias is None or is_centred
    block = block_rows(num_rows, MAX_ROWS)
    return Stage(
        "norm",
        "NormArgs",
        num_items=-(-num_rows // block),
        is_small=num_rows < ROWS_FOR_THREADS,
        x=x,
        weight=weight,
        bias=bias,
        residual=residual,
        out=out,
        width=width,
        parts=parts,
        num_rows=num_rows,
        block_rows=block,
        is_centred=is_centred,
        epsilon=epsilon,
    )
