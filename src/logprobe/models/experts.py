"""Present a checkpoint's separate matrices of each expert as transformers' joint parameters."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import numpy as np

from logprobe.errors import UnsupportedModelError
from logprobe.models.sources import EVERY

if TYPE_CHECKING:
    from collections.abc import Mapping

    from logprobe.kernels.arrays import Array
    from logprobe.kernels.layers.forms import PanelWeights
    from logprobe.models.sources import Rows, Source

_SPLIT: Final = ("mlp", ("gate_proj", "up_proj", "down_proj"))
# Model type → name of the layer's MLP in checkpoints, and names of an expert's gate, up and down matrices.
_FORMATS: Final = {
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
    "olmoe": _SPLIT,
    "qwen2_moe": _SPLIT,
    "qwen3_moe": _SPLIT,
}
_MLP: Final = "mlp"  # transformers' name


def with_joined_experts(source: Source, model_type: str) -> Source:
    """Return a source with transformers' names; `source` itself if it has no separate experts.

    The matrices of a layer's experts become `mlp.experts.gate_up_proj`, (experts, 2 · width, hidden size),
    and `mlp.experts.down_proj`, (experts, hidden size, width).

    Raises:
        UnsupportedModelError: an expert lacks a matrix, or the shapes of experts differ.
    """
    if model_type not in _FORMATS:
        return source
    own_mlp, (gate, up, down) = _FORMATS[model_type]
    pattern = re.compile(rf"(.+)\.{own_mlp}\.experts\.(0|[1-9]\d{{0,5}})\.({gate}|{up}|{down})\.weight")
    layers: dict[str, dict[tuple[str, int], str]] = {}  # layer → (part, expert) → name
    renamed: dict[str, str] = {}
    for name in source.shapes:
        if match := pattern.fullmatch(name):
            layers.setdefault(match[1], {})[match[3], int(match[2])] = name
        else:
            renamed[name.replace(f".{own_mlp}.", f".{_MLP}.")] = name
    joined: dict[str, list[list[str]]] = {}
    for layer, names in layers.items():
        num_experts = 1 + max(number for _, number in names)
        shapes = {(part, source.shapes[name]) for (part, _), name in names.items()}
        if len(names) != 3 * num_experts or len(shapes) != 3:
            raise UnsupportedModelError(
                f"the experts of {layer} lack matrices or have different shapes; fetch the model again"
            )
        experts, numbers = f"{layer}.{_MLP}.experts", range(num_experts)
        joined[f"{experts}.gate_up_proj"] = [[names[gate, number], names[up, number]] for number in numbers]
        joined[f"{experts}.down_proj"] = [[names[down, number]] for number in numbers]
    return _JoinedExperts(source, renamed, joined) if joined else source


class _JoinedExperts:
    """A source that concatenates the matrices of each expert by rows, and stacks a layer's experts."""

    def __init__(
        self, source: Source, renamed: Mapping[str, str], joined: Mapping[str, list[list[str]]]
    ) -> None:
        self._source, self._renamed, self._joined = source, renamed, joined
        own = source.shapes
        self._shapes = {name: own[one] for name, one in renamed.items()}
        for name, experts in joined.items():
            num_rows = sum(own[part][0] for part in experts[0])
            self._shapes[name] = (len(experts), num_rows, *own[experts[0][0]][1:])

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the tensors by name."""
        return self._shapes

    def read(self, name: str, rows: Rows = EVERY) -> Array:
        """Read rows of one tensor; a row of a joint parameter is an expert."""
        if name in self._renamed:
            return self._source.read(self._renamed[name], rows)
        experts = self._joined[name]
        numbers = np.arange(len(experts))[rows]
        return np.stack(
            [np.concatenate([self._source.read(part) for part in experts[number]]) for number in numbers]
        )

    def panels(self, name: str) -> PanelWeights | None:
        """Return a quantized matrix as panels; see `Source.panels`."""
        return self._source.panels(self._renamed[name]) if name in self._renamed else None
