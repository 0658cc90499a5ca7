"""The matrices of a GGUF file, kept as panels in a file that is mapped and never converted again.

PANELS holds the panels' bytes, INDEX where each tensor's lie, with their form and shape. Queries, keys and
values of a layer follow each other, so that one product reads them as one.
Before it: the conversion. After it: the engine's `published` layers.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from logprobe.kernels.layers.forms import PanelWeights, pack_floats
from logprobe.kernels.layers.gguf_blocks import panels_of_blocks
from logprobe.kernels.layers.widen import FORMS, LAYOUT
from logprobe.models.gguf.weights import in_order, transformers_name

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedConfig

    from logprobe.models.gguf.file import GgufFile
PANELS: Final = "panels.bin"
INDEX: Final = "panels.json"
_ALIGNMENT: Final = 64  # bytes of a cache line
_READ_AS_ONE: Final = {"q_proj": 0, "k_proj": 1, "v_proj": 2}


def write_panels(gguf: GgufFile, config: PreTrainedConfig, folder: Path) -> None:
    """Write every matrix of the file as panels, under the name of its transformers module.

    Raises:
        OSError: the folder cannot be written.
    """
    sources = {
        transformers_name(gguf.architecture, source).removesuffix(".weight"): source
        for source, shape in gguf.shapes.items()
        if len(shape) == 2
    }
    entries: dict[str, Any] = {}
    with (folder / PANELS).open("wb") as file:
        for name in sorted(sources, key=_reading_order):
            panels = _panels(gguf, config, sources[name])
            file.write(bytes(-file.tell() % _ALIGNMENT))
            entries[name] = [panels.form.name, panels.num_outputs, panels.num_inputs, file.tell()]
            file.write(panels.data.numpy().data)
    index = {"layout": LAYOUT, "tensors": entries}
    (folder / INDEX).write_text(json.dumps(index) + "\n", encoding="utf-8")


def read_panels(folder: Path) -> dict[str, PanelWeights]:
    """Map a model's panels, by the name of their module; none where the file has none, or older ones."""
    path = folder / INDEX
    index = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if index.get("layout") != LAYOUT:
        return {}
    memory = torch.from_numpy(np.memmap(folder / PANELS, dtype=np.uint8, mode="c"))
    panels: dict[str, PanelWeights] = {}
    for name, (form, num_outputs, num_inputs, start) in index["tensors"].items():
        whole = PanelWeights(FORMS[form], num_outputs, num_inputs, memory)
        panels[name] = PanelWeights(
            whole.form, num_outputs, num_inputs, memory[start : start + whole.num_bytes]
        )
    return panels


def _reading_order(name: str) -> tuple[str, int, str]:
    parent, _, last = name.rpartition(".")
    return parent, _READ_AS_ONE.get(last, len(_READ_AS_ONE)), last


def _panels(gguf: GgufFile, config: PreTrainedConfig, source: str) -> PanelWeights:
    """In the form of the file's blocks, or else in the smallest form of float."""
    raw, type_name = gguf.raw(source)
    panels = panels_of_blocks(in_order(gguf, config, source, raw), type_name)
    if panels is not None:
        return panels
    weight = np.array(in_order(gguf, config, source, gguf.tensor(source)))  # torch wants to own it
    return pack_floats(torch.from_numpy(weight))
