"""`VllmEngine`: implements `Core` with vLLM's `AsyncLLM`.

Each sample is one vLLM request, whose tokens are sampled in vLLM's workers (`worker`). One RPC to the worker
fetches the results of all samples that have new tokens. A paused sample is aborted in vLLM. To resume the
sample, its request is submitted again with the sample's tokens in the prompt, most of which are still in
vLLM's prefix cache.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import threading
import time
import uuid
from typing import TYPE_CHECKING, Any

from logprobe.engine.protocol import EngineStats
from logprobe.errors import EngineClosedError, EngineError, LogprobeError, require
from logprobe.integrations.vllm.follow import Fetcher, Follow
from logprobe.integrations.vllm.loras import VllmLoras
from logprobe.integrations.vllm.orders import WORKS, Work
from logprobe.integrations.vllm.params import drawing_params, scoring_params
from logprobe.integrations.vllm.prompt import asked_of_vllm, check_prompt, prompt_rows
from logprobe.transport.messages import (
    Abort,
    Delta,
    DropLora,
    Failure,
    Finish,
    ForgetPrefixes,
    LoadLora,
    Pause,
    Resume,
    Submit,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from logprobe.engine.backends.bridge import LoopThread
    from logprobe.engine.backends.process.admission import Admission
    from logprobe.engine.protocol import Capabilities
    from logprobe.transport.messages import Admitted, Asked, Command, Event, Request

logger = logging.getLogger("logprobe")


class VllmEngine:
    """`Core` with an `AsyncLLM` that runs on the event loop of `bridge`.

    `end_ids` are the ids of tokens that end a text.
    """

    _publish: Callable[[Iterable[Event]], None]
    _end: Callable[[LogprobeError], None]

    def __init__(
        self,
        llm: Any,
        bridge: LoopThread,
        *,
        capabilities: Capabilities,
        admission: Admission,
        end_ids: Sequence[int],
    ) -> None:
        self._llm, self._bridge = llm, bridge
        self._capabilities, self._admission = capabilities, admission
        self._loras = VllmLoras(llm, capabilities.device)
        self._end_ids = sorted(end_ids)
        self._is_closed = False
        # The attributes below are used only on the event loop.
        self._resets: list[asyncio.Future[Any]] = []  # resets of the prefix cache in progress
        self._follows: dict[str, list[Follow]] = {}
        self._numbers, self._runs = itertools.count(), itertools.count()
        # distinguishes samples from those of other wrappers of the same vLLM engine
        self._prefix = uuid.uuid4().hex[:8]
        self._fetcher = Fetcher(llm, self._receive, self._fail_all)
        self._thread_id: int | None = None
        self._num_cached, self._num_pauses = 0, 0
        self._heard_at = time.monotonic()

    def start(self, publish: Callable[[Iterable[Event]], None], end: Callable[[LogprobeError], None]) -> None:
        """Set the callbacks: `publish` receives the events of requests, and `end` the final error."""
        self._publish, self._end = publish, end

    def admit(self, request: Request) -> Admitted:
        """Validate a request.

        Raises:
            ParameterError: the request is invalid, or this engine can never serve it.
        """
        admitted = self._admission.admit(request)
        check_prompt(request, self._capabilities.vocab_size)
        is_safe = request.params.prompt_logprobs is None or not self._loras.spoils_prompts
        remedy = "can crash vLLM on a CPU with LoRA enabled; start the engine without enable_lora"
        require(is_safe, "prompt_logprobs", remedy)
        if request.params.max_tokens == 0:
            fits = len(request.prompt_token_ids) <= self._capabilities.max_model_len
            require(
                fits,
                "prompt",
                f"has {self._capabilities.max_model_len + 1} tokens, one more than vLLM can "
                "score; shorten it",
            )
        return admitted

    def send(self, command: Command) -> None:
        """Run a command on the event loop; if called there, run `Abort`, `Pause` and `Resume` immediately."""
        is_on_loop = threading.get_ident() == self._thread_id
        match command:
            case Abort() | Pause() | Resume() if is_on_loop:
                self._handle(command)
            case _ if self._is_closed:
                return  # all requests have ended, or are ending
            case Submit(requests):
                self._bridge.post(self._begin, requests)
            case ForgetPrefixes():
                self._bridge.post(self._reset_prefixes)
            case DropLora(number):
                self._bridge.post(self._loras.drop, number)
            case _:
                self._bridge.post(self._handle, command)

    @property
    def is_busy(self) -> bool:
        """True if requests are running or waiting."""
        return bool(self._follows)

    def ask(self, command: Asked) -> None:
        """Carry out `command`, which must be `LoadLora`. Also raises the errors of `VllmLoras.load`.

        Raises:
            ParameterError: the command replaces the model's weights, which is not supported.
        """
        is_lora = isinstance(command, LoadLora)
        require(is_lora, "weights", "can only be replaced in the native engine; create a new LLM")
        assert isinstance(command, LoadLora)
        self._bridge.run(self._loras.load(command))

    def capabilities(self) -> Capabilities:
        """Return the engine's capabilities."""
        return self._capabilities

    def stats(self) -> EngineStats:
        """Return current statistics, as far as vLLM reports them."""
        active = [follow for many in list(self._follows.values()) for follow in many if not follow.is_over]
        running = [follow for follow in active if follow.vllm_request is not None]
        held = sum(follow.num_running for follow in running)
        return EngineStats(
            waiting=len(active) - len(running),
            running=len(running),
            paused=sum(bool(follow.paused_by) for follow in active),
            free_slots=max(self._capabilities.num_slots - held, 0),
            cached_tokens=self._num_cached,
            preempted=0,
            pauses=self._num_pauses,
            seconds={},
            processors=dict(self._fetcher.processors),
        )

    def stalled_s(self, request_ids: Collection[str] = ()) -> float:  # noqa: ARG002 - one engine runs all of them
        """Return the seconds since vLLM's last output; 0 if no requests run, inf if vLLM has died."""
        if self._is_closed or self._llm.errored:
            return math.inf
        is_waiting = any(
            follow.vllm_request is not None for many in list(self._follows.values()) for follow in many
        )
        return time.monotonic() - self._heard_at if is_waiting else 0.0

    def close(self) -> None:
        """Shut vLLM down; a second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._bridge.run(self._shut_down())
            self._bridge.close()
        self._end(EngineClosedError("the engine was closed before this request ended"))

    # -- on the event loop -------------------------------------------------------------------------------

    def _handle(self, command: Abort | Pause | Resume) -> None:
        follows = self._follows.get(command.request_id, [])
        match command:
            case Abort(request_id):
                ended = [
                    Delta(request_id=request_id, index=follow.index, finish=Finish("abort"))
                    for follow in follows
                    if not follow.is_over
                ]
                self._drop(follows)
                self._publish(ended)
            case Pause(_, by):
                self._num_pauses += by == "reader"
                for follow in follows:
                    follow.paused_by.add(by)
                    follow.may_run.clear()
                    follow.leave_vllm()
            case Resume(_, by):
                for follow in follows:
                    follow.paused_by.discard(by)
                    if not follow.paused_by:
                        follow.may_run.set()
                self._flush(follows)

    def _begin(self, requests: Sequence[Admitted]) -> None:
        self._thread_id = threading.get_ident()
        for admitted in requests:
            request, number = admitted.request, next(self._numbers)
            follows = [
                self._new_follow(admitted, index, number) for index in range(request.params.num_samples)
            ]
            self._follows[request.request_id] = follows
            for follow in follows:
                if follow.is_scored_only and follow.has_prompt_rows:
                    self._finish(follow, Finish("length"))
                else:
                    follow.runner = asyncio.ensure_future(self._run(follow))
            self._flush(follows)

    def _new_follow(self, admitted: Admitted, index: int, number: int) -> Follow:
        request = admitted.request
        work = (
            b""
            if request.params.max_tokens == 0
            else WORKS.encode(Work(admitted=admitted, index=index, number=number))
        )
        has_rows = asked_of_vllm(request) is not None and index == 0 and len(request.prompt_token_ids) > 1
        tag = f"{self._prefix}-{number}-{index}"
        follow = Follow(admitted, index, tag, work, has_prompt_rows=not has_rows)
        follow.may_run.set()
        return follow

    async def _run(self, follow: Follow) -> None:
        """Run a sample to its end; while the sample is paused, vLLM has no request for it."""
        try:
            while not follow.is_done:
                await follow.may_run.wait()
                if follow.is_done:  # aborted in the meantime
                    break
                follow.vllm_request = asyncio.ensure_future(self._run_in_vllm(follow))
                await asyncio.wait([follow.vllm_request])
                has_ended = not follow.vllm_request.cancelled() and follow.vllm_request.result()
                follow.vllm_request = None
                if not (follow.is_done or follow.is_scored_only):
                    await self._fetcher.note(follow)
                if has_ended and not follow.is_done:
                    early = EngineError(f"vLLM ended a text of request {follow.request_id!r} too early")
                    self._fail_all([follow], early)
        except Exception as error:  # noqa: BLE001 - whatever it is, it must end this request
            self._fail_all([follow], error)

    async def _run_in_vllm(self, follow: Follow) -> bool:
        """Run one vLLM request to its end; return True."""
        request, num_before = follow.admitted.request, len(follow.token_ids)
        prompt = [*request.prompt_token_ids.tolist(), *follow.token_ids]
        if follow.is_scored_only:
            params = scoring_params(request)
        else:
            is_first = not follow.has_prompt_rows
            params = drawing_params(
                request, follow.tag, follow.work, num_before, end_ids=self._end_ids, is_first=is_first
            )
        follow.num_seen, follow.num_running = num_before, len(prompt)
        is_new = True
        outputs = self._llm.generate(
            {"prompt_token_ids": prompt},
            params,
            f"{follow.tag}-{next(self._runs)}",
            lora_request=self._loras.request_of(follow.admitted),
        )
        async for output in outputs:
            self._heard_at = time.monotonic()
            if is_new:
                self._num_cached += output.num_cached_tokens or 0
                if follow.num_cached is None:  # a resumed sample also finds its own tokens in the cache
                    follow.num_cached = output.num_cached_tokens
                is_new = False
            await self._see(follow, output)
        return True

    async def _see(self, follow: Follow, output: Any) -> None:
        """Process an output of vLLM: read the prompt's rows, and schedule a fetch if there are new tokens."""
        num_tokens = len(output.outputs[0].token_ids)
        follow.num_seen += num_tokens
        follow.num_running += num_tokens
        if output.prompt_logprobs and not follow.has_prompt_rows:
            follow.has_prompt_rows = True
            request, vocab_size = follow.admitted.request, self._capabilities.vocab_size
            flat = output.prompt_logprobs
            if asked_of_vllm(request) == -1:
                rows = await asyncio.to_thread(prompt_rows, flat, request, vocab_size)
            else:
                rows = prompt_rows(flat, request, vocab_size)
            finish = Finish("length") if follow.is_scored_only else None
            delta = Delta(request_id=follow.request_id, index=0, prompt=rows, finish=finish)
            delta.num_cached_tokens = follow.num_cached
            follow.outbox.append(delta)
            follow.is_done = follow.is_done or follow.is_scored_only
            self._flush([follow])
        if num_tokens and not follow.is_scored_only:
            self._fetcher.note(follow)

    def _receive(self, replies: dict[str, tuple[Follow, list[Delta]]]) -> None:
        for follow, deltas in replies.values():
            if follow.is_done:
                continue
            follow.outbox += deltas
            for delta in deltas:
                follow.token_ids += delta.token_ids
                delta.num_cached_tokens = follow.num_cached  # the worker does not know this number
                follow.is_done = follow.is_done or delta.finish is not None
            if follow.is_done:
                follow.leave_vllm()
                self._fetcher.forget(follow.tag)
        self._flush([follow for follow, _ in replies.values()])

    def _flush(self, follows: Iterable[Follow]) -> None:
        """Publish one delta per sample in turn, except for paused samples; readers may pause more of them."""
        follows = list(follows)
        while ready := [follow for follow in follows if follow.outbox and not follow.paused_by]:
            self._publish([follow.outbox.popleft() for follow in ready])
        for follow in follows:
            if follow.is_over:
                self._forget_request(follow.request_id)

    def _finish(self, follow: Follow, finish: Finish) -> None:
        follow.is_done = True
        follow.outbox.append(Delta(request_id=follow.request_id, index=follow.index, finish=finish))

    def _fail_all(self, follows: Iterable[Follow], error: BaseException) -> None:
        """End the requests that the samples belong to with an error."""
        reason = _as_ours(error)
        for request_id in {follow.request_id for follow in follows if not follow.is_over}:
            self._drop(self._follows.get(request_id, []))
            self._publish([Failure(request_id, reason)])

    def _drop(self, follows: Iterable[Follow]) -> None:
        for follow in list(follows):
            follow.is_done = True
            follow.outbox.clear()
            follow.leave_vllm()
            follow.may_run.set()  # wake its runner, which then ends
            self._fetcher.forget(follow.tag)
            self._forget_request(follow.request_id)

    def _forget_request(self, request_id: str) -> None:
        if all(follow.is_over for follow in self._follows.get(request_id, [])):
            self._follows.pop(request_id, None)

    def _reset_prefixes(self) -> None:
        """Ask vLLM to clear its prefix cache, which vLLM does not do while a request is running."""
        self._resets = [reset for reset in self._resets if not reset.done()]
        self._resets.append(asyncio.ensure_future(self._llm.reset_prefix_cache()))

    async def _shut_down(self) -> None:
        follows = [follow for many in self._follows.values() for follow in many]
        self._drop(follows)
        await asyncio.gather(*(follow.runner for follow in follows if follow.runner), return_exceptions=True)
        await self._fetcher.close()
        # Calls in flight would never get a reply after the shutdown.
        await asyncio.gather(*self._loras.removals, *self._resets, return_exceptions=True)
        self._llm.shutdown()


def _as_ours(error: BaseException) -> LogprobeError:
    if isinstance(error, LogprobeError):
        return error
    reason = EngineError(f"vLLM failed: {error!r}")
    reason.__cause__ = error
    return reason
