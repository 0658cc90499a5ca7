"""llama.cpp through xllamacpp, on a GGUF file: unless told, the 8-bit one that `make rivals` makes."""

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xllamacpp
from protocol import Read, TokenIds, extend_all, serve

WEIGHTS = Path(sys.prefix) / "weights.q8_0.gguf"
THREADS = 2
CONTEXT_LEN = 2048  # of the requests of all slots together
WHOLE_VOCABULARY = 1 << 20  # more alternatives than any has tokens


class LlamaCpp:
    """A server in this process, with a slot for each of the requests that come at once."""

    def __init__(self, job: dict[str, Any]) -> None:
        options = job.get("options", {})
        self._weights = Path(options.get("weights", WEIGHTS))
        params = xllamacpp.CommonParams()
        params.model.path = str(self._weights)
        params.n_parallel = options.get("num_slots", 1)
        params.n_ctx = options.get("context_len", CONTEXT_LEN)
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = THREADS
        params.cache_ram_mib = 0  # no prompt comes twice
        self._server = xllamacpp.Server(params)
        self._pool = ThreadPoolExecutor(params.n_parallel)

    def use(self, variant: str) -> None:
        """Refuse what there is not."""
        if not self._weights.stem.endswith(variant):
            raise ValueError(f"variant {variant!r}: only {self._weights.name} is there")

    def decode(self, prompts: list[TokenIds], new_tokens: int, logprobs: int | None) -> Read:
        """Greedy tokens, as many prompts at once as there are slots."""
        answers = self._complete(prompts, max_tokens=new_tokens, ignore_eos=True, logprobs=logprobs)
        return lambda: list(map(_generated, answers))

    def next_token(self, prefixes: list[TokenIds], rounds: list[list[int]]) -> Read:
        """One request a prefix and round, for all alternatives of one token: the server has no other way."""
        likeliest: list[int] = []
        for tokens in rounds:
            answers = self._complete(prefixes, max_tokens=1, logprobs=WHOLE_VOCABULARY)
            likeliest = [_generated(answer)[0] for answer in answers]
            prefixes = extend_all(prefixes, tokens)
        return lambda: likeliest

    def _complete(self, prompts: list[TokenIds], **params: Any) -> list[Any]:
        asked = [{"prompt": prompt, "temperature": 0, **params} for prompt in prompts]
        return list(self._pool.map(self._server.handle_completions, asked))


def _generated(answer: dict[str, Any]) -> TokenIds:
    """The ids of what was generated; -1 where the server withholds (a character cut at the end)."""
    rows = answer["choices"][0]["logprobs"] or {"content": ()}  # null where all of them are withheld
    told = [entry["id"] for entry in rows["content"]]
    return told + [-1] * (answer["usage"]["completion_tokens"] - len(told))


if __name__ == "__main__":
    serve(LlamaCpp, packages=("xllamacpp",))
