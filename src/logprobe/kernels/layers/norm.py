"""Normalisation of rows by their root mean square or about their mean (CPU): one kernel for six operators.

Before it: hidden states inside the model. After it: the next layer's linear products.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from logprobe.kernels.stages import Stage, block_rows

if TYPE_CHECKING:
    from torch import Tensor

MAX_ROWS = 16  # of an item
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
