"""`Follow`: the front end's state of a sample in vLLM. `Fetcher`: fetches results of samples in batches."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from logprobe.integrations.vllm.orders import ANSWERS, ASKS, Ask

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from logprobe.processors.interface import ProcessorCounter
    from logprobe.transport.messages import Admitted, Delta, PausedBy


@dataclass(slots=True, eq=False)
class Follow:
    """State of one sample; used only on the engine's event loop."""

    admitted: Admitted
    index: int  # index of the sample within its request
    tag: str
    work: bytes
    token_ids: list[int] = field(default_factory=list)  # tokens that were sampled and fetched
    num_seen: int = 0  # tokens in vLLM's outputs so far
    num_running: int = 0  # tokens that vLLM stores for the sample now
    num_cached: int | None = None  # prompt tokens found in vLLM's prefix cache; None if not reported yet
    has_prompt_rows: bool = False  # True if they were published or not requested
    is_done: bool = False  # True if the final delta was published or is in the outbox
    paused_by: set[PausedBy] = field(default_factory=set)
    may_run: asyncio.Event = field(default_factory=asyncio.Event)
    vllm_request: asyncio.Future[bool] | None = None  # set while vLLM runs the sample
    runner: asyncio.Future[None] | None = None
    # deltas to publish, which are kept while the sample is paused
    outbox: deque[Delta] = field(default_factory=deque)

    @property
    def request_id(self) -> str:
        """Id of the request that the sample belongs to."""
        return self.admitted.request.request_id

    @property
    def is_scored_only(self) -> bool:
        """True if the request generates no tokens."""
        return self.admitted.request.params.max_tokens == 0

    @property
    def is_over(self) -> bool:
        """True if nothing is left to publish."""
        return self.is_done and not self.outbox

    def leave_vllm(self) -> None:
        """Abort the sample's vLLM request, if there is one."""
        if self.vllm_request is not None:
            self.vllm_request.cancel()


class Fetcher:
    """Fetches results from the workers: one call at a time, for all samples that have new tokens."""

    def __init__(
        self,
        llm: Any,
        receive: Callable[[dict[str, tuple[Follow, list[Delta]]]], None],
        fail: Callable[[Iterable[Follow], BaseException], None],
    ) -> None:
        self._llm = llm
        self._receive = receive
        self._fail = fail
        self._dirty: dict[str, Follow] = {}
        self._forget: list[str] = []
        self._task: asyncio.Future[None] | None = None
        # done when the next call has fetched the samples in `_dirty`
        self._next: asyncio.Future[None] | None = None
        self.processors: dict[str, ProcessorCounter] = {}
        self.num_calls = 0

    def note(self, follow: Follow) -> asyncio.Future[None]:
        """Schedule a fetch of a sample's new results; return a future that is done when they have arrived."""
        self._dirty[follow.tag] = follow
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        if self._task is None:
            self._task = asyncio.ensure_future(self._work())
        return self._next

    def forget(self, tag: str) -> None:
        """Remove a sample from the workers with the next call."""
        self._dirty.pop(tag, None)
        self._forget.append(tag)

    async def close(self) -> None:
        """Stop fetching and wait until the current call has ended."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _work(self) -> None:
        while self._next is not None:
            dirty, done, forget = self._dirty, self._next, self._forget
            self._dirty, self._next, self._forget = {}, None, []
            try:
                await self._ask(dirty, forget)
            except Exception as error:  # noqa: BLE001 - it fails these samples, not the next call
                self._fail(dirty.values(), error)
            finally:
                if not done.done():
                    done.set_result(None)
        self._task = None

    async def _ask(self, dirty: dict[str, Follow], forget: list[str]) -> None:
        ask = ASKS.encode(Ask({tag: follow.num_seen for tag, follow in dirty.items()}, forget))
        self.num_calls += 1
        replies = await self._llm.collective_rpc("logprobe_take", args=(ask,))
        answer = ANSWERS.decode(next(reply for reply in replies if reply))
        self.processors.update(answer.processors)
        self._receive({tag: (dirty[tag], deltas) for tag, deltas in answer.deltas.items()})
