"""`OfflineClient`: provides the methods of vLLM's `AsyncLLM` that `VllmEngine` uses, for a `vllm.LLM`.

A thread runs the steps of vLLM's engine, because a `vllm.LLM` is blocking.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, final

from logprobe.errors import EngineClosedError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

Order: TypeAlias = "Callable[[], None]"


@dataclass(frozen=True, slots=True, eq=False)
class Sink:
    """Queue for the outputs of one request, on its caller's event loop."""

    loop: asyncio.AbstractEventLoop
    # outputs, or the error that ended the request
    items: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)

    def put(self, item: Any) -> None:
        """Add an item; may be called from any thread."""
        self.loop.call_soon_threadsafe(self.items.put_nowait, item)


@final
class OfflineClient:
    """Runs the steps of an open `vllm.LLM`'s engine while this client has requests.

    `shutdown` ends the engine only if `is_owned`. vLLM's engine is not thread-safe: its owner may call
    `generate` only while this client has no requests. vLLM ends the engine when the last reference to the
    engine is gone. This client must hold no reference after `shutdown`, so frames and callbacks use the
    engine only in `_call_engine`.
    """

    def __init__(self, llm: Any, *, is_owned: bool = False) -> None:
        self._engine: Any = llm.llm_engine  # None after `shutdown`, like the configuration
        self.vllm_config: Any = self._engine.vllm_config
        self._is_owned = is_owned
        self.dead_error: BaseException | None = None  # exception that ended vLLM's engine
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False  # guarded by `_lock`, so that no order follows None in the queue
        self._sinks: dict[str, Sink] = {}  # by request id; used only on `_thread`
        self._thread = threading.Thread(target=self._drive, name="logprobe-vllm", daemon=True)
        self._thread.start()

    @property
    def errored(self) -> bool:
        """True if vLLM's engine has died."""
        return self.dead_error is not None

    async def generate(
        self, prompt: Any, sampling_params: Any, request_id: str, *, lora_request: Any = None
    ) -> AsyncGenerator[Any]:
        """Yield the outputs of a request; closing the generator early aborts the request.

        Raises:
            EngineClosedError: the client was shut down.
            Exception: vLLM raised an exception.
        """
        sink = Sink(asyncio.get_running_loop())
        add = partial(self._call_engine, "add_request", request_id, prompt, sampling_params)
        self._post(partial(self._open, request_id, sink, partial(add, lora_request=lora_request)))
        has_ended = False
        try:
            while not has_ended:
                item = await sink.items.get()
                has_ended = isinstance(item, BaseException) or item.finished
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            if not has_ended:
                await self.abort(request_id)

    async def abort(self, request_id: str) -> None:
        """Abort a request; do nothing if it has ended."""
        try:
            self._post(partial(self._give_up, request_id))
        except EngineClosedError:
            return  # all requests ended with the thread

    async def collective_rpc(self, method: str, *, args: tuple[Any, ...] = ()) -> list[Any]:
        """Call a method of each worker between two steps, and return a list of the results."""
        answers: list[Any] = await self._call("collective_rpc", method, args=args)
        return answers

    async def add_lora(self, lora_request: Any) -> bool:
        """Load a LoRA adapter."""
        return bool(await self._call("add_lora", lora_request))

    async def remove_lora(self, lora_id: int) -> bool:
        """Remove a LoRA adapter."""
        return bool(await self._call("remove_lora", lora_id))

    async def reset_prefix_cache(self) -> None:
        """Clear the prefix cache."""
        await self._call("reset_prefix_cache")

    def shutdown(self) -> None:
        """End this client's requests and thread, and the engine if owned; a second call does nothing."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._orders.put(None)
        self._thread.join()
        if self._is_owned:
            self._engine.engine_core.shutdown()
        self._engine = self.vllm_config = None

    def _post(self, order: Order) -> None:
        with self._lock:
            if self._is_closed:
                raise EngineClosedError("the engine is closed; make a new one")
            self._orders.put(order)

    async def _call(self, method: str, *args: Any, **options: Any) -> Any:
        outcome: Future[Any] = Future()
        self._post(partial(_settle, outcome, partial(self._call_engine, method, *args, **options)))
        return await asyncio.wrap_future(outcome)

    # -- on the thread -----------------------------------------------------------------------------------

    def _call_engine(self, method: str, *args: Any, **options: Any) -> Any:
        return getattr(self._engine, method)(*args, **options)

    def _drive(self) -> None:
        while self._take_orders():
            if self._sinks:
                self._step()
        for request_id in list(self._sinks):
            self._sinks[request_id].put(EngineClosedError("the engine was closed before this request ended"))
            self._give_up(request_id)

    def _take_orders(self) -> bool:
        """Run all pending orders, waiting for one if there are no requests; return False after `shutdown`."""
        is_waiting = not self._sinks
        while True:
            try:
                order = self._orders.get(block=is_waiting)
            except queue.Empty:
                return True
            if order is None:
                return False
            order()
            is_waiting = False

    def _open(self, request_id: str, sink: Sink, add: Callable[[], Any]) -> None:
        if self.dead_error is not None:
            sink.put(self.dead_error)
            return
        try:
            add()
        except Exception as error:  # noqa: BLE001 - a request that vLLM rejects must not end others
            sink.put(error)
            return
        self._sinks[request_id] = sink

    def _give_up(self, request_id: str) -> None:
        if self._sinks.pop(request_id, None) is not None and self.dead_error is None:
            self._engine.abort_request([request_id])

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except Exception as error:  # noqa: BLE001 - whatever it is, all waiting callers must get it
            self.dead_error = error
            sinks, self._sinks = self._sinks, {}
            for sink in sinks.values():
                sink.put(error)
            return
        for output in outputs:
            if output.request_id not in self._sinks:
                continue  # aborted
            self._sinks[output.request_id].put(output)
            if output.finished:
                del self._sinks[output.request_id]


def _settle(outcome: Future[Any], work: Callable[[], Any]) -> None:
    if not outcome.set_running_or_notify_cancel():
        return
    try:
        outcome.set_result(work())
    except Exception as error:  # noqa: BLE001 - raised in the caller
        outcome.set_exception(error)
