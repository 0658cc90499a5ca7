"""`PenaltiesLogitsProcessor`: repetition, presence and frequency penalties."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import numpy as np

from logprobe.kernels.placement import like
from logprobe.processors.arguments import PenaltiesArgs
from logprobe.processors.batch import BatchRow, BatchState, RowKey, as_batch
from logprobe.processors.builtin.masks import Cells
from logprobe.processors.interface import LogitsProcessor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from logprobe.config import EngineConfig


@final
class PenaltiesLogitsProcessor(LogitsProcessor):
    """Makes tokens that have already occurred less likely.

    First, `repetition_penalty` r (Keskar et al. 2019) changes the logit of each token that occurred in the
    prompt or the completion: a positive logit is divided by r, any other logit is multiplied by r. Then, for
    each token in the completion, `frequency_penalty` times its count and `presence_penalty` are subtracted
    from its logit, as OpenAI defines them.
    """

    Args = PenaltiesArgs

    def __init__(self, config: EngineConfig) -> None:
        del config
        self._seen: dict[RowKey, SeenTokens] = {}
        self._cells: Cells | None = None
        self._repetition = self._minus = np.empty(0, np.float32)

    def update_state(self, batch: BatchState) -> None:
        """Count the tokens generated since the previous step."""
        batch = as_batch(batch, PenaltiesArgs)
        seen = [self._seen.get(row.key) or SeenTokens(row) for row in batch.rows]
        self._seen = {row.key: tokens for row, tokens in zip(batch.rows, seen, strict=True)}
        for row, tokens in zip(batch.rows, seen, strict=True):
            tokens.observe(row.output_token_ids)
        self._cells = Cells.of([tokens.ids for tokens in seen])
        if self._cells is None:
            return
        sizes = [len(tokens.ids) for tokens in seen]
        counts = np.concatenate([tokens.counts for tokens in seen])
        repetition, presence, frequency = (
            np.repeat(np.array([getattr(row.args, name) for row in batch.rows], dtype=np.float32), sizes)
            for name in PenaltiesArgs.__struct_fields__
        )
        self._repetition = repetition
        self._minus = frequency * counts + presence * (counts > 0)

    def apply(self, logits: Any) -> Any:
        """Penalize the logits of tokens that have already occurred, in place."""
        if self._cells is not None:
            cells = self._cells.on(logits)
            values = logits[cells]
            is_positive = values > 0
            repetition = like(self._repetition, logits)
            values[is_positive] /= repetition[is_positive]
            values[~is_positive] *= repetition[~is_positive]
            logits[cells] = values - like(self._minus, logits)
        return logits


@final
class SeenTokens:
    """The distinct tokens in a sample, and how often each was generated."""

    def __init__(self, row: BatchRow) -> None:
        # Prompt tokens only matter for the repetition penalty.
        prompt = np.unique(np.asarray(row.prompt_token_ids)) if row.args.repetition_penalty != 1 else ()
        self._indices = {int(token_id): index for index, token_id in enumerate(prompt)}
        self._ids = np.empty(max(64, 2 * len(prompt)), dtype=np.int64)
        self._ids[: len(prompt)] = prompt
        self._counts = np.zeros(len(self._ids), dtype=np.float32)
        self._num_observed = 0

    @property
    def ids(self) -> NDArray[Any]:
        """The distinct tokens, (n,) int64."""
        return self._ids[: len(self._indices)]

    @property
    def counts(self) -> NDArray[Any]:
        """How often each token was generated, (n,) float32; 0 for tokens that are only in the prompt."""
        return self._counts[: len(self._indices)]

    def observe(self, output: Sequence[int]) -> None:
        """Count the tokens in `output` that were not counted before."""
        for token_id in output[self._num_observed :]:
            index = self._indices.setdefault(token_id, len(self._indices))
            if index == len(self._ids):
                self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[index] = token_id
            self._counts[index] += 1
        self._num_observed = len(output)
