"""Linear layers and embeddings whose weights are packed in panels (CPU, float32 activations).

A panel is a tile of the weight matrix in the number format of the checkpoint; kernels convert the weights to
float32 on use. Results equal those of a float32 matrix except for the order of summation, but fewer bytes are
read. The same kernels run a single row and a whole prompt.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from logprobe.engine.forward.process_memory import PagedMemory
from logprobe.kernels.arrays import as_array
from logprobe.kernels.layers.forms import pack_floats
from logprobe.kernels.layers.panels import PLAIN, Finish, panel_stage
from logprobe.models.sources import made_ahead
from logprobe.models.stored.panels import reading_order

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

    from logprobe.kernels.arrays import Array
    from logprobe.kernels.layers.forms import PanelWeights
    from logprobe.kernels.stages import Stage
    from logprobe.models.sources import Source

GATES_AND_VALUES = ".gate_up_proj"
HALVES = (".gates", ".values")  # name suffixes of the two halves of a joint gate_up layer, packed separately
PAGED_BYTES = 1 << 26  # minimum size of an allocation with huge pages


class Linear:
    """A linear layer on panels; its outputs may consist of parts with different weight formats."""

    def __init__(self, parts: Sequence[PanelWeights]) -> None:
        first, *others = parts
        joined = first.joined(others) if others else first
        self.parts = [*parts] if joined is None else [joined]
        self.num_inputs = first.num_inputs
        self.num_outputs = sum(part.num_outputs for part in parts)

    def joined(self, others: Sequence[Linear]) -> Linear:
        """Return one layer that computes the concatenated outputs of this layer and `others`."""
        return Linear([part for linear in (self, *others) for part in linear.parts])

    def stages(self, x: Array, out: Array, residual: Array | None = None, factor: float = 1.0) -> list[Stage]:
        """Return the kernel stages for `out = factor * linear(x) + residual`, where `x` is (M, inputs)."""
        widths = [part.num_outputs for part in self.parts]
        summands = [None] * len(widths) if residual is None else split_columns(residual, widths)
        stages = []
        for part, target, summand in zip(self.parts, split_columns(out, widths), summands, strict=True):
            is_plain = summand is None and factor == 1.0
            finish = PLAIN if is_plain else Finish(residual=summand, factor=factor)
            stages.append(panel_stage(x, part, target, finish))
        return stages

    def __call__(self, x: Array) -> Array:
        """Return (..., outputs) for `x` of shape (..., inputs)."""
        rows = np.ascontiguousarray(as_array(x)).reshape(-1, self.num_inputs)
        out = np.empty((len(rows), self.num_outputs), np.float32)
        for stage in self.stages(rows, out):
            stage.run()
        return out.reshape(*x.shape[:-1], self.num_outputs)


def split_columns(rows: Array, widths: Sequence[int]) -> list[Array]:
    """Return views of consecutive columns of `rows`, (M, width) each."""
    ends = list(itertools.accumulate(widths))
    return [rows[:, end - width : end] for end, width in zip(ends, widths, strict=True)]


@dataclass(frozen=True, slots=True)
class GatedPanels:
    """The first half of an MLP: activation(gates) · values, or activation(gates) if `values` is None."""

    gates: PanelWeights
    values: PanelWeights | None
    activation: str

    def __call__(self, x: Array) -> Array:
        """Return (M, intermediate size) for `x` of shape (M, hidden size)."""
        out = np.empty((len(x), self.gates.num_outputs), np.float32)
        self.stage(x, out).run()
        return out

    @property
    def is_one_pass(self) -> bool:
        """True if one kernel can compute the gate and up projections, which needs equal weight formats."""
        return self.values is None or self.values.form is self.gates.form

    def stage(self, x: Array, out: Array) -> Stage:
        """Return the stage that reads (M, hidden size) `x` and writes (M, intermediate size) `out`."""
        return panel_stage(x, self.gates, out, Finish(values=self.values, activation=self.activation))


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a layer, and the router that selects a few for each token (Shazeer et al. 2017).

    An expert can only run once the router has chosen the expert's rows. Experts run in order of their
    numbers, so that the sum in a row does not depend on the other rows of the batch.
    """

    router: Linear
    inner: Sequence[GatedPanels]
    down: Sequence[Linear]
    num_chosen: int  # experts per token
    normalises: bool  # scale the weights of a token's experts so that they sum to 1

    def add_(self, hidden: Array, x: Array, route: Callable[[Array], Array] | None = None) -> None:
        """Add the weighted sum of each row's expert outputs to `hidden`, in place.

        Args:
            hidden: (M, hidden size) float32.
            x: (M, hidden size) float32, the input of the layer's MLP.
            route: called with the router's choice, (M, experts per token), most likely first; returns the
                experts to use. Their weights still come from the router.
        """
        # In float64: float32 functions may round differently in the scalar tail of a vector loop.
        scores = self.router(x).astype(np.float64)
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        chosen = np.argsort(-shares, axis=-1, kind="stable")[:, : self.num_chosen]
        if route is not None:
            chosen = route(chosen)
        weights = np.take_along_axis(shares, chosen, axis=-1)
        if self.normalises:
            weights /= weights.sum(axis=-1, keepdims=True)
        weights = weights.astype(np.float32)
        for number in np.unique(chosen).tolist():
            rows, places = np.nonzero(chosen == number)
            made = self.down[number](self.inner[number](x[rows]))
            hidden[rows] += made * weights[rows, places, None]


def embedded(weights: PanelWeights, token_ids: Array) -> Array:
    """Return the embeddings of `token_ids`, float32, with shape `(*token_ids.shape, weights.num_inputs)`.

    The row of each distinct id is converted to float32 once.
    """
    if token_ids.size == 1:
        return weights.rows(token_ids.reshape(-1)).reshape(*token_ids.shape, -1)
    ids, places = np.unique(token_ids.reshape(-1), return_inverse=True)
    rows: Array = weights.rows(ids)[places]
    return rows.reshape(*token_ids.shape, weights.num_inputs)


def dense(panels: PanelWeights) -> Array:
    """Unpack panels into a dense matrix, (outputs, inputs) float32."""
    return np.ascontiguousarray(panels.rows(np.arange(panels.num_outputs)))


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight matrix: a parameter of a transformers model, or a part of one (an expert, gates or values)."""

    names: tuple[str, ...]  # panel names, one for each module that shares the parameter
    parameter: str
    expert: int | None = None  # index in a 3-D parameter of all experts
    half: int | None = None  # 0: gates, 1: values of a joint gate_up matrix
    is_transposed: bool = False  # stored as (inputs, outputs)

    def panels(self, source: Source) -> PanelWeights:
        """Read the matrix from `source` and pack it; blocks that are already quantized stay as they are."""
        is_whole = self.expert is None and self.half is None and not self.is_transposed
        if is_whole and (blocks := source.panels(self.parameter)) is not None:
            return blocks
        if self.expert is None:
            weight = source.read(self.parameter)
        else:
            weight = source.read(self.parameter, slice(self.expert, self.expert + 1))[0]
        if self.is_transposed:
            weight = weight.T
        return pack_floats(weight if self.half is None else np.array_split(weight, 2)[self.half])


def matrices_of_parameters(
    shapes: Mapping[str, tuple[int, ...]],
    tied: Mapping[str, Sequence[str]],
    transposed: Container[str],
) -> list[Matrix]:
    """Return all matrices of a model, ordered so that matrices of one kernel are next to each other.

    A matrix is named after its module. An expert in a 3-D parameter is named `parameter[number]`, and the
    halves of a joint gate_up matrix get the suffixes HALVES.

    Args:
        shapes: shapes of all 2-D and 3-D parameters by name; a parameter that modules share occurs once.
        tied: other names of shared parameters.
        transposed: names of parameters that are stored as (inputs, outputs).
    """
    matrices: list[Matrix] = []
    for full_name, shape in shapes.items():
        names = [name.removesuffix(".weight") for name in (full_name, *tied.get(full_name, ()))]
        experts = range(shape[0]) if len(shape) == 3 else [None]
        halves = range(2) if names[0].endswith(GATES_AND_VALUES) else [None]
        for expert, half in itertools.product(experts, halves):
            part = ("" if expert is None else f"[{expert}]") + ("" if half is None else HALVES[half])
            own = tuple(f"{name}{part}" for name in names)
            matrices.append(Matrix(own, full_name, expert, half, full_name in transposed))
    return sorted(matrices, key=lambda matrix: reading_order(matrix.names[0]))


def packed(matrices: Iterable[Matrix], source: Source) -> Iterator[PanelWeights]:
    """Pack matrices in parallel on all cores; yield the panels of each matrix in order."""
    return made_ahead(partial(matrix.panels, source) for matrix in matrices)


def in_huge_pages(panels: Iterable[PanelWeights]) -> Iterator[PanelWeights]:
    """Yield copies of panels that lie one after another in memory with huge pages, if supported.

    Every step reads all panels, and huge pages cause fewer TLB misses (docs/dev/decisions.md).
    """
    memory = None
    for one in panels:
        size = one.data.nbytes
        if memory is None or not memory.has_room(size):
            memory = PagedMemory(max(size, PAGED_BYTES), are_huge=True)
        data = memory.take((size,), np.uint8)
        data[:] = one.data
        yield replace(one, data=data)


def state_of(panels: Mapping[str, PanelWeights], transposed: Container[str] = ()) -> dict[str, Array]:
    """Return the parameters that panels were packed from, in float32, by parameter name.

    Args:
        panels: panels by the names in `matrices_of_parameters`.
        transposed: names of modules whose weight is stored as (inputs, outputs).
    """
    matrices: dict[str, list[Array]] = {}
    made: dict[int, Array] = {}  # by address: a tied head shares the embedding's panels
    for name, one in panels.items():  # gates come before values
        if one.address not in made:
            made[one.address] = dense(one)
        parts = matrices.setdefault(name.removesuffix(HALVES[0]).removesuffix(HALVES[1]), [])
        parts.append(made[one.address])
    state: dict[str, Array] = {}
    experts: dict[str, dict[int, Array]] = {}
    for name, parts in matrices.items():
        weight = np.concatenate(parts) if len(parts) > 1 else parts[0]
        parameter, _, number = name.removesuffix("]").partition("[")
        if number:
            experts.setdefault(parameter, {})[int(number)] = weight
        else:
            state[f"{name}.weight"] = np.ascontiguousarray(weight.T) if name in transposed else weight
    for parameter, weights in experts.items():
        state[parameter] = np.stack([weights[number] for number in range(len(weights))])
    return state
