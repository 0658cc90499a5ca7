"""Memory layout of weight panels for each weight format ("form").

A panel holds PANEL outputs, input-major, so that the weights of one input are contiguous and load as vectors.
Its inputs are divided into blocks (quantised blocks have their own scales) of groups of GROUP inputs:

============  =====  ==================================  ============================================
form          block  a block's header                    a group
============  =====  ==================================  ============================================
float32           8                                      8 x 48 float32
bfloat16          8                                      4 x 48 lanes of two: inputs k and k + 1
float16           8                                      8 x 48 float16
int4             32  48 scales, 48 summands, float16     48 lanes of eight times 4 bits, lowest first
int4_wide        32  the same, float32                   the same
int8             32  48 scales, float16                  8 x 48 int8
int8_wide        16  48 scales, float32                  8 x 48 int8
============  =====  ==================================  ============================================
"""

from __future__ import annotations

from dataclasses import dataclass

from logprobe.kernels.processor import FLOAT

LAYOUT = 1  # version of this layout; stored panels of other versions are not read
PANEL = 48
GROUP = 8
RUN = 16  # inputs that are summed separately, because a sum's rounding error grows with its length
TILE_ROWS = 8  # row blocks are multiples of this


@dataclass(frozen=True, slots=True)
class Form:
    """The weight format of a panel."""

    name: str
    inputs: int  # per block
    header: int  # bytes of a block's scales and summands
    group: int  # bytes per group

    @property
    def block_bytes(self) -> int:
        """Bytes per block of one panel."""
        return self.header + self.inputs // GROUP * self.group

    def panel_bytes(self, num_inputs: int) -> int:
        """Return the bytes of a panel with `num_inputs` inputs, a multiple of the block's inputs."""
        return num_inputs // self.inputs * self.block_bytes


FLOAT32 = Form("float32", GROUP, 0, FLOAT * GROUP * PANEL)
BFLOAT16 = Form("bfloat16", GROUP, 0, 2 * GROUP * PANEL)
FLOAT16 = Form("float16", GROUP, 0, 2 * GROUP * PANEL)
INT4 = Form("int4", 32, 2 * 2 * PANEL, GROUP * PANEL // 2)
INT4_WIDE = Form("int4_wide", 32, 2 * FLOAT * PANEL, GROUP * PANEL // 2)
INT8 = Form("int8", 32, 2 * PANEL, GROUP * PANEL)
INT8_WIDE = Form("int8_wide", 16, FLOAT * PANEL, GROUP * PANEL)
FORMS = {form.name: form for form in (FLOAT32, BFLOAT16, FLOAT16, INT4, INT4_WIDE, INT8, INT8_WIDE)}
FORM_NUMBERS = {name: number for number, name in enumerate(FORMS)}  # as in native/tiles.hpp
