"""Which form of weights `auto` takes: measured once on this machine, and the same at every load from then on.

The products of the model's own layers run on published and on packed weights in turn, more of them than any
cache holds. Before it: the first load of a model. After it: the cache, which remembers.
"""

from __future__ import annotations

import math
import statistics
import time
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from logprobe.engine.layers.packed import PackedLinear
from logprobe.engine.layers.published import PublishedLinear
from logprobe.models.stored.record import Choice

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from logprobe.kernels.layers.forms import PanelWeights

FEW_ROWS: Final = (1, 8, 32)  # of steps that generate
MANY_ROWS: Final = 512  # of a prompt's chunk
TRIAL_BYTES: Final = 1 << 27  # of float32 weights: more than caches hold
MANY_BYTES: Final = 1 << 24  # enough where each weight serves many rows
ROUNDS: Final = 7
LEAST: Final = 0.75  # at any number of rows


@torch.inference_mode()
def measure_choice(model: nn.Module, panels: Mapping[str, PanelWeights]) -> Choice:
    """Measure both forms of a float32 model.

    `published` wherever steps that generate are as fast by it on the whole, and nothing is much slower: it
    also starts sooner and takes a fraction of the memory.
    """
    linears = [
        (name, module)
        for name, module in model.named_modules()
        if type(module) is nn.Linear and name in panels
    ]
    speedups = {
        str(rows): _speedup(_first_bytes(linears, num_bytes), panels, rows)
        for rows, num_bytes in (*((rows, TRIAL_BYTES) for rows in FEW_ROWS), (MANY_ROWS, MANY_BYTES))
    }
    is_as_fast = math.prod(speedups[str(rows)] for rows in FEW_ROWS) >= 1
    is_never_slow = min(speedups.values()) >= LEAST
    return Choice("published" if is_as_fast and is_never_slow else "packed", speedups)


def _first_bytes(linears: Sequence[tuple[str, nn.Linear]], num_bytes: int) -> list[tuple[str, nn.Linear]]:
    """So many of them as hold that many bytes, one at least."""
    taken, size = [], 0
    for name, linear in linears:
        taken.append((name, linear))
        size += linear.weight.nbytes
        if size >= num_bytes:
            break
    return taken


def _speedup(
    linears: Sequence[tuple[str, nn.Linear]], panels: Mapping[str, PanelWeights], rows: int
) -> float:
    """How many times as fast published weights are; 0 where there is nothing to measure."""
    if not linears:
        return 0.0
    published = [PublishedLinear([panels[name]]) for name, _ in linears]
    packed = [PackedLinear(linear) for _, linear in linears]
    inputs = {linear.in_features: torch.ones(rows, linear.in_features) for linear in published}
    ratios = [_seconds(packed, inputs) / _seconds(published, inputs) for _ in range(ROUNDS)]
    return round(statistics.median(ratios), 3)


def _seconds(linears: Sequence[Any], inputs: Mapping[int, torch.Tensor]) -> float:
    began = time.perf_counter()
    for linear in linears:
        linear(inputs[linear.in_features])
    return time.perf_counter() - began
