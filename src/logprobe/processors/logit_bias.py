"""`LogitBiasLogitsProcessor`: a bias on single tokens, OpenAI's `logit_bias`."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import torch

from logprobe.processors.args import LogitBiasArgs
from logprobe.processors.batch import BatchState, as_batch
from logprobe.processors.cells import Cells
from logprobe.processors.interface import LogitsProcessor

if TYPE_CHECKING:
    from torch import Tensor

    from logprobe.config import EngineConfig


@final
class LogitBiasLogitsProcessor(LogitsProcessor):
    """Adds `logit_bias` (token id → nats) to the logits of its tokens; an impossible one stays impossible."""

    Args = LogitBiasArgs

    def __init__(self, config: EngineConfig) -> None:
        del config
        self._cells: Cells | None = None
        self._biases = torch.empty(0)

    def update_state(self, batch: BatchState) -> None:
        """Collect the cells, unless rows and arguments are those of the step before."""
        batch = as_batch(batch, LogitBiasArgs)
        if batch.is_same:
            return
        biases = [row.args.logit_bias for row in batch.rows]
        self._cells = Cells.of([list(bias) for bias in biases])
        self._biases = torch.tensor(
            [value for bias in biases for value in bias.values()], dtype=torch.float32
        )

    def apply(self, logits: Tensor) -> Tensor:
        """Add the biases in place."""
        if self._cells is not None:
            logits[self._cells.on(logits)] += self._biases.to(logits)
        return logits
