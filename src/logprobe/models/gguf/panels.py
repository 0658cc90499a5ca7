"""The matrices of a GGUF file as panels, under the names of their transformers modules.

Before it: the conversion. After it: `stored.panels`, which writes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from logprobe.kernels.layers.forms import pack_floats
from logprobe.kernels.layers.gguf_blocks import panels_of_blocks
from logprobe.models.gguf.weights import in_order, transformers_name
from logprobe.models.stored import panels

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedConfig

    from logprobe.kernels.layers.forms import PanelWeights
    from logprobe.models.gguf.file import GgufFile


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
    names = sorted(sources, key=panels.reading_order)
    panels.write_panels((((name,), _panels(gguf, config, sources[name])) for name in names), folder)


def _panels(gguf: GgufFile, config: PreTrainedConfig, source: str) -> PanelWeights:
    """In the form of the file's blocks, or else in the smallest form of float."""
    raw, type_name = gguf.raw(source)
    blocks = panels_of_blocks(in_order(gguf, config, source, raw), type_name)
    if blocks is not None:
        return blocks
    weight = np.array(in_order(gguf, config, source, gguf.tensor(source)))  # torch wants to own it
    return pack_floats(torch.from_numpy(weight))
