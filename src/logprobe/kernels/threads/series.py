"""Many stages in one launch (CPU): each thread goes through all of them, and waits till each is done.

A step of one token is hundreds of loops of a few microseconds, and starting one from Python costs as much
as it takes. Recorded once, they are started together, as a CUDA graph does for a GPU's kernels.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from logprobe.kernels.native import StageRecord, library

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.kernels.threads.parallel import Stage


class Series:
    """Stages whose addresses stay valid, ready to run again and again."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = list(stages)  # they keep the memory
        self._records = (StageRecord * len(self._stages))(
            *(
                StageRecord(library().address(stage.kernel), ctypes.addressof(stage.work))
                for stage in self._stages
            )
        )

    def run(self) -> None:
        """Run every stage, each after the one before it is done; releases the GIL."""
        library().run_series(self._records, torch.get_num_threads())
