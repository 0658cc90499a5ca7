"""minicons' `IncrementalLMScorer.token_score`; best: 8 sentences a batch, default: one by one.

Its BOS is put first by hand: its own `bos_token=True` depends on the tokenizer's.
"""

from typing import Any

import torch
from minicons.scorer import IncrementalLMScorer
from protocol import Read, serve


class Minicons:
    """Surprisals of the tokens of sentences."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._scorer = IncrementalLMScorer(job["model_folder"], "cpu", dtype=torch.float32)
        self._batch_size = 8
        if self._scorer.tokenizer.pad_token is None:
            self._scorer.tokenizer.pad_token = self._scorer.tokenizer.eos_token

    def use(self, variant: str) -> None:
        """Set how many sentences make a batch."""
        self._batch_size = 8 if variant == "best" else 1

    def surprisals(self, texts: list[str]) -> Read:
        """Nats a token, of all tokens but the first, summed a sentence."""
        sums: list[float] = []
        for start in range(0, len(texts), self._batch_size):
            scored = self._scorer.token_score(texts[start : start + self._batch_size], surprisal=True)
            sums += [sum(value for _, value in sentence[1:]) for sentence in scored]
        return lambda: sums


if __name__ == "__main__":
    serve(Minicons, packages=("minicons", "torch", "transformers"))
