"""A logits processor of one's own: makes the words of the prompt more likely in the completion.

Run `python examples/say_it_again.py` (the default model is fetched once), or register it by its place:
`LLM(logits_processors=["say_it_again:SayItAgainLogitsProcessor"])` with this folder on `PYTHONPATH`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import numpy as np
import torch

from logprobe import LLM, SamplingParams
from logprobe.processors import BatchState, LogitsProcessor

if TYPE_CHECKING:
    from logprobe.config import EngineConfig


class SayItAgainArgs(msgspec.Struct):
    """What a request may ask; each name is a key of `logits_processors_args`."""

    again_bias: float = 0.0  # nats


class SayItAgainLogitsProcessor(LogitsProcessor):
    """Adds `again_bias` to the logit of every token of the prompt."""

    Args = SayItAgainArgs

    def __init__(self, config: EngineConfig) -> None:
        """Set up once, at the engine's start; `config` holds its settings."""
        del config  # this rule needs none of them
        self._rows: list[tuple[torch.Tensor, float]] = []

    def update_state(self, batch: BatchState) -> None:
        """Note, row by row, what the next logits are to get."""
        self._rows = [
            (torch.from_numpy(np.unique(row.prompt_token_ids)), row.args.again_bias) for row in batch.rows
        ]

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Change (rows, vocabulary) logits; the state stays as it is."""
        for row, (token_ids, bias) in zip(logits, self._rows, strict=True):
            row[token_ids] += bias
        return logits


def main() -> None:
    """Show two answers to one prompt, and what the processor did to the first token of the second."""
    with LLM(logits_processors=[SayItAgainLogitsProcessor]) as llm:
        prompt = "The lighthouse keeper lit the lamp. Then she"
        plain = SamplingParams(temperature=0, max_tokens=12)
        again = SamplingParams(
            temperature=0,
            max_tokens=12,
            logprobs=3,
            explain=True,
            logits_processors_args={"again_bias": 3.0},
        )
        for output in llm.generate([prompt, prompt], [plain, again]):
            print(repr(output.outputs[0].text))
            for effect in (output.outputs[0].explanations or [[]])[0]:
                print(f"{effect.processor}: {effect.mass_moved:.0%} of the probability moved")


if __name__ == "__main__":
    main()
