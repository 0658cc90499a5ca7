"""`ServerRows`: fetches rows and samples from a server of this library.

All HTTP requests run on the event loop of `bridge`. Up to `ROW_EXCHANGES` requests for rows run at once; rows
requested in the meantime are collected for the next HTTP request.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, fields
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, TypeVar, final

from msgspec.structs import replace

from logprobe.engine.request import check_tokens
from logprobe.errors import EngineClosedError, ParameterError, require, shortened
from logprobe.integrations.remote.link import CARRIED, TOKENIZER_BYTES, Link, ask_rows, ask_sample, meet
from logprobe.next_token.source import settle
from logprobe.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from logprobe.engine.backends.bridge import LoopThread
    from logprobe.engine.protocol import Capabilities
    from logprobe.integrations.remote.link import RowsSource, ServerFacts
    from logprobe.next_token.rows import Prefix, Row, SampledIds
    from logprobe.next_token.source import BegunRow
    from logprobe.records.values import IntArray

T = TypeVar("T")

ROW_EXCHANGES: Final = 4  # concurrent requests: some are computed while others are transferred
MAX_ROWS: Final = 64  # rows per HTTP request
SHARE: Final = 2  # one client uses at most half of the server's limits
ROW_BYTES: Final = 12  # bytes that a server counts for each id in a whole row
ID_BYTES: Final = 12  # maximum size of one id in JSON
# fields that are not sent, with their default values, which a sample's parameters must have
NOT_CARRIED: Final[dict[str, Any]] = {
    field.name: getattr(SamplingParams(), field.name)
    for field in fields(SamplingParams)
    if field.name not in CARRIED
}


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A requested prefix, and the future of its next-token distribution."""

    prefix: Prefix
    begun: BegunRow


@final
class ServerRows:
    """`RowSource` that uses the server at `url`; HTTP requests run on the event loop of `bridge`.

    Raises:
        MissingPackageError: httpx is not installed.
        ParameterError: an argument is invalid, or the server rejects the API key.
        ServerError: the server cannot be reached, or failed.
    """

    def __init__(self, bridge: LoopThread, url: str, api_key: str | None, timeout_s: float) -> None:
        self._link = Link(url, api_key, timeout_s)
        self._bridge = bridge
        try:
            self._facts = bridge.run(meet(self._link))
        except BaseException:
            bridge.run(self._link.close())
            raise
        self._most_rows, self._most_tokens = _portion(self._facts)
        self._sample_room = asyncio.Semaphore(max(self._facts.limits.max_requests // SHARE, 1))
        # The attributes below are changed only on the bridge's loop.
        self._source: RowsSource | None = None  # source of the last reply, without its LoRA adapter
        self._weights_number = 0  # incremented when a reply was computed with other model weights
        # name → (version in the last reply, number of changes)
        self._loras: dict[str, tuple[str | None, int]] = {}
        self._gathered: list[Asked] = []
        self._exchanges: dict[asyncio.Task[None], list[Asked]] = {}  # requests for rows
        self._samples: set[asyncio.Task[Any] | None] = set()
        self._is_closed = False

    def fetch(self, path: str) -> bytes:
        """Return the server's reply at `path`, blocking the caller; raises the errors of `Link.get`."""
        return self._bridge.run(self._link.get(path, TOKENIZER_BYTES))

    @property
    def is_busy(self) -> bool:
        """Always False: the server's load is not known, so requests are always collected into batches."""
        return False

    def capabilities(self) -> Capabilities:
        """Return the capabilities of the server's engine."""
        return self._facts.capabilities

    def loads(self, lora: str | None) -> tuple[int, int]:
        """Return how many times replies have shown a change of the LoRA adapter, and of the model's weights.

        Raises:
            ParameterError: the server had no such LoRA adapter when it was first contacted.
        """
        if lora is not None:
            known, asked = ", ".join(self._facts.loras) or "none", shortened(lora)
            require(
                lora in self._facts.loras, "lora", f"no LoRA weights {asked!r} are loaded; known: {known}"
            )
        return self._lora_number(lora), self._weights_number

    def list_loras(self) -> dict[str, str]:
        """Return the LoRA adapters that the server had when first contacted, as a map from name to path."""
        return dict(self._facts.loras)

    def begin(self, prefixes: Sequence[Prefix]) -> list[BegunRow]:
        """Queue requests for rows, and send at most `ROW_EXCHANGES` HTTP requests at a time.

        Raises:
            EngineClosedError: the source was closed.
        """
        self._check_open()
        loop = asyncio.get_running_loop()
        asked = [Asked(prefix, loop.create_future()) for prefix in prefixes]
        self._gathered += asked
        self._send_gathered()
        return [request.begun for request in asked]

    async def sample(self, prompt: IntArray, params: SamplingParams) -> SampledIds:
        """Sample with one HTTP request.

        Raises:
            ParameterError: a parameter is not supported by remote samples, or the server rejects the request.
            LogprobeError: the request failed.
        """
        for name, default in NOT_CARRIED.items():
            elsewhere = "is not supported by remote samples; use POST /v1/completions"
            require(getattr(params, name) == default, name, elsewhere)
        limits = self.capabilities()
        check_tokens(prompt, params, max_len=limits.max_model_len, vocab_size=limits.vocab_size)
        vocab_size = limits.vocab_size
        return await self.exchange(lambda link: ask_sample(link, prompt, params, vocab_size))

    async def exchange(self, ask: Callable[[Link], Coroutine[Any, Any, T]]) -> T:
        """Run a request on the bridge's loop, which limits concurrent requests; may be called in any loop.

        Raises:
            LogprobeError: the request failed, or the source was closed.
        """
        return await asyncio.wrap_future(self._bridge.start(self._in_room(ask)))

    def close(self) -> None:
        """Fail all requests in flight with `EngineClosedError`. The event loop is not closed."""
        self._bridge.run(self._end_all())

    async def _end_all(self) -> None:
        self._is_closed = True
        for request in chain(self._gathered, *self._exchanges.values()):
            settle(request.begun, _closed())
        self._gathered.clear()
        tasks = [task for task in (*self._exchanges, *self._samples) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._link.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise _closed()

    def _send_gathered(self) -> None:
        """Send queued rows while fewer than `ROW_EXCHANGES` requests run; one LoRA adapter per request."""
        self._gathered = [request for request in self._gathered if not request.begun.done()]
        while self._gathered and len(self._exchanges) < ROW_EXCHANGES:
            self._send(self._take_portion())

    def _take_portion(self) -> list[Asked]:
        taken: list[Asked] = []
        left: list[Asked] = []
        num_tokens = 0
        for request in self._gathered:
            num_tokens += len(request.prefix.token_ids) + 1
            is_alike = request.prefix.lora == self._gathered[0].prefix.lora
            fits = len(taken) < self._most_rows and num_tokens <= self._most_tokens
            (taken if not taken or (is_alike and fits) else left).append(request)
        self._gathered = left
        return taken

    def _send(self, asked: list[Asked]) -> None:
        exchange = asyncio.get_running_loop().create_task(self._exchange(asked))
        self._exchanges[exchange] = asked
        exchange.add_done_callback(self._on_ended)
        for request in asked:
            request.begun.add_done_callback(partial(_give_up_unwanted, exchange, asked))

    def _on_ended(self, exchange: asyncio.Task[None]) -> None:
        del self._exchanges[exchange]
        self._send_gathered()

    async def _exchange(self, asked: list[Asked]) -> None:
        ends: Sequence[tuple[Prefix, Row] | Exception]
        try:
            ends = await self._rows([request.prefix for request in asked])
        except Exception as error:  # noqa: BLE001 - whatever it is, all waiting callers must get it
            ends = [error] * len(asked)
        for request, end in zip(asked, ends, strict=True):
            if isinstance(end, ParameterError) and len(asked) > 1 and not request.begun.done():
                self._send([request])  # send it again alone, so that only the invalid one fails
            else:
                settle(request.begun, end)

    async def _rows(self, prefixes: Sequence[Prefix]) -> list[tuple[Prefix, Row]]:
        rows, source = await ask_rows(self._link, prefixes, self.capabilities().vocab_size)
        lora = prefixes[0].lora
        self._note(lora, source)
        number, weights_number = self._lora_number(lora), self._weights_number
        answered = [prefix._replace(lora_number=number, weights_number=weights_number) for prefix in prefixes]
        return list(zip(answered, rows, strict=True))

    def _lora_number(self, lora: str | None) -> int:
        return self._loras[lora][1] if lora in self._loras else 0

    def _note(self, lora: str | None, source: RowsSource) -> None:
        """Count a change if a reply came from other weights than the last; old rows become invalid."""
        version = source.lora_version
        if lora is not None:
            before, number = self._loras.get(lora, (version, 0))
            self._loras[lora] = version, number + (version != before)
        model = replace(source, lora_version=None)
        self._weights_number += self._source not in {None, model}
        self._source = model

    async def _in_room(self, ask: Callable[[Link], Coroutine[Any, Any, T]]) -> T:
        self._check_open()
        task = asyncio.current_task()
        self._samples.add(task)
        try:
            async with self._sample_room:
                return await ask(self._link)
        except asyncio.CancelledError:
            self._check_open()  # if this does not raise, the caller cancelled the request
            raise
        finally:
            self._samples.discard(task)


def _closed() -> EngineClosedError:
    return EngineClosedError("this model was closed; make a new one")


def _give_up_unwanted(exchange: asyncio.Task[None], asked: Sequence[Asked], _: BegunRow) -> None:
    if all(request.begun.cancelled() for request in asked):
        exchange.cancel()  # disconnecting makes the server abort the rows


def _portion(facts: ServerFacts) -> tuple[int, int]:
    """Return the maximum numbers of rows and of prompt tokens per HTTP request."""
    limits = facts.limits
    row_bytes = ROW_BYTES * facts.capabilities.vocab_size * SHARE * ROW_EXCHANGES
    rows = min(
        MAX_ROWS, limits.max_requests // (SHARE * ROW_EXCHANGES), limits.max_logprob_bytes // row_bytes
    )
    tokens = min(
        limits.max_tokens_in_flight // (SHARE * ROW_EXCHANGES),
        limits.max_body_bytes // ID_BYTES,
        limits.max_body_values // 2,  # the other half is for lists and keys
    )
    return max(rows, 1), tokens
