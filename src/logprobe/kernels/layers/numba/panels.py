"""The loops of `layers.panels`, a worker a form of weights."""

from __future__ import annotations

import functools
from typing import Any

from logprobe.kernels.layers.layout import FLOAT32, FORMS, PANEL, RUN, TILE_ROWS, Form
from logprobe.kernels.layers.numba.activations import gate
from logprobe.kernels.layers.numba.turn import turn_rows, turned_size
from logprobe.kernels.layers.numba.widen import tiles, widener
from logprobe.kernels.layers.panels import MOST_GROUPS, TAKEN, rows_of_blocks
from logprobe.kernels.processor import FLOAT, LINE
from logprobe.kernels.threads.numba.intrinsics import bits_float, fetch_add, internal, prefetch_line
from logprobe.kernels.threads.numba.tasks import float32_at, float32_on_lines, next_item
from logprobe.kernels.threads.numba.vectors import I32, ONE
from logprobe.kernels.threads.numba.workers import Body, compiled_worker

# What a task's numbers mean: the second of `parallel_for`, then addresses, then strides and sizes.
NUM_ITEMS = 1
(X, WEIGHT, BIAS, VALUE_WEIGHT, VALUE_BIAS, RESIDUAL, OUT) = range(2, 9)  # 0: none of that kind
(X_STRIDE, RESIDUAL_STRIDE, OUT_STRIDE, NUM_ROWS, WIDTH, NUM_INPUTS, NUM_OUTPUTS) = range(9, 16)
(PANEL_BYTES, NUM_PANELS, ITEM_PANELS, ACTIVATION, FACTOR) = range(16, 21)  # NUM_INPUTS is WIDTH filled up
PIECE = 96  # inputs of a panel that stay in the first-level cache beside the rows
PANEL_FLOATS = FLOAT * PANEL

_block_rows = internal(rows_of_blocks)


@functools.cache
def body_of(form: str) -> Body:
    """The worker of a form of weights, as it is compiled."""
    multiply = _multiplier(FORMS[form])

    @compiled_worker
    def multiply_panels(task: Any) -> None:
        items, num_panels = -(-task[NUM_PANELS] // task[ITEM_PANELS]), task[NUM_PANELS]
        block_rows = _block_rows(task[NUM_ROWS], task[NUM_ITEMS] // items)
        products = float32_on_lines(2 * block_rows * PANEL)  # and, behind them, those of values
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
                multiply(task, x, (task[WEIGHT], panel), products, piece)
                if task[VALUE_WEIGHT] != 0:
                    multiply(task, x, (task[VALUE_WEIGHT], panel), products[block_rows * PANEL :], piece)
                _finish_panel(task, (first, num_rows), panel * PANEL, products)
            item = next_item(task)

    return multiply_panels


def _multiplier(form: Form) -> Any:
    """Compiled `multiply(task, turned, panel, products, piece)`: the products of a block of turned rows.

    `turned` is where they begin, the number of the first row, and how many there are; `panel` is where the
    panels begin, and the number of the one to multiply by.
    """
    direct, from_piece = tiles(form, RUN), tiles(FLOAT32, RUN)
    widen_piece = widener(form)
    is_float32 = form is FLOAT32
    direct_rows, block_bytes, block_inputs = form.direct_rows, form.block_bytes, form.inputs
    piece_bytes = PIECE // block_inputs * block_bytes

    @internal
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
        x = products[PANEL * place : PANEL * place + count]
        if task[BIAS] != 0:
            _add(x, float32_at(task[BIAS] + FLOAT * first, count))
        if task[ACTIVATION] != 0:
            values = products[products.size // 2 + PANEL * place :][:count]
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
