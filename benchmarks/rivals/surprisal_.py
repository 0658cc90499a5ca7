"""surprisal's `AutoHuggingFaceModel.surprise`; best: 8 sentences a batch, default: one by one.

It takes the padding token, which it makes the end-of-text token, out of every distribution, so that its
numbers are low by -log(1 - p(end of text)).
"""

from typing import Any

import numpy as np
from protocol import Read, serve
from surprisal import AutoHuggingFaceModel


class Surprisal:
    """Surprisals of the tokens of sentences."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._model = AutoHuggingFaceModel.from_pretrained(job["model_folder"], model_class="causal")
        self._batch_size = 8

    def use(self, variant: str) -> None:
        """Set how many sentences make a batch."""
        self._batch_size = 8 if variant == "best" else 1

    def surprisals(self, texts: list[str]) -> Read:
        """Nats a token, of all tokens but the first, summed a sentence."""
        sums: list[float] = []
        for start in range(0, len(texts), self._batch_size):
            batch = texts[start : start + self._batch_size]
            for text, scored in zip(batch, self._model.surprise(batch, use_bos_token=False), strict=True):
                num_tokens = len(self._model.tokenizer(text).input_ids)
                values = np.array([float(value) for value in scored.surprisals])
                sums.append(float(np.nansum(values[1:num_tokens])))
        return lambda: sums


if __name__ == "__main__":
    serve(Surprisal, packages=("surprisal", "torch", "transformers"))
