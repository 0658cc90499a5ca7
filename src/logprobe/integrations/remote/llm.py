"""`RemoteLLM`: a model on a server, with the interface of `AsyncLM` plus completions and scores.

`NextTokenLM` batches requests and caches rows; a server started by `logprobe serve` computes them.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, final

from logprobe.engine.backends.bridge import LoopThread
from logprobe.errors import require
from logprobe.integrations.remote.calls import ask_completion, ask_scores
from logprobe.integrations.remote.source import ServerRows
from logprobe.integrations.remote.text import RemoteText
from logprobe.next_token.lm import DEFAULT_CACHE_BYTES, NextTokenLM
from logprobe.next_token.rows import Row, RowCache
from logprobe.sampling import SamplingParams
from logprobe.text.edge import as_token_ids
from logprobe.text.prompts import as_prompts, plain_prompt, text_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.analysis.score import Score
    from logprobe.engine.request import RequestOutput
    from logprobe.text.boundary import BoundaryRule
    from logprobe.text.prompts import Prompt


@final
class RemoteLLM(NextTokenLM[Row]):
    """A model on a server: completions, scores and next-token distributions (see `NextTokenLM`).

    Rows have exactly the server's float32 values. Concurrent row requests share an HTTP request, and equal
    ones are computed once. Rows are cached locally; the server caches prefixes. While the server is full,
    requests wait. `tokenizer`, `byte_vocab` and `str_vocab` are fetched from the server on first use.
    `list_loras` returns the LoRA adapters that the server had when this object was created. There are no
    methods that change the server's weights or caches. For conversations and labels, use the server's routes,
    for example with OpenAI's client.

    Args:
        url: the server's address, with or without `/v1`.
        api_key: the server's API key.
        cache_bytes: maximum size in bytes of the LRU cache of rows; 0 disables the cache.
        batch_size: number of pending requests at which an HTTP request is sent immediately.
        timeout: seconds after which an HTTP request is sent for fewer pending requests.
        request_timeout: timeout of one HTTP request in seconds, including retries while the server is full.

    Raises:
        MissingPackageError: httpx is not installed (`pip install 'logprobe[remote]'`).
        ParameterError: a setting is invalid, or the server rejects the API key.
        ServerError: the server cannot be reached, or failed.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        *,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        batch_size: int = 64,
        timeout: float = 0.001,
        request_timeout: float = 600.0,
    ) -> None:
        cache = RowCache(cache_bytes)  # validates before the server is contacted
        with ExitStack() as undone:
            bridge = LoopThread()
            undone.callback(bridge.close)
            self._server = source = ServerRows(bridge, url, api_key, request_timeout)
            undone.callback(source.close)
            super().__init__(
                source,
                RemoteText(source.fetch),
                as_caller=lambda rows: rows,
                cache=cache,
                batch_size=batch_size,
                timeout=timeout,
                owns_source=True,
                bridge=bridge,
            )
            undone.pop_all()

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_special_tokens: bool = True,
    ) -> list[RequestOutput]:
        """Generate completions for one or more prompts, with the arguments and outputs of `LLM.generate`.

        Each prompt is one request to `/v1/completions`. Records have the server's exact values.

        Raises:
            ParameterError: a prompt or parameter is invalid, or a report is set that replies do not have:
                `explain`, `kept_ids`, `return_hidden_states`, `return_routed_experts`. Reports other than
                log-probabilities of the most likely tokens and `digest` need pyarrow on both sides.
            ServerError: the server cannot be reached, or failed. Any error aborts the other requests.
        """
        self._check_open()
        many = as_prompts(prompts)
        params = sampling_params or SamplingParams()
        asked = [params] * len(many) if isinstance(params, SamplingParams) else [*params]
        require(
            len(asked) == len(many),
            "sampling_params",
            f"has {len(asked)} items for {len(many)} prompts; give one per prompt, or a single "
            "SamplingParams",
        )
        # Not on the bridge's thread, which fetches the tokenizer.
        has_records = any(own.logprobs is not None or own.prompt_logprobs is not None for own in asked)
        table = await asyncio.to_thread(lambda: self._text.vocabulary) if has_records else None
        facts = self._source.capabilities()
        ask = partial(ask_completion, facts=facts, table=table, add_special_tokens=add_special_tokens)
        outputs: list[RequestOutput] = await self._ask_all(
            [
                partial(ask, prompt=_sent(prompt), params=replace(own, lora=self._chosen_lora(own.lora)))
                for prompt, own in zip(many, asked, strict=True)
            ]
        )
        for prompt, output in zip(many, outputs, strict=True):
            output.prompt = text_of(prompt)
        return outputs

    async def score(
        self,
        pairs: Sequence[tuple[Prompt, Prompt]],
        *,
        unconditional: bool = False,
        temperature: float | None = None,
        boundary: BoundaryRule = "auto",
        lora: str | None = None,
    ) -> list[Score]:
        """Score continuations given their contexts, with the arguments and results of `LLM.score`.

        Pairs with the same context are one request to `/v1/loglikelihood`. Scores have no `record`.

        Raises:
            ParameterError: a pair or an argument is invalid.
            ServerError: the server cannot be reached, or failed. Any error aborts the other requests.
        """
        self._check_open()
        options: dict[str, Any] = {"unconditional": unconditional, "temperature": temperature}
        options |= {"boundary": boundary, "lora": self._chosen_lora(lora)}
        sent = [(_sent(context), _sent(continuation)) for context, continuation in pairs]
        by_context: dict[Any, list[int]] = {}  # numbers of the pairs with each context
        for number, (context, _) in enumerate(sent):
            by_context.setdefault(context if isinstance(context, str) else (*context,), []).append(number)
        found = await self._ask_all(
            [
                partial(
                    ask_scores, context=context, continuations=[sent[one][1] for one in numbers], **options
                )
                for context, numbers in by_context.items()
            ]
        )
        scores: dict[int, Score] = {}
        for numbers, own in zip(by_context.values(), found, strict=True):
            scores |= zip(numbers, own, strict=True)
        return [scores[number] for number in range(len(sent))]

    async def _ask_all(self, asks: Sequence[Any]) -> list[Any]:
        """Run requests concurrently; if one fails, abort the others and raise its error."""
        tasks = [asyncio.ensure_future(self._server.exchange(ask)) for ask in asks]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()


def _sent(prompt: Prompt) -> str | list[int]:
    """Return a prompt as a request has it: a text or a list of token ids."""
    plain = plain_prompt(prompt)
    return plain if isinstance(plain, str) else as_token_ids(plain, "prompt").tolist()
