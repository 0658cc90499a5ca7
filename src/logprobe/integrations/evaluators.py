"""Models for evaluation tools: score pairs of token id lists, and generate from token ids, in large batches.

`InProcess` runs a model in this process; `Served` uses a server of this library. The modules `lm_eval` and
`lighteval` use them.
"""

from __future__ import annotations

import asyncio
import atexit
from dataclasses import fields
from functools import partial
from itertools import chain, groupby, islice
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final
from urllib.parse import quote

import msgspec

from logprobe.engine.protocol import Capabilities
from logprobe.errors import ServerError, require
from logprobe.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterable, Sequence

Pair = tuple[list[int], list[int]]
PAIRS_A_CALL: Final = 4096  # bounds the number of records in memory
EXCHANGES: Final = 8  # default number of concurrent HTTP requests
CONTINUATIONS_A_BODY: Final = 16  # continuations of one context per HTTP request
TIMEOUT_S: Final = 600.0  # timeout of one HTTP request, including retries while the server is full
TOKEN_BYTES: Final = 512  # upper bound on the size of a token in a reply, with its text and log-probabilities
REPLY_BYTES: Final = 1 << 16  # upper bound on the size of the rest of a reply
CARRIED: Final = (
    "n",
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "min_tokens",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)
"""Fields of `SamplingParams` that are sent to a server under the same names."""
DEFAULTS: Final = SamplingParams()


class Scored(NamedTuple):
    """The score of a continuation after its context."""

    logprob: float  # nats
    is_greedy: bool


class Text(NamedTuple):
    """One generated text."""

    text: str
    token_ids: list[int]


def prefix_token_id(model: InProcess | Served) -> int:
    """Return the id of the token to put before a text without context: BOS, or EOS if there is no BOS.

    Raises:
        ParameterError: the model has neither BOS nor EOS.
    """
    tokenizer = model.tokenizer
    first = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    require(first is not None, "context", "is empty and the model has no BOS or EOS; give a context")
    return int(first)


def open_model(
    name: str | None,
    *,
    base_url: str | None = None,
    api_key: str | None = None,
    lora: str | None = None,
    num_concurrent: int | None = None,
    **settings: Any,
) -> InProcess | Served:
    """Open a model in this process or on a server; the model is closed when the process exits.

    Args:
        name: a known name, a folder, a `.gguf` file or a Hugging Face id; with `base_url`, a name that the
            server serves. None for `smollm2`, or for the server's default model.
        base_url: the server's address, with or without `/v1`; None to run the model in this process.
        api_key: the server's API key.
        lora: folder of a LoRA adapter; with `base_url`, the name of an adapter that the server has loaded.
        num_concurrent: number of concurrent requests to the server; None for 8.
        settings: fields of `EngineConfig`, for a model in this process.

    Raises:
        ModelError: the model cannot be loaded.
        ParameterError: a setting is invalid or unknown.
        ServerError: the server cannot be reached, or failed.
    """
    if base_url is None:
        for setting, value in {"api_key": api_key, "num_concurrent": num_concurrent}.items():
            require(value is None, setting, "is only for a server; set base_url")
        return InProcess("smollm2" if name is None else name, lora, **settings)
    for setting in settings:
        require(False, setting, "cannot be combined with base_url; set it on the server")
    num_concurrent = EXCHANGES if num_concurrent is None else num_concurrent
    return Served(base_url, api_key, model=name, lora=lora, num_concurrent=num_concurrent)


@final
class InProcess:
    """A model in this process.

    Attributes:
        tokenizer: the transformers tokenizer.
        max_model_len: maximum number of tokens in the model's input; a scored sequence may have one more.
    """

    def __init__(self, model: str, lora: str | None, **settings: Any) -> None:
        from logprobe.llm import LLM

        llm = LLM(model, **settings)
        atexit.register(llm.close)  # evaluation tools do not close models
        if lora is not None:
            llm.add_lora("lora", lora)
        self.llm = llm if lora is None else llm.with_lora("lora")
        self.tokenizer = llm.text.tokenizer
        self.max_model_len = llm.engine.capabilities().max_model_len

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Encode a text to token ids."""
        ids: list[int] = self.llm.text.encode(text, add_special_tokens=add_special_tokens).tolist()
        return ids

    def score(self, pairs: Sequence[Pair]) -> list[Scored]:
        """Score (context, continuation) pairs, thousands per call; equal contexts are computed once."""
        return [
            Scored(score.logprob, score.is_greedy)
            for start in range(0, len(pairs), PAIRS_A_CALL)
            for score in self.llm.score(pairs[start : start + PAIRS_A_CALL], progress=True)
        ]

    def generate(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[list[Text]]:
        """Generate `params.n` texts for each prompt, in one call."""
        outputs = self.llm.generate(prompts, params, progress=True)
        return [[Text(one.text, one.token_ids) for one in output.outputs] for output in outputs]


class _Score(msgspec.Struct):
    logprob: float
    is_greedy: bool


class _Scores(msgspec.Struct):
    data: list[_Score]


class _Choice(msgspec.Struct):
    index: int
    text: str
    token_ids: list[int]


class _Completion(msgspec.Struct):
    choices: list[_Choice]


@final
class Served:
    """A model on a server of this library, with the interface of `InProcess`; the tokenizer runs locally."""

    def __init__(
        self, base_url: str, api_key: str | None, *, model: str | None, lora: str | None, num_concurrent: int
    ) -> None:
        from logprobe.engine.backends.bridge import LoopThread
        from logprobe.integrations.remote.link import FACTS_BYTES, TOKENIZER_BYTES, Link, decoded
        from logprobe.integrations.remote.text import RemoteText

        is_count = isinstance(num_concurrent, int) and num_concurrent > 0
        require(is_count, "num_concurrent", "must be a positive integer", got=num_concurrent)
        self._link = Link(base_url, api_key, TIMEOUT_S)
        self._bridge = LoopThread()
        atexit.register(self.close)
        self._common = {"model": model, "lora": lora}
        self._num_concurrent = num_concurrent
        query = "" if model is None else f"?model={quote(model, safe='')}"

        def fetch(path: str, max_bytes: int = TOKENIZER_BYTES) -> bytes:
            return self._bridge.run(self._link.get(path + query, max_bytes))

        try:
            facts = decoded(fetch("/v1/capabilities", FACTS_BYTES), Capabilities, self._link.url)
            self.max_model_len = facts.max_model_len
            self.tokenizer = RemoteText(fetch).tokenizer
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connections to the server."""
        atexit.unregister(self.close)
        self._bridge.run(self._link.close())
        self._bridge.close()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Encode a text to token ids."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        return ids

    def score(self, pairs: Sequence[Pair]) -> list[Scored]:
        """Score pairs with `/v1/loglikelihood`; consecutive pairs with the same context share a request."""
        bodies = [
            (context, [continuation for _, continuation in some])
            for context, group in groupby(pairs, itemgetter(0))
            for some in _batched(group, CONTINUATIONS_A_BODY)
        ]
        return [*chain.from_iterable(self._all(self._scores, bodies))]

    def generate(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[list[Text]]:
        """Generate `params.n` texts for each prompt, with `/v1/completions`.

        Raises:
            ParameterError: a field of `params` is not supported with a server, or the server rejects a field.
        """
        for one in params:
            _check_carried(one)
        return self._all(self._texts, zip(prompts, params, strict=True))

    def _all(self, exchange: Callable[..., Coroutine[Any, Any, Any]], asked: Iterable[Any]) -> list[Any]:
        """Run requests concurrently and return their results in order; a failure cancels the others."""

        async def run() -> list[Any]:
            room = asyncio.Semaphore(self._num_concurrent)

            async def one(arguments: Any) -> Any:
                async with room:
                    return await exchange(*arguments)

            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(arguments)) for arguments in asked]
            return [task.result() for task in tasks]

        try:
            return self._bridge.run(run())
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _scores(self, context: list[int], continuations: list[list[int]]) -> list[Scored]:
        body = {"context": context, "continuations": continuations, **self._common}
        num_tokens = sum(map(len, continuations))
        data = await self._posted("/v1/loglikelihood", body, num_tokens, _Scores)
        if len(data.data) != len(continuations):
            raise ServerError(
                f"{self._link.url}/v1/loglikelihood: returned {len(data.data)} of {len(continuations)} scores"
            )
        return [Scored(one.logprob, one.is_greedy) for one in data.data]

    async def _texts(self, prompt: list[int], params: SamplingParams) -> list[Text]:
        carried = {name: getattr(params, name) for name in CARRIED}
        body = {"prompt": prompt, "return_token_ids": True, **carried, **self._common}
        num_tokens = params.n * params.max_tokens
        choices = (await self._posted("/v1/completions", body, num_tokens, _Completion)).choices
        if sorted(choice.index for choice in choices) != [*range(params.n)]:
            raise ServerError(f"{self._link.url}/v1/completions: did not return {params.n} texts")
        return [Text(one.text, one.token_ids) for one in sorted(choices, key=lambda choice: choice.index)]

    async def _posted(self, path: str, body: dict[str, Any], num_tokens: int, kind: type[Any]) -> Any:
        from logprobe.integrations.remote.link import decoded

        given = {name: value for name, value in body.items() if value is not None}
        reply = await self._link.post(path, given, REPLY_BYTES + num_tokens * TOKEN_BYTES)
        return decoded(reply.data, kind, f"{self._link.url}{path}")


def _check_carried(params: SamplingParams) -> None:
    for field in fields(params):
        is_asked = getattr(params, field.name) != getattr(DEFAULTS, field.name)
        remedy = "is not supported with a server; leave it out, or run the model in this process"
        require(field.name in CARRIED or not is_asked, field.name, remedy)


def _batched(items: Iterable[Pair], size: int) -> Iterable[list[Pair]]:
    iterator = iter(items)
    return iter(partial(lambda: list(islice(iterator, size))), [])
