"""This measures the products of a decode step on weights in each form, from memory, and how exact they are.

A step is all linear layers of the model, its head included, by number of rows. Ours are panels in the form of
the model's own file; beside them float32, bfloat16 and float16 panels (rounded weights, as another checkpoint
would have them), oneDNN's reordered float32 weights (torch's private operators), and torch's plain product.
`multiply-adds alone` is the time that the step's multiply-adds would take at the peak of the same round, the
rate at which this machine's threads do them in registers and read no memory (`peak.py`); the ratio to it is
the share of that peak. Contestants with `bf16x3` multiply the same panels with that arithmetic; they are
timed only on processors with AMX, because others emulate it. Errors are against float64 products of the very
weights, of the largest output. All take turns in this process, which keeps freed memory, so that no product
waits for the pages of its outputs.
"""

import ctypes
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_processors import ms_of
from harness import OURS, Figure, Measure, Options, Target, alternate, parse_options, publish
from peak import multiply_adds_per_s

from logprobe.engine.forward.cpu.linear import Linear
from logprobe.kernels.layers.forms import pack_floats
from logprobe.kernels.layers.layout import BFLOAT16, FLOAT16, FLOAT32
from logprobe.kernels.native import library
from logprobe.kernels.stages import Series
from logprobe.models import ModelFiles, load_model, resolve
from logprobe.models.loading import source_of

PACKED, PLAIN, FLOAT32_PANELS = "oneDNN packed", "plain torch", "float32 panels"
PEAK = "multiply-adds alone"
PACK_ROWS = 32  # that oneDNN is told to expect; any other number runs as well
ROUNDED = {"bfloat16 panels": torch.bfloat16, "float16 panels": torch.float16}
ROWS = (1, 2, 4, 8, 16, 32, 64, 512)
RECORDED_ROWS = 64  # up to so many, a step is one launch
ERROR_ROWS = 8
LARGEST_ERROR = 2e-6
AT_LEAST = {1: 2.0, 8: 1.2, 32: 1.0, 512: 0.9}  # times as fast as oneDNN's
BF16X3 = ", bf16x3"
# Times the rate of float32 multiply-adds alone, with bfloat16 weights and with quantized ones.
BF16X3_AT_LEAST = {8: (1.0, 0.9), 32: (2.2, 1.5), 512: (2.5, 1.8)}
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's mallopt(3)


class Packed:
    """A linear layer without a bias on a float32 weight that oneDNN has reordered."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        weight = linear.weight.detach().contiguous()
        self.num_outputs, self.num_inputs = weight.shape
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS)  # noqa: SLF001

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, inputs) → (rows, outputs)."""
        product = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001
        out: torch.Tensor = product(x, self._weight, None, "none", [], "")
        return out


class Plain:
    """The same on torch's own product."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        self._weight = linear.weight
        self.num_outputs, self.num_inputs = linear.weight.shape

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, inputs) → (rows, outputs)."""
        return torch.nn.functional.linear(x, self._weight)


def unrounded(weight: torch.Tensor) -> torch.Tensor:
    """The next numbers of float32, which no shorter form holds."""
    return torch.nextafter(weight, 2 * weight)


def panels_of(files: ModelFiles) -> dict[str, Any]:
    """The panels of matrices that lie in blocks, by their module's name."""
    source = source_of(files)
    assert source is not None
    matrices = [name for name, shape in source.shapes.items() if len(shape) == 2]
    return {name.removesuffix(".weight"): source.panels(name) for name in matrices}


def forms(model: Any, kept: dict[str, Any]) -> dict[str, list[Any]]:
    """Every linear layer of the model in each form, in the order of the step."""
    linears = [(name, module) for name, module in model.named_modules() if type(module) is torch.nn.Linear]

    def own(name: str, linear: torch.nn.Linear) -> Any:
        tied = "model.embed_tokens" if name == "lm_head" else name
        return kept.get(name) or kept.get(tied) or pack_floats(linear.weight)

    made: dict[str, list[Any]] = {
        OURS: [Linear([own(name, linear)]) for name, linear in linears],
        FLOAT32_PANELS: [Linear([pack_floats(unrounded(linear.weight))]) for _, linear in linears],
        PACKED: [Packed(linear) for _, linear in linears],
        PLAIN: [Plain(linear) for _, linear in linears],
    }
    for name, dtype in ROUNDED.items():
        made[name] = [Linear([pack_floats(linear.weight.to(dtype))]) for _, linear in linears]
    for name in (OURS, "bfloat16 panels"):
        panels = [layer.parts[0] for layer in made[name]]
        if panels[0].form not in {FLOAT32, FLOAT16}:  # these stay with float32 multiply-adds
            made[name + BF16X3] = [Linear([replace(one, arithmetic="bf16x3")]) for one in panels]
    return made


def keep_freed_memory() -> None:
    """Let the C library return nothing to the system, where it knows the words."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
        mallopt(M_MMAP_MAX, 0)


def step(layers: list[Any], num_rows: int) -> Callable[[], Any]:
    """All products of a step on inputs of its own."""
    inputs = {width: torch.randn(num_rows, width) for width in {layer.num_inputs for layer in layers}}
    if not isinstance(layers[0], Linear) or num_rows > RECORDED_ROWS:
        return lambda: [layer(inputs[layer.num_inputs]) for layer in layers]
    stages = [
        stage
        for layer in layers
        for stage in layer.stages(inputs[layer.num_inputs], torch.empty(num_rows, layer.num_outputs))
    ]
    return Series(stages).run


def bf16x3_targets(made: dict[str, list[Any]], num_rows: int, peak_ms: float) -> list[Target]:
    """The longest that a step with `bf16x3` may take, by the form of its weights."""
    targets = []
    for name, layers in made.items():
        if name.endswith(BF16X3) and num_rows in BF16X3_AT_LEAST:
            of_floats, of_quantized = BF16X3_AT_LEAST[num_rows]
            times = of_floats if layers[0].parts[0].form == BFLOAT16 else of_quantized
            targets.append(Target(against=name, at_most=peak_ms / times))
    return targets


def speed(made: dict[str, list[Any]], num_rows: int, options: Options) -> Figure:
    """Milliseconds of a step."""
    timed = {name: one for name, one in made.items() if library().has_tiles or not name.endswith(BF16X3)}
    calls = {name: step(layers, num_rows) for name, layers in timed.items()}
    measures: dict[str, Measure] = {name: partial(ms_of, call, 1) for name, call in calls.items()}
    num_multiply_adds = num_rows * sum(layer.num_inputs * layer.num_outputs for layer in made[OURS])
    measures[PEAK] = lambda _: 1e3 * num_multiply_adds / multiply_adds_per_s()
    samples, notes = alternate(measures, options.rounds)
    at_least = AT_LEAST.get(num_rows)
    targets = [] if at_least is None else [Target(against=PACKED, at_least=at_least)]
    if library().has_tiles:
        targets += bf16x3_targets(made, num_rows, statistics.median(samples[PEAK]))
    else:
        notes.append("bf16x3 is not timed: this processor has no AMX")
    return Figure(
        name=f"products of a step, {num_rows} rows", unit="ms", better="lower",
        samples=samples, targets=targets, notes=notes,
    )  # fmt: skip


def largest_error(layer: Any) -> float:
    """Of a layer on panels, against float64, of its largest output."""
    x = np.random.default_rng(0).standard_normal((ERROR_ROWS, layer.num_inputs), np.float32)
    (part,) = layer.parts
    want = x.astype(np.float64) @ part.rows(np.arange(part.num_outputs)).astype(np.float64).T
    return float(np.abs(layer(x) - want).max() / np.abs(want).max())


def exactness(made: dict[str, list[Any]]) -> Figure:
    """The largest error of any layer, by form; the first layer of each shape stands for its like."""
    samples = {}
    for name, layers in made.items():
        if isinstance(layers[0], Linear):
            shapes = {(layer.num_outputs, layer.num_inputs): layer for layer in reversed(layers)}
            samples[name] = [max(map(largest_error, shapes.values()))]
    held = [None, *(name for name in samples if name.endswith(BF16X3))]
    return Figure(
        name="largest error", unit="of the largest output", better="lower",
        samples=samples, targets=[Target(against=name, at_most=LARGEST_ERROR) for name in held],
    )  # fmt: skip


def main() -> None:
    """Run all figures."""
    options = parse_options(__doc__ or "")
    keep_freed_memory()
    files = resolve(options.model)
    model = load_model(files, dtype=torch.float32)
    with torch.inference_mode():
        made = forms(model, panels_of(files))
        figures = [exactness(made)]
        figures += [speed(made, rows, options) for rows in (ROWS[:2] if options.is_smoke else ROWS)]
    publish(Path(__file__).stem, figures, options)


if __name__ == "__main__":
    main()
