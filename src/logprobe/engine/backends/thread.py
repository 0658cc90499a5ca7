"""`LocalEngine`: the native engine on a thread of this process.

The thread alone touches the engine. Callers hand it commands through a queue and follow a request with an
async stream in whatever event loop they run; each step wakes each reader's loop once. A stream gives the
request's one growing output, so a slow reader skips states but never loses a row.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections import defaultdict, deque
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from logprobe.engine.protocol import EngineStats
from logprobe.engine.request import RequestOutput, end_with_error
from logprobe.errors import EngineClosedError, EngineError, require

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from logprobe.engine.engine import Engine
    from logprobe.engine.protocol import Capabilities
    from logprobe.engine.request import Request
    from logprobe.errors import LogprobeError

CHECK_AFTER_IDLE_S = 1.0


class Reader:
    """Who follows a request: an event of the reader's own loop, set at each step or at the end only."""

    def __init__(self, *, every_step: bool) -> None:
        self.every_step = every_step
        self.loop = asyncio.get_running_loop()
        self.news = asyncio.Event()


class LocalEngine:
    """Implements `EngineBackend` on an `Engine` of this process."""

    def __init__(self, engine: Engine, capabilities: Capabilities) -> None:
        self._engine = engine
        self._capabilities = capabilities
        self._wake = threading.Condition()
        # All below is guarded by `_wake`.
        self._commands: deque[Callable[[], object]] = deque()
        self._outputs: dict[str, RequestOutput] = {}
        self._readers: dict[str, Reader] = {}
        self._is_closed = False
        self._turn_began: float | None = None  # by the monotonic clock; None while it waits for work
        self._thread = threading.Thread(target=self._run, name="logprobe-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Accept a request; `result` or `stream` must follow it, once.

        Raises:
            ParameterError: it can never be served.
            EngineClosedError: the engine was closed.
        """
        self.submit_many([request])

    def submit_many(self, requests: Sequence[Request]) -> None:
        """Accept requests that enter the same step where they fit, or none of them where one is refused.

        Raises:
            ParameterError: one can never be served.
            EngineClosedError: the engine was closed.
        """
        for request in requests:
            self._engine.check(request)
        with self._wake:
            if self._is_closed:
                raise EngineClosedError("the engine is closed; make a new one")
            for request in requests:
                is_new = request.request_id not in self._outputs
                require(is_new, "request_id", f"{request.request_id!r} is in use; give each request its own")
                self._engine.forward.loras.check(request.lora)  # it may have gone since
            for request in requests:
                output = RequestOutput.for_request(request)
                self._outputs[request.request_id] = output
                self._commands.append(partial(self._engine.add, request, output))
            self._wake.notify()

    @property
    def is_busy(self) -> bool:
        """Whether requests run or wait; a new one then joins the next step without delay."""
        return bool(self._commands) or self._engine.has_work

    def forget_prefixes(self) -> None:
        """Let go of every cached prefix that no request stands on."""
        self._command(self._engine.scheduler.tree.clear)

    def add_lora(self, name: str, path: str | Path) -> None:
        """Load a LoRA adapter from a folder; requests then name it as their `adapter`.

        Raises:
            ModelError: the folder cannot be read, or does not fit the model.
            ParameterError: the name is, or was, another adapter's.
        """
        self._engine.forward.loras.add(name, path)

    def remove_lora(self, name: str) -> None:
        """Refuse new requests for an adapter; its weights go once none runs, its name is not used again.

        Raises:
            ParameterError: no such adapter.
        """
        with self._wake:
            self._engine.forward.loras.hide(name)
            self._command(partial(self._drop_adapter, name))

    def list_loras(self) -> dict[str, str]:
        """The loaded adapters: name → path."""
        return self._engine.forward.loras.paths()

    def _drop_adapter(self, name: str) -> None:
        running = self._engine.scheduler.samples()
        if any(sample.request.lora == name for sample in running):
            self._command(partial(self._drop_adapter, name))  # look again after the next step
        else:
            self._engine.forward.loras.drop(name)

    def check(self, request: Request) -> None:
        """Raise `ParameterError` where a request can never be served."""
        self._engine.check(request)

    async def result(self, request_id: str) -> RequestOutput:
        """The request's output once it has ended; giving up the wait aborts the request."""
        with self._follow(request_id, every_step=False) as (output, reader):
            while not output.is_finished:
                await reader.news.wait()
                reader.news.clear()
            return output

    async def stream(self, request_id: str) -> AsyncIterator[RequestOutput]:
        """The request's one output, each time it has grown; leaving the stream early aborts the request."""
        with self._follow(request_id, every_step=True) as (output, reader):
            is_finished = False
            while not is_finished:
                await reader.news.wait()
                reader.news.clear()
                is_finished = output.is_finished  # before the yield: rows may come during it
                yield output

    @contextmanager
    def _follow(self, request_id: str, *, every_step: bool) -> Iterator[tuple[RequestOutput, Reader]]:
        reader = Reader(every_step=every_step)
        with self._wake:
            is_known = request_id in self._outputs
            require(is_known, "request_id", f"{request_id!r} is unknown, or its output was taken already")
            output = self._outputs[request_id]
            self._readers[request_id] = reader
        if output.is_finished:
            reader.news.set()
        try:
            yield output, reader
        finally:
            with self._wake:
                if self._readers.get(request_id) is reader:
                    del self._readers[request_id], self._outputs[request_id]
            if not output.is_finished:
                self.abort(request_id)

    def abort(self, request_id: str) -> None:
        """Give a request up; its output ends with finish reason `abort` and keeps what there is."""
        self._command(partial(self._engine.abort, request_id))

    def pause(self, request_id: str) -> None:
        """Let a request take no step until `resume`; it keeps what is computed."""
        self._command(partial(self._engine.pause, request_id, is_paused=True))

    def resume(self, request_id: str) -> None:
        """Let a paused request go on."""
        self._command(partial(self._engine.pause, request_id, is_paused=False))

    def _command(self, command: Callable[[], object]) -> None:
        with self._wake:
            self._commands.append(command)
            self._wake.notify()

    def capabilities(self) -> Capabilities:
        """What this engine can do."""
        return self._capabilities

    def stats(self) -> EngineStats:
        """What it is doing and has done; read while it runs, so each figure is of its own moment."""
        scheduler = self._engine.scheduler
        running = list(scheduler.running)
        return EngineStats(
            waiting=len(scheduler.waiting),
            running=len(running),
            paused=sum(sample.is_paused for sample in running),
            free_slots=scheduler.pool.num_free + scheduler.tree.num_evictable,
            cached_tokens=scheduler.num_cached_tokens,
            preempted=scheduler.num_preempted,
            seconds=dict(self._engine.clock.seconds),
            processors=dict(self._engine.processing.pipeline.counters),
        )

    def stalled_s(self) -> float:
        """How long its present step has taken, s: 0 while it waits for work, infinite once it has stopped."""
        if not self._thread.is_alive():
            return math.inf
        began = self._turn_began
        return 0.0 if began is None else time.monotonic() - began

    def close(self) -> None:
        """End all requests with `EngineClosedError` and let the thread go; a second call does nothing."""
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        reason: LogprobeError = EngineClosedError("the engine was closed before this request ended")
        try:
            while self._take_commands():
                self._publish(self._engine.step())
                self._turn_began = None
        except Exception as error:  # noqa: BLE001 - a bug of ours must end every request, not hang it
            reason = EngineError(f"the engine stopped: {error!r}; please report this")
            reason.__cause__ = error
        with self._wake:
            self._is_closed = True
            outputs = list(self._outputs.values())
        for output in outputs:
            end_with_error(output, reason)
        self._publish(outputs)

    def _take_commands(self) -> bool:
        """Wait for work and run the commands that came; False once closed."""
        with self._wake:
            if not self._wake.wait_for(self._has_news, timeout=CHECK_AFTER_IDLE_S):
                self._engine.scheduler.check_integrity()
                self._wake.wait_for(self._has_news)
            if self._is_closed:
                return False
            commands, self._commands = self._commands, deque()
        self._turn_began = time.monotonic()
        aborted = [command() for command in commands]
        self._publish(output for output in aborted if isinstance(output, RequestOutput))
        return True

    def _has_news(self) -> bool:
        return bool(self._commands) or self._is_closed or self._engine.has_work

    def _publish(self, outputs: Iterable[RequestOutput]) -> None:
        by_loop: defaultdict[asyncio.AbstractEventLoop, list[Reader]] = defaultdict(list)
        with self._wake:
            for output in outputs:
                reader = self._readers.get(output.request_id)
                if reader is not None and (reader.every_step or output.is_finished):
                    by_loop[reader.loop].append(reader)
        for loop, readers in by_loop.items():
            try:
                loop.call_soon_threadsafe(_wake_all, readers)
            except RuntimeError:  # the loop was closed under its readers
                if not loop.is_closed():
                    raise
                self._forget(readers)

    def _forget(self, readers: list[Reader]) -> None:
        """Give up the requests of readers who can never come back."""
        with self._wake:
            gone = [request_id for request_id, reader in self._readers.items() if reader in readers]
            for request_id in gone:
                del self._readers[request_id], self._outputs[request_id]
                self._commands.append(partial(self._engine.abort, request_id))


def _wake_all(readers: list[Reader]) -> None:
    for reader in readers:
        reader.news.set()
