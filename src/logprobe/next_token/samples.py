"""`Samples`: the methods of `NextTokenLM` that draw tokens."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, ClassVar

from logprobe.next_token.base import BaseLM
from logprobe.sampling import SamplingParams
from logprobe.sampling.params import nth_seed
from logprobe.text.edge import as_token_ids

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from logprobe.next_token.base import TokenIds
    from logprobe.next_token.rows import SampledIds


class Samples(BaseLM):
    """Completions of one prompt or of many."""

    _ignores_eos: ClassVar[bool] = True  # default of `ignore_eos`

    async def sample(
        self,
        prompt_token_ids: TokenIds,
        max_tokens: int,
        eos_token_ids: Iterable[int],
        temperature: float = 1.0,
        seed: int | None = None,
        *,
        top_p: float = 1.0,
        top_k: int = 0,
        logprobs: int | None = None,
        lora: str | None = None,
        ignore_eos: bool | None = None,
    ) -> SampledIds:
        """Draw up to `max_tokens` tokens, ending before the first of `eos_token_ids` or with the context.

        With `ignore_eos` no other token ends it, not even the model's own end of text; that is so by default
        but in `AsyncVirtualLM`. Without it that one ends it, too, and stays in the list where it is none of
        `eos_token_ids`. A temperature of 0 takes the likeliest token; the same seed gives the same tokens
        whatever runs beside. With `logprobs` the list's own `logprobs` records each token with so many
        alternatives, of the model's distribution.

        Raises:
            ParameterError: a value that cannot be served.
            EngineError: the engine failed, was closed, or gave the sample up.
        """
        self._check_open()
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            top_p=top_p,
            top_k=top_k,
            logprobs=logprobs,
            stop_token_ids=tuple(eos_token_ids),
            ignore_eos=self._ignores_eos if ignore_eos is None else ignore_eos,
            lora=self._chosen_lora(lora),
        )
        return await self._source.sample(self._as_prompt(prompt_token_ids), params)

    async def batch_sample(
        self,
        prompt_token_ids_list: Sequence[TokenIds],
        max_tokens: int,
        eos_token_ids: Iterable[int],
        temperature: float = 1.0,
        seed: int | None = None,
        *,
        top_p: float = 1.0,
        top_k: int = 0,
        logprobs: int | None = None,
        lora: str | None = None,
        ignore_eos: bool | None = None,
    ) -> list[SampledIds]:
        """`sample` from each prompt at once; with a seed, samples of equal prompts still differ."""
        stops = tuple(eos_token_ids)
        seen: Counter[bytes] = Counter()
        samples = []
        for prompt in prompt_token_ids_list:
            key = as_token_ids(prompt).tobytes()
            own_seed = None if seed is None else nth_seed(seed, seen[key])
            seen[key] += 1
            samples.append(
                self.sample(
                    prompt,
                    max_tokens,
                    stops,
                    temperature,
                    own_seed,
                    top_p=top_p,
                    top_k=top_k,
                    logprobs=logprobs,
                    lora=lora,
                    ignore_eos=ignore_eos,
                )
            )
        return await asyncio.gather(*samples)
