"""Linear layers on weights in the format of the checkpoint (CPU); all rows of a step share one read of them.

Each output is a float32 sum over pieces of the inputs in order, and each piece is a sum over runs of RUN
inputs, for any number of rows. So the bits of a row depend neither on the other rows, nor on the number of
threads, nor on the format of its weights. With few rows, weights are converted to float32 in registers; with
more, piece by piece into the L1 cache, for all rows to read. Many rows are split into blocks, and each thread
stays on its own block while it has work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from logprobe.kernels.layers.gate import ACTIVATIONS
from logprobe.kernels.layers.layout import FORM_NUMBERS, PANEL, TILE_ROWS
from logprobe.kernels.stages import Stage, items_for_threads

if TYPE_CHECKING:
    from torch import Tensor

    from logprobe.kernels.layers.forms import PanelWeights

FEWEST_ITEMS = 32  # minimum work items of a layer, if it has enough panels
BLOCK_ROWS = (64, 256)  # minimum and maximum rows that share one conversion of a panel's piece
BLOCK_FLOATS = 1 << 19  # maximum floats of a block beyond the minimum rows, so that it stays in a cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Operations on the products before they are written (epilogue)."""

    residual: Tensor | None = None  # (M, outputs) float32 to add; may be the output itself
    values: PanelWeights | None = None  # weights of a second product u: activation(g) · u, g is the first
    activation: str = "none"  # without `values`, applied to the product itself
    factor: float = 1.0  # multiplies the result before the residual is added


PLAIN = Finish()


def panel_stage(x: Tensor, weights: PanelWeights, out: Tensor, finish: Finish = PLAIN) -> Stage:
    """Return the stage that writes `x` times the weights, plus bias, to `out`.

    Args:
        x: (M, inputs) float32, each row contiguous.
        weights: (outputs, inputs).
        out: (M, outputs) float32, each row contiguous; may be part of a wider array.
        finish: gate, factor and residual.
    """
    values, residual = finish.values, finish.residual
    assert values is None or finish.activation != "none"
    num_panels = -(-weights.num_outputs // PANEL)
    item_panels = max(1, num_panels // max(FEWEST_ITEMS, items_for_threads()))
    items = -(-num_panels // item_panels)
    num_rows, padded = len(x), weights.padded_inputs
    num_blocks = _num_blocks(num_rows, padded, items)
    return Stage(
        "products",
        "ProductArgs",
        num_items=items * num_blocks,
        x=x,
        weights=weights.data,
        bias=weights.bias,
        value_weights=None if values is None else values.data,
        value_bias=None if values is None else values.bias,
        residual=residual,
        out=out,
        num_rows=num_rows,
        width=weights.num_inputs,
        num_inputs=padded,
        num_outputs=weights.num_outputs,
        panel_bytes=weights.panel_bytes,
        item_panels=item_panels,
        block_rows=rows_of_blocks(num_rows, num_blocks),
        form=FORM_NUMBERS[weights.form.name],
        activation=ACTIVATIONS[finish.activation],
        factor=finish.factor,
    )


def _num_blocks(num_rows: int, num_inputs: int, items: int) -> int:
    """Return the number of row blocks: few (each converts the panels again), but enough for all threads."""
    least, most = BLOCK_ROWS
    if num_rows <= least:
        return 1
    fewest = -(-num_rows // max(least, min(most, BLOCK_FLOATS // num_inputs)))
    wanted = -(-items_for_threads() // items)
    block_rows = rows_of_blocks(num_rows, max(fewest, min(wanted, -(-num_rows // least))))
    return -(-num_rows // block_rows)


def rows_of_blocks(num_rows: int, num_blocks: int) -> int:
    """Return the rows of every block except the last, a multiple of TILE_ROWS."""
    return -(-num_rows // (num_blocks * TILE_ROWS)) * TILE_ROWS
