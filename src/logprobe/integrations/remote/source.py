"""`HttpEngine`: a server of this library as an engine that ends requests with rows and samples.

Before it: the desk. After it: `link`. Every exchange runs on the loop that the desk runs on, too. A few with
rows are on their way at once; what comes meanwhile is gathered for the next.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final, TypeAlias, final

from logprobe.engine.request import CompletionOutput, Completions, RequestOutput, check_request
from logprobe.errors import EngineClosedError, ParameterError, require, shortened
from logprobe.integrations.remote.link import CARRIED, TOKENIZER_BYTES, Link, ask_rows, ask_sample, meet
from logprobe.sampling import SamplingParams
from logprobe.transport.messages import Admitted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.engine.backends.bridge import LoopThread
    from logprobe.engine.protocol import Capabilities
    from logprobe.integrations.remote.link import ServerFacts
    from logprobe.transport.messages import Request

ROW_EXCHANGES: Final = 4  # at once: some are computed while others travel
MOST_ROWS: Final = 64  # an exchange
SHARE: Final = 2  # one client takes at most half of what the server lets through
ROW_BYTES: Final = 12  # that a server counts for each id of a whole row
ID_BYTES: Final = 12  # most that one id takes in JSON
NOT_CARRIED: Final[dict[str, Any]] = {  # what a request must leave as it is, rather than lose on the way
    field.name: getattr(SamplingParams(), field.name)
    for field in fields(SamplingParams)
    if field.name not in CARRIED
}

Outcome: TypeAlias = "Future[RequestOutput]"


@dataclass(eq=False, slots=True)
class Exchange:
    """Requests on their way together, and those of them that somebody still waits for."""

    requests: list[Request]
    wanted: set[str]
    task: asyncio.Task[None] | None = None


@final
class HttpEngine:
    """Implements `RowEngine` on the server at `url`, by exchanges on the loop of `bridge`.

    Raises:
        ModelError: httpx is not installed.
        ParameterError: a value that cannot be used, or the server refuses the key.
        ServerError: there is no such server, or it failed.
    """

    def __init__(self, bridge: LoopThread, url: str, api_key: str | None, timeout_s: float) -> None:
        self._link = Link(url, api_key, timeout_s)
        self._lock = threading.Lock()
        self._is_closed = False  # guarded by `_lock`, as is whatever is posted to the bridge
        self._outcomes: dict[str, Outcome] = {}
        # Both belong to the bridge's loop.
        self._gathered: list[Request] = []
        self._exchanges: dict[str, Exchange] = {}
        self._bridge = bridge
        try:
            self._facts = self._bridge.run(meet(self._link))
        except BaseException:
            self.close()
            raise
        self._version = self._facts.capabilities.weight_version  # of the weights that answered last
        self._weights_number = 0  # one more each time that others answer; the bridge's loop alone sets both
        self._most_rows, self._most_tokens = _portion(self._facts)
        self._sample_room = asyncio.Semaphore(max(self._facts.limits.max_requests // SHARE, 1))

    def fetch(self, path: str) -> bytes:
        """What the server has at `path`, for callers without an event loop; errors as when it was met."""
        return self._bridge.run(self._link.get(path, TOKENIZER_BYTES))

    def admit(self, request: Request) -> Admitted:
        """Say yes to a request.

        Raises:
            ParameterError: it can never be served.
        """
        capabilities = self.capabilities()
        for name, default in NOT_CARRIED.items():
            elsewhere = "does not come with a remote sample; POST /v1/completions gives it"
            require(getattr(request.params, name) == default, name, elsewhere)
        check_request(request, max_len=capabilities.max_model_len, vocab_size=capabilities.vocab_size)
        return Admitted(request, {}, weights_number=self._weights_number)

    def submit(self, admitted: Sequence[Admitted]) -> None:
        """Accept requests; `result` must follow for each, once.

        Raises:
            ParameterError: an id that is in use; none was accepted then.
            EngineClosedError: the engine was closed.
        """
        requests = [one.request for one in admitted]
        names = {request.request_id for request in requests}
        with self._lock:
            if self._is_closed:
                raise EngineClosedError("this model was cleaned up; make a new one")
            require(len(names) == len(requests), "request_id", "one stands twice; give each request its own")
            for name in names & self._outcomes.keys():
                raise ParameterError("request_id", f"{name!r} is in use; give each request its own")
            for request in requests:
                outcome: Outcome = Future()
                outcome.set_running_or_notify_cancel()  # ended by the bridge alone, whoever stops waiting
                self._outcomes[request.request_id] = outcome
            self._bridge.post(self._arrive, requests)

    @property
    def is_busy(self) -> bool:
        """Never: what the server runs is not seen from here, so asks are gathered first."""
        return False

    def list_loras(self) -> dict[str, str]:
        """The LoRA weights that the server had when it was met: name → path over there."""
        return dict(self._facts.loras)

    def lora_number(self, name: str) -> int:
        """0: the server alone knows its loads.

        Raises:
            ParameterError: the server had no such weights when it was met.
        """
        known, asked = ", ".join(self._facts.loras) or "none", shortened(name)
        require(name in self._facts.loras, "lora", f"no LoRA weights {asked!r} are loaded; known: {known}")
        return 0

    @property
    def weights_number(self) -> int:
        """One more each time that a reply was of other weights."""
        return self._weights_number

    def capabilities(self) -> Capabilities:
        """What the server's engine can do."""
        return self._facts.capabilities

    async def result(self, request_id: str) -> RequestOutput:
        """The request's output once it has ended; giving up the wait aborts the request.

        Raises:
            ParameterError: an id that is unknown.
            LogprobeError: how the request failed.
        """
        outcome = self._outcomes.get(request_id)
        if outcome is None:
            raise ParameterError("request_id", f"{request_id!r} is unknown, or its output was taken already")
        try:
            return await asyncio.wrap_future(outcome)
        finally:
            self.abort(request_id)
            del self._outcomes[request_id]

    def abort(self, request_id: str) -> None:
        """Give a request up; it ends with finish reason `abort`. One that has ended is left alone."""
        outcome = self._outcomes.get(request_id)
        if outcome is None or outcome.done():
            return
        with self._lock:
            if not self._is_closed:  # else it ends with all the others
                self._bridge.post(self._give_up, request_id, outcome)

    def close(self) -> None:
        """End all requests with `EngineClosedError`; the loop is its owner's. A second call does nothing."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._bridge.run(self._end_all())

    async def _end_all(self) -> None:
        self._gathered.clear()
        tasks = {exchange.task for exchange in self._exchanges.values() if exchange.task is not None}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for outcome in list(self._outcomes.values()):
            _settle(outcome, EngineClosedError("this model was cleaned up; make a new one"))
        await self._link.close()

    def _arrive(self, requests: Sequence[Request]) -> None:
        self._gathered += [request for request in requests if request.wants_row]
        for request in requests:
            if not request.wants_row:
                self._begin([request])
        self._send_gathered()

    def _send_gathered(self) -> None:
        """Fill the exchanges that may be on their way, each with rows under the same weights."""
        under_way = {id(one) for one in self._exchanges.values() if one.requests[0].wants_row}
        for _ in range(ROW_EXCHANGES - len(under_way)):
            if self._gathered:
                self._begin(self._take_portion())

    def _take_portion(self) -> list[Request]:
        taken: list[Request] = []
        left: list[Request] = []
        num_tokens = 0
        for request in self._gathered:
            num_tokens += len(request.prompt_token_ids) + 1
            is_alike = request.lora == self._gathered[0].lora
            fits = len(taken) < self._most_rows and num_tokens <= self._most_tokens
            (taken if not taken or (is_alike and fits) else left).append(request)
        self._gathered = left
        return taken

    def _begin(self, requests: list[Request]) -> None:
        exchange = Exchange(requests, {request.request_id for request in requests})
        self._exchanges |= dict.fromkeys(exchange.wanted, exchange)
        exchange.task = asyncio.get_running_loop().create_task(self._follow(exchange))

    async def _follow(self, exchange: Exchange) -> None:
        ends: Sequence[CompletionOutput | Exception]
        try:
            is_row = exchange.requests[0].wants_row
            ends = await (self.rows if is_row else self._samples)(exchange.requests)
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait must hear of it
            ends = [error] * len(exchange.requests)
        is_refused = isinstance(ends[0], ParameterError) and len(ends) > 1
        for request, end in zip(exchange.requests, ends, strict=True):
            self._exchanges.pop(request.request_id, None)
            if request.request_id not in exchange.wanted:
                continue
            if is_refused:
                self._begin([request])  # alone, so that only the one at fault hears of it
            else:
                _settle(self._outcomes.get(request.request_id), end, self._weights_number)
        self._send_gathered()

    async def rows(self, requests: Sequence[Request]) -> list[CompletionOutput]:
        """Whole rows after the prompts of requests under the same LoRA weights, in order, by one exchange.

        Raises:
            LogprobeError: the exchange failed.
        """
        outputs, version = await ask_rows(self._link, requests, self.capabilities().vocab_size)
        if version != self._version:
            self._version, self._weights_number = version, self._weights_number + 1
        return outputs

    async def _samples(self, requests: Sequence[Request]) -> list[CompletionOutput]:
        async with self._sample_room:
            return [await ask_sample(self._link, requests[0], self.capabilities().vocab_size)]

    def _give_up(self, request_id: str, outcome: Outcome) -> None:
        if outcome.done():
            return
        _settle(outcome, CompletionOutput(index=0, finish_reason="abort"))
        self._gathered = [request for request in self._gathered if request.request_id != request_id]
        exchange = self._exchanges.pop(request_id, None)
        if exchange is None:
            return
        exchange.wanted.discard(request_id)
        if not exchange.wanted and exchange.task is not None:
            exchange.task.cancel()  # the server sees its client leave, and gives the requests up
            self._send_gathered()


def _portion(facts: ServerFacts) -> tuple[int, int]:
    """Rows and prompt tokens that one exchange may hold."""
    limits = facts.limits
    row_bytes = ROW_BYTES * facts.capabilities.vocab_size * SHARE * ROW_EXCHANGES
    rows = min(
        MOST_ROWS, limits.max_requests // (SHARE * ROW_EXCHANGES), limits.max_logprob_bytes // row_bytes
    )
    tokens = min(
        limits.max_tokens_in_flight // (SHARE * ROW_EXCHANGES),
        limits.max_body_bytes // ID_BYTES,
        limits.max_body_values // 2,  # the rest is for lists and keys
    )
    return max(rows, 1), tokens


def _settle(outcome: Outcome | None, end: CompletionOutput | Exception, weights_number: int = 0) -> None:
    if outcome is None or outcome.done():  # nobody waits any more
        return
    if isinstance(end, Exception):
        outcome.set_exception(end)
    else:
        ended = RequestOutput(request_id="", outputs=Completions([end]), weights_number=weights_number)
        outcome.set_result(ended)
