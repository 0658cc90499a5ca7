"""Matrix products with weights in the number format of the checkpoint (CPU).

All rows of a step share one read of the weights.

Each output is a float32 sum over pieces of the inputs, in order, and the sum over a piece is split into runs
of RUN inputs. This order does not depend on the number of rows. So the bits of a row depend neither on the
other rows, nor on the number of threads, nor on the weight format. With few rows, weights are converted to
float32 in registers. With more rows, a piece of the weights at a time is converted into the L1 cache, where
all rows read it. Many rows are split into blocks, and each thread works on one block for as long as possible.
With a single block, each thread works on a run of panels, because memory is read faster in long runs.

With the arithmetic `bf16x3`, each activation is split into three bfloat16 numbers, which the matrix units of
the processor multiply (Intel AMX). The order of sums is another, but the same for any number of rows, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from logprobe.kernels import threads
from logprobe.kernels.layers.layout import FLOAT16, FLOAT32, FORM_NUMBERS, PANEL, TILE_ROWS
from logprobe.kernels.layers.rows import ACTIVATIONS
from logprobe.kernels.native import library
from logprobe.kernels.stages import Stage, items_for_threads

if TYPE_CHECKING:
    from logprobe.kernels.arrays import Array
    from logprobe.kernels.layers.forms import PanelWeights

FEWEST_ITEMS = 32  # minimum work items of a layer, if it has enough panels
BLOCK_ROWS = (64, 256)  # minimum and maximum number of rows in a block
BLOCK_FLOATS = 1 << 19  # maximum rows times inputs of a block above the minimum, to keep it in a cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Operations on a product before it is written (epilogue)."""

    residual: Array | None = None  # (M, outputs) float32, added to the result; may be the output itself
    values: PanelWeights | None = None  # the result is activation(product) · (product with these weights)
    activation: str = "none"  # applied to the product; without `values`, this is the result
    factor: float = 1.0  # multiplies the result before the residual is added


PLAIN = Finish()


def panel_stage(x: Array, weights: PanelWeights, out: Array, finish: Finish = PLAIN) -> Stage:
    """Return the stage that writes the product of `x` and the weights, plus bias, to `out`, after `finish`.

    Args:
        x: (M, inputs) float32, each row contiguous.
        weights: packed weights, (outputs, inputs).
        out: (M, outputs) float32, each row contiguous; may be part of a wider array.
        finish: operations on the product before it is written.
    """
    values, residual = finish.values, finish.residual
    assert values is None or finish.activation != "none"
    num_panels = -(-weights.num_outputs // PANEL)
    item_panels = max(1, num_panels // max(FEWEST_ITEMS, items_for_threads()))
    items = -(-num_panels // item_panels)
    num_rows, padded = len(x), weights.padded_inputs
    num_blocks = _num_blocks(num_rows, padded, items)
    # Other floats would need more than three products of bfloat16 numbers.
    has_pieces = weights.arithmetic == "bf16x3" and weights.form not in {FLOAT32, FLOAT16}
    return Stage(
        "products_bf16x3" if has_pieces else "products",
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
        num_threads=threads.num_threads(),
        has_tiles=has_pieces and library().has_tiles,
    )


def _num_blocks(num_rows: int, num_inputs: int, items: int) -> int:
    """Return the number of row blocks: few, because each converts all panels, but enough for all threads."""
    least, most = BLOCK_ROWS
    if num_rows <= least:
        return 1
    fewest = -(-num_rows // max(least, min(most, BLOCK_FLOATS // num_inputs)))
    wanted = -(-items_for_threads() // items)
    block_rows = rows_of_blocks(num_rows, max(fewest, min(wanted, -(-num_rows // least))))
    return -(-num_rows // block_rows)


def rows_of_blocks(num_rows: int, num_blocks: int) -> int:
    """Return the number of rows in every block except the last; it is a multiple of TILE_ROWS."""
    return -(-num_rows // (num_blocks * TILE_ROWS)) * TILE_ROWS
