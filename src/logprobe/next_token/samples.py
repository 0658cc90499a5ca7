"""`Samples`: the methods in `NextTokenLM` that sample tokens."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from logprobe.errors import require
from logprobe.next_token.base import BaseLM
from logprobe.sampling import SamplingParams
from logprobe.sampling.params import nth_seed
from logprobe.text.edge import as_token_ids

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.next_token.base import TokenIds
    from logprobe.next_token.rows import SampledIds


class Samples(BaseLM):
    """Sampling from one prompt or from a batch."""

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
        """Sample up to `max_tokens` tokens; stop before any of `eos_token_ids`, or at the context limit.

        Args:
            prompt_token_ids: token ids of the prompt.
            max_tokens: maximum number of tokens.
            eos_token_ids: token ids that end the sample and are not included in it.
            temperature: sampling temperature; 0 picks the most likely token.
            seed: seed of the random numbers; results do not depend on other requests.
            top_p: probability mass for nucleus sampling.
            top_k: number of most likely tokens to sample from; 0 for all tokens.
            logprobs: number of alternatives per token in the result's `logprobs`, which are raw; None for no
                `logprobs`.
            lora: name of the LoRA adapter; None for the one set with `set_lora`.
            ignore_eos: if True, the model's EOS does not end the sample. If False, the EOS ends the sample
                and is its last token, unless it is in `eos_token_ids`. None means True, except in
                `AsyncVirtualLM`.

        Raises:
            ParameterError: an argument is invalid.
            EngineError: the engine failed, was closed, or aborted the request.
        """
        self._check_open()
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            top_p=top_p,
            top_k=top_k,
            logprobs=logprobs,
            stop_token_ids=_stop_token_ids(eos_token_ids),
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
        """Run `sample` for all prompts concurrently; with a seed, equal prompts get different samples."""
        stops = _stop_token_ids(eos_token_ids)
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


def _stop_token_ids(eos_token_ids: Iterable[int]) -> tuple[int, ...]:
    is_list = isinstance(eos_token_ids, Iterable)
    require(is_list, "eos_token_ids", "must be a list of token ids", got=eos_token_ids)
    return tuple(eos_token_ids)
