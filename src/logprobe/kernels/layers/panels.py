"""A linear layer on weights in their published form (CPU): one read of the weights serves all rows of a step.

Each output is a float32 sum over pieces of inputs in their order, however many rows there are: the
numbers of a row depend neither on the rows beside it nor on threads. For a few rows, weights are widened
where they are used; for more, a piece at a time into the first-level cache, for all rows to read. Many rows
are cut into blocks, and threads keep to blocks of their own as long as there are any.
Before it: rows of activations. After it: the next stage of a series.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from logprobe.kernels.layers import activations, turn, widen
from logprobe.kernels.layers.activations import ACTIVATIONS, gate
from logprobe.kernels.layers.turn import turn_rows, turned_size
from logprobe.kernels.layers.widen import FLOAT32, FORMS, PANEL, TILE_ROWS, Form, tiles, widener
from logprobe.kernels.threads.intrinsics import FLOAT, LINE, bits_float, fetch_add, internal, prefetch_line
from logprobe.kernels.threads.parallel import (
    TASK_FIELDS,
    Stage,
    compiled,
    compiled_worker,
    float32_at,
    float32_on_lines,
    items_for_threads,
    next_item,
)
from logprobe.kernels.threads.vectors import I32, ONE

if TYPE_CHECKING:
    from torch import Tensor

    from logprobe.kernels.layers.forms import PanelWeights

# What a task's numbers mean: the second of `parallel_for`, then addresses, then strides and sizes.
NUM_ITEMS = 1
(X, WEIGHT, BIAS, VALUE_WEIGHT, VALUE_BIAS, RESIDUAL, OUT) = range(2, 9)  # 0: none of that kind
(X_STRIDE, RESIDUAL_STRIDE, OUT_STRIDE, NUM_ROWS, WIDTH, NUM_INPUTS, NUM_OUTPUTS) = range(9, 16)
(PANEL_BYTES, NUM_PANELS, ITEM_PANELS, ACTIVATION, FACTOR, TAKEN) = range(16, 22)
# NUM_INPUTS is WIDTH filled up; from TAKEN on stands how many items of each group of blocks are taken.
MOST_GROUPS = TASK_FIELDS - TAKEN
FEWEST_ITEMS = 32  # that the panels of a layer are shared out in, where there are so many
BLOCK_ROWS = (64, 256)  # rows, least and most, that a piece of a panel is widened once for
BLOCK_FLOATS = 1 << 19  # of a block of more than the least rows: it stays in a cache while panels go by
PIECE = 96  # inputs of a panel that stay in the first-level cache beside the rows
PANEL_FLOATS = FLOAT * PANEL


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
    context = [
        x.data_ptr(), weights.data.data_ptr(), _address(weights.bias),
        0 if values is None else values.data.data_ptr(), 0 if values is None else _address(values.bias),
        _address(residual), out.data_ptr(), FLOAT * x.stride(0),
        0 if residual is None else FLOAT * residual.stride(0), FLOAT * out.stride(0),
        len(x), weights.num_inputs, weights.padded_inputs, weights.num_outputs, weights.panel_bytes,
        num_panels, item_panels, ACTIVATIONS[finish.activation],
        int(np.float32(finish.factor).view(np.int32)), *[0] * MOST_GROUPS,
    ]  # fmt: skip
    items = -(-num_panels // item_panels)
    num_items = items * _num_blocks(len(x), weights.padded_inputs, items)
    return Stage(worker_of(weights.form.name)(), context, num_items, (x, weights, out, finish))


def _num_blocks(num_rows: int, num_inputs: int, items: int) -> int:
    """How many blocks rows are cut into: few, as each has panels widened, but enough for every thread."""
    least, most = BLOCK_ROWS
    if num_rows <= least:
        return 1
    fewest = -(-num_rows // max(least, min(most, BLOCK_FLOATS // num_inputs)))
    wanted = -(-items_for_threads() // items)
    block_rows: int = _block_rows.py_func(num_rows, max(fewest, min(wanted, -(-num_rows // least))))
    return -(-num_rows // block_rows)


@internal
def _block_rows(num_rows: Any, num_blocks: Any) -> Any:
    """Rows of every block but the last: whole tiles."""
    return -(-num_rows // (num_blocks * TILE_ROWS)) * TILE_ROWS


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


@functools.cache
def worker_of(name: str) -> Any:
    """The function that gives the compiled worker of a form; forms that no model has are never compiled."""
    multiply = _multiplier(FORMS[name])

    @compiled_worker(widen, turn, activations, name=f"panels_{name}")
    def multiply_panels(task: Any) -> None:
        items, num_panels = -(-task[NUM_PANELS] // task[ITEM_PANELS]), task[NUM_PANELS]
        block_rows = _block_rows(task[NUM_ROWS], task[NUM_ITEMS] // items)
        products = float32_on_lines(2 * block_rows * PANEL).reshape(2, -1)
        piece = float32_on_lines(PIECE * PANEL)
        turned = float32_on_lines(turned_size(min(block_rows, task[NUM_ROWS]), task[NUM_INPUTS]))
        turned_from, group = -1, -1
        item = next_item(task)
        while item >= 0:
            item, group = _own_item(task, item, items, group)
            first = item // items * block_rows
            num_rows = min(block_rows, task[NUM_ROWS] - first)
            if turned_from != first:
                _turn_pieces(task, first, num_rows, turned)
                turned_from = first
            x = (turned.ctypes.data, first, num_rows)
            start = item % items * task[ITEM_PANELS]
            for panel in range(start, min(num_panels, start + task[ITEM_PANELS])):
                multiply(task, x, (task[WEIGHT], panel), products[0], piece)
                if task[VALUE_WEIGHT] != 0:
                    multiply(task, x, (task[VALUE_WEIGHT], panel), products[1], piece)
                _finish_panel(task, (first, num_rows), panel * PANEL, products)
            item = next_item(task)

    return multiply_panels


def _multiplier(form: Form) -> Any:
    """Compiled `multiply(task, turned, panel, products, piece)`: the products of a block of turned rows.

    `turned` is where they begin, the number of the first row, and how many there are; `panel` is where the
    panels begin, and the number of the one to multiply by.
    """
    direct, from_piece = tiles(form), tiles(FLOAT32)
    widen_piece = widener(form)
    is_float32 = form is FLOAT32
    direct_rows, block_bytes, block_inputs = form.direct_rows, form.block_bytes, form.inputs
    piece_bytes = PIECE // block_inputs * block_bytes

    @compiled(f"multiply_{form.name}")
    def multiply(task: Any, turned: Any, panel: Any, products: Any, piece: Any) -> None:
        (x, first, num_rows), (panels, number), num_inputs = turned, panel, task[NUM_INPUTS]
        width = turned_size(num_rows, 1)
        products[: PANEL * num_rows] = 0
        is_direct = task[NUM_ROWS] <= direct_rows
        for start in range(0, num_inputs, PIECE):
            count = min(PIECE, num_inputs - start)
            source = panels + number * task[PANEL_BYTES] + start // block_inputs * block_bytes
            weights = source if is_float32 else piece.ctypes.data
            if not (is_direct or is_float32):
                widen_piece(source, count, weights)
            for row in range(0, num_rows, TILE_ROWS):
                some, target = min(TILE_ROWS, num_rows - row), products[PANEL * row :].ctypes.data
                rows = x + FLOAT * (start * width + row * count)
                if is_direct:
                    direct(some, source, count, rows, target)
                else:
                    # Memory is read only while a piece is widened: the next one is asked for between tiles.
                    for place in range(row * piece_bytes, (row + some) * piece_bytes, num_rows * LINE):
                        prefetch_line(source + piece_bytes + place // num_rows)
                    if start + PIECE >= num_inputs:  # nor is what `_finish_panel` is about to write to
                        _prefetch_targets(task, first + row, some, PANEL_FLOATS * number)
                    from_piece(some, weights, count, rows, target)

    return multiply


@internal
def _own_item(task: Any, ticket: Any, items: Any, group: Any) -> Any:
    """The next item of the thread's own group of blocks (-1: none yet), or of another's, with the group.

    As many items as tickets are given out, so that who has a ticket finds one.
    """
    num_blocks = task[NUM_ITEMS] // items
    if num_blocks == 1:
        return ticket, 0
    num_groups = min(MOST_GROUPS, num_blocks)
    while True:
        if group >= 0:
            number = fetch_add(task.ctypes.data + 8 * (TAKEN + group), 1)
            block = number // items * num_groups + group
            if block < num_blocks:
                return block * items + number % items, group
        most = -1
        for other in range(num_groups):
            left = -(-(num_blocks - other) // num_groups) * items - task[TAKEN + other]
            if left > most:
                most, group = left, other


@internal
def _turn_pieces(task: Any, first: Any, num_rows: Any, turned: Any) -> None:
    """Turn a block of rows piece by piece: what one piece is multiplied with lies in one run of memory."""
    width, num_inputs = turned_size(num_rows, 1), task[NUM_INPUTS]
    for start in range(0, num_inputs, PIECE):
        count, x = min(PIECE, num_inputs - start), task[X] + task[X_STRIDE] * first + FLOAT * start
        own = max(0, min(count, task[WIDTH] - start))
        turn_rows(x, task[X_STRIDE], num_rows, own, count, turned[start * width :])


@internal
def _prefetch_targets(task: Any, first: Any, num_rows: Any, start: Any) -> None:
    """Ask for the lines of some rows that a panel's outputs are written to, and for what is added there."""
    for row in range(first, first + num_rows):
        for place in range(start, start + PANEL_FLOATS, LINE):
            prefetch_line(task[OUT] + task[OUT_STRIDE] * row + place)
            if task[RESIDUAL] != 0:
                prefetch_line(task[RESIDUAL] + task[RESIDUAL_STRIDE] * row + place)


@internal
def _copy(x: Any, target: Any) -> None:  # assigned to a slice, they would be looked at for overlaps
    for i in range(x.size):
        target[i] = x[i]


@internal
def _add(x: Any, summands: Any) -> None:
    for i in range(x.size):
        x[i] += summands[i]


@internal
def _multiply(x: Any, factor: Any) -> None:
    for i in range(x.size):
        x[i] *= factor


@internal
def _finish_panel(task: Any, rows: Any, first: Any, products: Any) -> None:
    """Bias, gate, factor and residual of outputs from `first` on, and where they belong."""
    count = min(PANEL, task[NUM_OUTPUTS] - first)
    for place in range(rows[1]):
        row = rows[0] + place
        x = products[0, PANEL * place : PANEL * place + count]
        if task[BIAS] != 0:
            _add(x, float32_at(task[BIAS] + FLOAT * first, count))
        if task[ACTIVATION] != 0:
            values = products[1, PANEL * place : PANEL * place + count]
            if task[VALUE_WEIGHT] == 0:
                values[:] = ONE
            elif task[VALUE_BIAS] != 0:
                _add(values, float32_at(task[VALUE_BIAS] + FLOAT * first, count))
            gate(x, values, task[ACTIVATION])
        factor = bits_float(I32(task[FACTOR]))
        if factor != ONE:
            _multiply(x, factor)
        if task[RESIDUAL] != 0:
            _add(x, float32_at(task[RESIDUAL] + task[RESIDUAL_STRIDE] * row + FLOAT * first, count))
        _copy(x, float32_at(task[OUT] + task[OUT_STRIDE] * row + FLOAT * first, count))
