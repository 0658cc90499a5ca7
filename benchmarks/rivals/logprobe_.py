"""This project through its public API, run as just another rival process.

The first job's verb chooses the front door: `AsyncLM` for next-token rows, `LLM` for all else.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from protocol import Read, TokenIds, ask_rounds, extend_all, serve

from logprobe import LLM, SamplingParams
from logprobe.next_token import AsyncLM

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.next_token import AsyncVirtualLM

TICK_S = 0.001


def refuse_variants(variant: str) -> None:
    """Refuse what there is not: the defaults are the only variant."""
    if variant != "default":
        raise ValueError(f"variant {variant!r}: only 'default' is there")


class Offline:
    """`LLM`: one engine for all its verbs."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._llm = LLM(job["model_folder"], **job.get("options", {}))

    def use(self, variant: str) -> None:
        """Refuse what there is not."""
        refuse_variants(variant)

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

    def score(
        self,
        prompts: list[TokenIds],
        top: int,
        columns: Sequence[str] = (),
        token_ids: Sequence[Sequence[TokenIds]] | None = None,
    ) -> Read:
        """Prompt logprobs with the top alternatives, further columns by name, and ids of each position."""
        asked = {"max_tokens": 0, "prompt_logprobs": top} | dict.fromkeys(columns, True)
        params = [
            SamplingParams(**asked, logprob_token_ids=ids) for ids in token_ids or [None] * len(prompts)
        ]
        outputs = self._llm.generate(prompts, params, progress=False)

        def read() -> list[list[float]]:
            return [
                [output.prompt_logprobs[index][token].logprob for index, token in enumerate(prompt) if index]
                for prompt, output in zip(prompts, outputs, strict=True)
            ]

        return read

    def likely_ids(self, prompts: list[TokenIds], count: int) -> Read:
        """The ids of the likeliest tokens at each position; nothing stays of it."""
        params = SamplingParams(max_tokens=0, prompt_logprobs=count)
        records = [one.prompt_logprobs for one in self._llm.generate(prompts, params, progress=False)]
        self._llm.engine.forget_prefixes()
        best = [record[1:].top_entries().token_ids.reshape(-1, count).tolist() for record in records]
        return lambda: [[[], *ids] for ids in best]

    def shared_prefix(self, context: TokenIds, continuations: list[TokenIds]) -> Read:
        """Summed logprobs (nats) of each continuation."""
        scores = self._llm.score([(context, tail) for tail in continuations])
        return lambda: [float(score.logprob) for score in scores]

    def surprisals(self, texts: list[str]) -> Read:
        """Nats a token, of all tokens but the first, summed a sentence."""
        scored = self._llm.surprisal(texts, bos=False)
        return lambda: [-text.logprob for text in scored]


class NextToken:
    """`AsyncLM` or `AsyncVirtualLM`: whole rows; its caches start each call empty."""

    def __init__(self, lm: AsyncLM | AsyncVirtualLM) -> None:
        self._lm = lm

    def use(self, variant: str) -> None:
        """Refuse what there is not."""
        refuse_variants(variant)

    def close(self) -> None:
        """Free the engine."""
        self._lm.close()

    def next_token(self, prefixes: list[TokenIds], rounds: list[list[int]]) -> Read:
        """All prefixes of a round in one call, round after round."""
        self._forget()
        rows = asyncio.run(ask_rounds(self._lm, prefixes, rounds))
        return lambda: rows.argmax(-1).tolist()

    def event_loop_stall(self, prefixes: list[TokenIds], rounds: list[list[int]]) -> Read:
        """Each prefix by a task of its own, beside one that only ticks: how long it was kept waiting, ms."""
        self._forget()
        stall_s = asyncio.run(self._watched(prefixes, rounds))
        return lambda: 1000 * stall_s

    def _forget(self) -> None:
        self._lm.clear_cache()
        self._lm.clear_kv_cache()

    async def _watched(self, prefixes: list[TokenIds], rounds: list[list[int]]) -> float:
        watch = asyncio.create_task(longest_stall())
        await asyncio.sleep(TICK_S)  # it ticks before the work begins
        for tokens in rounds:
            await asyncio.gather(*map(self._lm.next_token_logprobs, prefixes))
            prefixes = extend_all(prefixes, tokens)
        watch.cancel()
        return await watch


async def longest_stall() -> float:
    """Until cancelled: the most seconds between a tick's due time and its turn in the event loop."""
    worst = 0.0
    try:
        while True:
            due = time.perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            worst = max(worst, time.perf_counter() - due)
    except asyncio.CancelledError:
        return worst


def open_front_door(job: dict[str, Any]) -> Offline | NextToken:
    """What answers the first job's verb, and those after it."""
    if hasattr(NextToken, job["verb"]):
        return NextToken(AsyncLM.from_name(job["model_folder"], **job.get("options", {})))
    return Offline(job)


if __name__ == "__main__":
    serve(open_front_door, packages=("logprobe", "torch", "transformers"))
