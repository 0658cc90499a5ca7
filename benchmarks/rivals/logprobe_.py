"""This project through its public API, run as just another rival process."""

from typing import Any

from protocol import Read, TokenIds, extend_all, serve

from logprobe import LLM, SamplingParams


class Logprobe:
    """One engine for all verbs."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._llm = LLM(job["model_folder"], **job.get("options", {}))

    def use(self, variant: str) -> None:
        """Refuse what there is not: the defaults are the only variant."""
        if variant != "default":
            raise ValueError(f"variant {variant!r}: only 'default' is there")

    def close(self) -> None:
        """Free the engine."""
        self._llm.close()

    def decode(self, prompts: list[TokenIds], new_tokens: int, logprobs: int | None) -> Read:
        """Greedy tokens with the top alternatives of each."""
        params = SamplingParams(max_tokens=new_tokens, temperature=0, logprobs=logprobs, ignore_eos=True)
        outputs = self._llm.generate(prompts, params, progress=False)

        def read() -> list[TokenIds]:
            assert logprobs is None or all(
                len(output.outputs[0].logprobs) == new_tokens for output in outputs
            )
            return [list(map(int, output.outputs[0].token_ids)) for output in outputs]

        return read

    def score(self, prompts: list[TokenIds], top: int) -> Read:
        """Prompt logprobs with the top alternatives."""
        params = SamplingParams(max_tokens=0, prompt_logprobs=top)
        outputs = self._llm.generate(prompts, params, progress=False)

        def read() -> list[list[float]]:
            return [
                [output.prompt_logprobs[index][token].logprob for index, token in enumerate(prompt) if index]
                for prompt, output in zip(prompts, outputs, strict=True)
            ]

        return read

    def shared_prefix(self, context: TokenIds, continuations: list[TokenIds]) -> Read:
        """Summed logprobs (nats) of each continuation."""
        scores = self._llm.score([(context, tail) for tail in continuations])
        return lambda: [float(score.logprob) for score in scores]

    def next_token(self, prefixes: list[TokenIds], rounds: list[list[int]]) -> Read:
        """One request a prefix and round, over the whole vocabulary."""
        params = SamplingParams(max_tokens=1, temperature=0, logprobs=-1, ignore_eos=True)
        outputs: list[Any] = []
        for tokens in rounds:
            outputs = self._llm.generate(prefixes, params, progress=False)
            prefixes = extend_all(prefixes, tokens)
        return lambda: [int(output.outputs[0].token_ids[0]) for output in outputs]


if __name__ == "__main__":
    serve(Logprobe, packages=("logprobe", "torch", "transformers", "numba"))
