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


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """Numbers of rows that a work item may have."""

    fewest: int
    most: int
    floats: int  # maximum rows times inputs of a block above the minimum, to keep it in a cache
    multiple: int  # the number of rows is a multiple of this


BLOCK_SIZES = {
    "fma": BlockSizes(64, 256, 1 << 19, TILE_ROWS),
    # A float has six bytes in pieces; two tiles of 16 rows are multiplied at once.
    "bf16x3": BlockSizes(32, 256, 3 << 16, 32),
}


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
    assert weights.arithmetic == "fma" or weights.form not in {FLOAT32, FLOAT16}
    sizes, has_pieces = BLOCK_SIZES[weights.arithmetic], weights.arithmetic == "bf16x3"
    num_blocks = _num_blocks(num_rows, padded, items, sizes)
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
        block_rows=rows_of_blocks(num_rows, num_blocks, sizes.multiple),
        form=FORM_NUMBERS[weights.form.name],
        activation=ACTIVATIONS[finish.activation],
        factor=finish.factor,
        num_threads=threads.num_threads(),
        has_tiles=has_pieces and library().has_tiles,
    )


def _num_blocks(num_rows: int, num_inputs: int, items: int, sizes: BlockSizes) -> int:
    """Return the number of row blocks: few, because each converts all panels, but enough for all threads."""
    if num_rows <= sizes.fewest:
        return 1
    fewest = -(-num_rows // max(sizes.fewest, min(sizes.most, sizes.floats // num_inputs)))
    wanted = -(-items_for_threads() // items)
    num_blocks = max(fewest, min(wanted, -(-num_rows // sizes.fewest)))
    return -(-num_rows // rows_of_blocks(num_rows, num_blocks, sizes.multiple))


def rows_of_blocks(num_rows: int, num_blocks: int, multiple: int) -> int:
    """Return the number of rows in every block except the last; it is a multiple of `multiple`."""
    return -(-num_rows // (num_blocks * multiple)) * multiple
