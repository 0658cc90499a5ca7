"""Panels of weights as they were published: how each form keeps them.

A panel holds PANEL outputs, inputs outermost, so that the weights of one input stand side by side in vectors.
Its inputs come in blocks (a block of GGUF has its own scale) of groups of GROUP inputs:

============  =====  ==================================  ============================================
form          block  a block's header                    a group
============  =====  ==================================  ============================================
float32           8                                      8 x 48 float32
bfloat16          8                                      4 x 48 lanes of two: inputs k and k + 1
float16           8                                      8 x 48 float16
nibbles          32  48 scales, 48 summands, float16     48 lanes of eight times 4 bits, lowest first
nibbles_wide     32  the same, float32                   the same
octets           32  48 scales, float16                  8 x 48 int8
octets_wide      16  48 scales, float32                  8 x 48 int8
============  =====  ==================================  ============================================

Before it: nothing. After it: what brings weights into panels, and what multiplies by them.
"""

from __future__ import annotations

from dataclasses import dataclass
from platform import machine

from logprobe.kernels.processor import FLOAT, HAS_WIDE_REGISTERS, cpu_features

LAYOUT = 1  # of what this file states; a file of panels in another is not read
PANEL = 48
GROUP = 8
RUN = 16  # inputs, whose products are summed by themselves: a sum's rounding error grows with its length
TILE_ROWS = 8 if HAS_WIDE_REGISTERS else 2  # whose sums stay in registers: 24 of 32, or 12 of 16


def can_widen() -> bool:
    """Whether this processor has the instructions: fused products, and float16 to float32."""
    return machine() in {"aarch64", "arm64"} or {"fma", "f16c"} <= cpu_features()


@dataclass(frozen=True, slots=True)
class Form:
    """How a panel's weights are kept."""

    name: str
    inputs: int  # of a block
    header: int  # bytes of a block's scales and summands
    group: int  # bytes of a group
    direct_rows: int  # up to so many rows, weights are widened where they are used

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of one panel."""
        return self.header + self.inputs // GROUP * self.group

    def panel_bytes(self, num_inputs: int) -> int:
        """Bytes of a panel."""
        return num_inputs // self.inputs * self.block_bytes


FLOAT_ROWS, DIRECT_ROWS = (4, 8) if HAS_WIDE_REGISTERS else (TILE_ROWS, TILE_ROWS)  # measured
FLOAT32 = Form("float32", GROUP, 0, FLOAT * GROUP * PANEL, FLOAT_ROWS)
BFLOAT16 = Form("bfloat16", GROUP, 0, 2 * GROUP * PANEL, FLOAT_ROWS)
FLOAT16 = Form("float16", GROUP, 0, 2 * GROUP * PANEL, FLOAT_ROWS)
NIBBLES = Form("nibbles", 32, 2 * 2 * PANEL, GROUP * PANEL // 2, DIRECT_ROWS)
NIBBLES_WIDE = Form("nibbles_wide", 32, 2 * FLOAT * PANEL, GROUP * PANEL // 2, DIRECT_ROWS)
OCTETS = Form("octets", 32, 2 * PANEL, GROUP * PANEL, DIRECT_ROWS)
OCTETS_WIDE = Form("octets_wide", 16, FLOAT * PANEL, GROUP * PANEL, DIRECT_ROWS)
FORMS = {form.name: form for form in (FLOAT32, BFLOAT16, FLOAT16, NIBBLES, NIBBLES_WIDE, OCTETS, OCTETS_WIDE)}
