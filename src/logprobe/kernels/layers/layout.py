"""Memory layout of weight panels for each weight format ("form").

A panel holds the weights of PANEL outputs. The weights of one input are contiguous, so that they load as
vectors. Inputs are divided into blocks (each quantized block has its own scales), and blocks into groups of
GROUP inputs:

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

LAYOUT = 1  # version of this layout; stored panels of other versions are not read
PANEL = 48
GROUP = 8
RUN = 16  # this many inputs are summed separately, because a sum's rounding error grows with its length
LINE = 64  # bytes of a cache line
TILE_ROWS = 8  # the number of rows in a row block is a multiple of this


@dataclass(frozen=True, slots=True)
class Form:
    """The weight format of a panel."""

    name: str
    inputs: int  # number of inputs per block
    header: int  # size of a block's scales and summands, in bytes
    group: int  # size of a group, in bytes

    @property
    def block_bytes(self) -> int:
        """Size of one block in a panel, in bytes."""
        return self.header + self.inputs // GROUP * self.group

    def panel_bytes(self, num_inputs: int) -> int:
        """Return the size in bytes of a panel; `num_inputs` must be a multiple of `inputs`."""
        return num_inputs // self.inputs * self.block_bytes


FLOAT32 = Form("float32", GROUP, 0, 4 * GROUP * PANEL)
BFLOAT16 = Form("bfloat16", GROUP, 0, 2 * GROUP * PANEL)
FLOAT16 = Form("float16", GROUP, 0, 2 * GROUP * PANEL)
INT4 = Form("int4", 32, 2 * 2 * PANEL, GROUP * PANEL // 2)
INT4_WIDE = Form("int4_wide", 32, 2 * 4 * PANEL, GROUP * PANEL // 2)
INT8 = Form("int8", 32, 2 * PANEL, GROUP * PANEL)
INT8_WIDE = Form("int8_wide", 16, 4 * PANEL, GROUP * PANEL)
FORMS = {form.name: form for form in (FLOAT32, BFLOAT16, FLOAT16, INT4, INT4_WIDE, INT8, INT8_WIDE)}
FORM_NUMBERS = {name: number for number, name in enumerate(FORMS)}  # as in native/tiles.hpp
