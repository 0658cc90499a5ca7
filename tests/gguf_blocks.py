"""Random blocks of GGUF's quantized types."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Offsets of the float16 fields in a block. The first types have a panel form.
FORMS: Final = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q8_0": [0], "Q4_K": [0, 2], "Q6_K": [208]}
HALVES: Final = FORMS | {"Q5_1": [0, 2], "Q2_K": [80, 82], "Q3_K": [108], "Q5_K": [0, 2]}


def random_blocks(type_name: str, num_rows: int, num_inputs: int) -> NDArray[Any]:
    """Return random blocks with finite float16 fields (all other bits are valid): (rows, bytes of a row)."""
    inputs, size = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (num_rows, num_inputs // inputs, size), dtype=np.uint8)
    for place in HALVES[type_name]:
        fields = rng.normal(0, 0.02, blocks.shape[:2]).astype(np.float16)
        blocks[..., place : place + 2] = fields[..., None].view(np.uint8)
    return blocks.reshape(num_rows, -1)
