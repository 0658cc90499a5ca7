"""A linear layer on weights in their published form (CPU): one read of the weights serves all rows of a step.

Each output is a float32 sum over pieces of inputs in their order, and each piece is one over runs of RUN
inputs, however many rows there are: the numbers of a row depend neither on the rows beside it nor on threads,
nor on the form that its weights are kept in. For a few rows, weights are widened where they are used; for
more, a piece at a time into the first-level cache, for all rows to read. Many rows are cut into blocks, and
threads keep to blocks of their own as long as there are any.
Before it: rows of activations. After it: the next stage of a series.
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

FEWEST_ITEMS = 32  # that the panels of a layer are shared out in, where there are so many
BLOCK_ROWS = (64, 256)  # rows, least and most, that a piece of a panel is widened once for
BLOCK_FLOATS = 1 << 19  # of a block of more than the least rows: it stays in a cache while panels go by


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """What happens to the products before they are written."""

    residual: Tensor | None = None  # (M, outputs) float32 to add; may be where they are written to
    values: PanelWeights | None = None  # a second product u; the first is its gate g: activation(g) · u
    activation: str = "none"  # of the products themselves where no values are
    factor: float = 1.0  # of all that before the residual is added


PLAIN = Finish()


def panel_stage(x: Tensor, weights: PanelWeights, out: Tensor, finish: Finish = PLAIN) -> Stage:
    """`x` times the weights, plus bias, into `out`, ready to run.

    Args:
        x: (M, inputs) float32, each row contiguous.
        weights: (outputs, inputs).
        out: (M, outputs) float32, each row contiguous; may be part of a wider array.
        finish: gates and a sum on the way out.
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
    """How many blocks rows are cut into: few, as each has panels widened, but enough for every thread."""
    least, most = BLOCK_ROWS
    if num_rows <= least:
        return 1
    fewest = -(-num_rows // max(least, min(most, BLOCK_FLOATS // num_inputs)))
    wanted = -(-items_for_threads() // items)
    block_rows = rows_of_blocks(num_rows, max(fewest, min(wanted, -(-num_rows // least))))
    return -(-num_rows // block_rows)


def rows_of_blocks(num_rows: int, num_blocks: int) -> int:
    """Rows of every block but the last: whole tiles."""
    return -(-num_rows // (num_blocks * TILE_ROWS)) * TILE_ROWS
