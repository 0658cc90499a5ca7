"""llama.cpp through xllamacpp on the 8-bit file that `make rivals` makes, for reference beside float32."""

import sys
from pathlib import Path
from typing import Any

import xllamacpp
from protocol import Read, TokenIds, serve

WEIGHTS = Path(sys.prefix) / "weights.q8_0.gguf"
THREADS = 2


class LlamaCpp:
    """One slot, since only requests alone are compared."""

    def __init__(self, job: dict[str, Any]) -> None:
        del job  # its folder holds float32 weights, which this rival is not compared on
        params = xllamacpp.CommonParams()
        params.model.path = str(WEIGHTS)
        params.n_ctx, params.n_parallel = 2048, 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = THREADS
        self._server = xllamacpp.Server(params)

    def use(self, variant: str) -> None:
        """Refuse what there is not."""
        if variant != "q8_0":
            raise ValueError(f"variant {variant!r}: only 'q8_0' is there")

    def decode(self, prompts: list[TokenIds], new_tokens: int, logprobs: int | None) -> Read:
        """Greedy tokens, one prompt after another."""
        common = {"max_tokens": new_tokens, "temperature": 0, "ignore_eos": True, "logprobs": logprobs}
        answers = [self._server.handle_completions({"prompt": prompt, **common}) for prompt in prompts]
        return lambda: [
            [entry["id"] for entry in answer["choices"][0]["logprobs"]["content"]] for answer in answers
        ]


if __name__ == "__main__":
    serve(LlamaCpp, packages=("xllamacpp",))
