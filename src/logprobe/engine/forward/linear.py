"""Linear layers and embeddings whose weights are packed in panels (CPU, float32 activations).

A panel is a tile of the weight matrix in the number format of the checkpoint; kernels convert the weights to
float32 on use. Results equal those of a float32 matrix except for the order of summation, and fewer bytes are
read. The same kernels run a single row and a whole prompt.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from logprobe.engine.forward.process_memory import PagedMemory
from logprobe.kernels.layers.forms import pack_floats
from logprobe.kernels.layers.panels import PLAIN, Finish, panel_stage
from logprobe.kernels.placement import as_tensor
from logprobe.models.sources import made_ahead
from logprobe.models.stored.panels import reading_order

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

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

    def stages(
        self, x: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None = None, factor: float = 1.0
    ) -> list[Stage]:
        """Return the kernel stages for `out = factor * linear(x) + residual`, where `x` is (M, inputs)."""
        widths = [part.num_outputs for part in self.parts]
        summands = [None] * len(widths) if residual is None else torch.split(residual, widths, dim=1)
        stages = []
        for part, target, summand in zip(self.parts, torch.split(out, widths, dim=1), summands, strict=True):
            is_plain = summand is None and factor == 1.0
            finish = PLAIN if is_plain else Finish(residual=summand, factor=factor)
            stages.append(panel_stage(x, part, target, finish))
        return stages

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return (..., outputs) for `x` of shape (..., inputs)."""
        rows = x.reshape(-1, self.num_inputs)
        out = rows.new_empty(len(rows), self.num_outputs)
        for stage in self.stages(rows, out):
            stage.run()
        return out.view(*x.shape[:-1], self.num_outputs)


@dataclass(frozen=True, slots=True)
class GatedPanels:
    """The first half of an MLP: activation(gates) · values, or activation(gates) if `values` is None."""

    gates: PanelWeights
    values: PanelWeights | None
    activation: str

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return (M, intermediate size) for `x` of shape (M, hidden size)."""
        out = x.new_empty(len(x), self.gates.num_outputs)
        self.stage(x, out).run()
        return out

    @property
    def is_one_pass(self) -> bool:
        """True if one kernel can compute gates and values, because their weight formats are the same."""
        return self.values is None or self.values.form is self.gates.form

    def stage(self, x: torch.Tensor, out: torch.Tensor) -> Stage:
        """Return the stage that reads (M, hidden size) `x` and writes (M, intermediate size) `out`."""
        return panel_stage(x, self.gates, out, Finish(values=self.values, activation=self.activation))


def embedded(weights: PanelWeights, token_ids: torch.Tensor) -> torch.Tensor:
    """Return the embeddings of `token_ids`, float32, with shape `(*token_ids.shape, weights.num_inputs)`.

    The row of each distinct id is converted to float32 once.
    """
    ids, places = np.unique(token_ids.reshape(-1).numpy(), return_inverse=True)
    rows = torch.from_numpy(weights.rows(ids))
    return rows[torch.from_numpy(places)].view(*token_ids.shape, weights.num_inputs)


class PanelLinear(nn.Module):
    """A linear layer on panels that replaces an `nn.Linear` or GPT-2's `Conv1D` in a transformers model."""

    def __init__(self, panels: PanelWeights) -> None:
        super().__init__()
        self._linear = Linear([panels])
        self.in_features, self.out_features = panels.num_inputs, panels.num_outputs
        self.bias = panels.bias

    @functools.cached_property
    def weight(self) -> torch.Tensor:
        """The whole weight, (outputs, inputs) float32, for modules that read it directly."""
        return dense(self._linear.parts[0])

    def rows(self, start: int, end: int) -> torch.Tensor:
        """Return rows [start, end) of the weight, (end - start, inputs) float32."""
        return torch.from_numpy(self._linear.parts[0].rows(np.arange(start, end)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (..., out_features) for `x` of shape (..., in_features)."""
        return self._linear(x)


class PanelEmbedding(nn.Module):
    """An embedding on panels that replaces an `nn.Embedding` in a transformers model."""

    def __init__(self, panels: PanelWeights) -> None:
        super().__init__()
        self._panels = panels
        self.num_embeddings, self.embedding_dim = panels.num_outputs, panels.num_inputs
        # transformers reads a model's device and dtype from its first parameter; this may be the only one.
        self.no_weight = nn.Parameter(torch.empty(0), requires_grad=False)

    @functools.cached_property
    def weight(self) -> torch.Tensor:
        """The whole weight, (num_embeddings, embedding_dim) float32, for modules that read it directly."""
        return dense(self._panels)

    def rows(self, start: int, end: int) -> torch.Tensor:
        """Return rows [start, end) of the weight, (end - start, embedding_dim) float32."""
        return torch.from_numpy(self._panels.rows(np.arange(start, end)))

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of `token_ids`, float32, with shape `(*token_ids.shape, embedding_dim)`."""
        return embedded(self._panels, token_ids)


def dense(panels: PanelWeights) -> torch.Tensor:
    """Unpack panels into a dense matrix, (outputs, inputs) float32."""
    return torch.from_numpy(np.ascontiguousarray(panels.rows(np.arange(panels.num_outputs))))


def use_panels_(model: nn.Module, panels: Mapping[str, PanelWeights]) -> None:
    """Replace the linear layers and embeddings in a transformers model that have panels, in place.

    `panels` is keyed by full module name. Modules of classes derived from `nn.Linear` or `nn.Embedding` are
    left unchanged.
    """
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if name not in panels:
            continue
        if is_linear(module):
            bias: Any = module.bias
            own = panels[name] if bias is None else panels[name].with_bias(bias)
            model.set_submodule(name, PanelLinear(own))
        elif type(module) is nn.Embedding:
            model.set_submodule(name, PanelEmbedding(panels[name]))


def is_linear(module: object) -> bool:
    """Return True if the module's class is exactly `nn.Linear` or GPT-2's `Conv1D`, not a derived class."""
    return type(module) is nn.Linear or is_transposed(module)


def is_transposed(module: object) -> bool:
    """Return True for GPT-2's `Conv1D`; compares names to avoid importing `transformers.pytorch_utils`."""
    kind = type(module)
    return (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D")


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight matrix: a parameter of a transformers model, or one expert or one half of a parameter."""

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
        return pack_floats(as_tensor(weight if self.half is None else np.array_split(weight, 2)[self.half]))


def matrices_of(model: nn.Module, *, with_experts: bool) -> list[Matrix]:
    """Return all matrices of a model, ordered so that a kernel's matrices are next to each other.

    A matrix is named after its module. An expert in a shared parameter is named `parameter[number]`, and the
    halves of a joint gate_up matrix get the suffixes HALVES. Without `with_experts`, 3-D parameters, which
    hold all experts of a layer, are left out.
    """
    shared: dict[int, list[str]] = {}
    for full_name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.dim() == 2 or (parameter.dim() == 3 and with_experts):
            shared.setdefault(id(parameter), []).append(full_name)
    shapes = {names[0]: tuple(model.get_parameter(names[0]).shape) for names in shared.values()}
    transposed = {f"{name}.weight" for name, module in model.named_modules() if is_transposed(module)}
    return matrices_of_parameters(shapes, {names[0]: names[1:] for names in shared.values()}, transposed)


def matrices_of_parameters(
    shapes: Mapping[str, tuple[int, ...]],
    tied: Mapping[str, Sequence[str]],
    transposed: Container[str],
) -> list[Matrix]:
    """Return all matrices of a model; see `matrices_of`.

    Args:
        shapes: shapes of all 2-D and 3-D parameters by name; a shared parameter occurs once.
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
        size = one.data.numel()
        if memory is None or not memory.has_room(size):
            memory = PagedMemory(max(size, PAGED_BYTES), are_huge=True)
        place = memory.take((size,), torch.uint8)
        yield replace(one, data=place.copy_(one.data))


def state_of(panels: Mapping[str, PanelWeights], transposed: Container[str] = ()) -> dict[str, torch.Tensor]:
    """Return the parameters that panels were packed from, in float32, by parameter name.

    Args:
        panels: panels by the names in `matrices_of`.
        transposed: names of modules whose weight is stored as (inputs, outputs).
    """
    matrices: dict[str, list[torch.Tensor]] = {}
    made: dict[int, torch.Tensor] = {}  # by address: a tied head shares the embedding's panels
    for name, one in panels.items():  # gates come before values
        address = one.data.data_ptr()
        if address not in made:
            made[address] = dense(one)
        matrices.setdefault(name.removesuffix(HALVES[0]).removesuffix(HALVES[1]), []).append(made[address])
    state: dict[str, torch.Tensor] = {}
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, parts in matrices.items():
        weight = torch.cat(parts) if len(parts) > 1 else parts[0]
        parameter, _, number = name.removesuffix("]").partition("[")
        if number:
            experts.setdefault(parameter, {})[int(number)] = weight
        else:
            state[f"{name}.weight"] = weight.T.contiguous() if name in transposed else weight
    for parameter, weights in experts.items():
        state[parameter] = torch.stack([weights[number] for number in range(len(weights))])
    return state
