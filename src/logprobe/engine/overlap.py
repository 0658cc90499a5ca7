"""`Overlapped`: the next step runs while the one before it is still being told.

Before it: the thread that runs an engine. After it: whoever publishes. What the next step rests on (tokens,
ends, slots) is settled by `Engine.advance` before it begins; the rest of a step's work, from the copy of its
rows to the readers that are woken, goes on beside it on a thread of its own. It says the same as `Plain`.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from logprobe.transport import AsyncCPUTransfer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from torch import Tensor

    from logprobe.engine.engine import Engine
    from logprobe.engine.recorder import StepNews
    from logprobe.transport.messages import News


class Plain:
    """Each step is told before the next one begins."""

    def __init__(self, engine: Engine, publish: Callable[[Sequence[News]], None]) -> None:
        self._engine = engine
        self._publish = publish

    def step(self) -> None:
        """Run a step and publish what it found."""
        deltas = self._engine.step()
        with self._engine.clock.part("publish"):
            self._publish(deltas)

    def settle(self) -> None:
        """Wait until all that was found is published: it is."""

    def close(self) -> None:
        """Let go of what helps: nothing does."""


class Overlapped:
    """A step is told beside the next one; messages keep their order."""

    def __init__(
        self,
        engine: Engine,
        publish: Callable[[Sequence[News]], None],
        transfer: AsyncCPUTransfer | None = None,
    ) -> None:
        """`transfer` copies what lies on a device; it is closed with this."""
        self._engine = engine
        self._publish = publish
        self._transfer = transfer or AsyncCPUTransfer()
        self._numbers = itertools.count()
        self._teller = ThreadPoolExecutor(1, thread_name_prefix="logprobe-tell")
        self._telling: tuple[StepNews, Future[BaseException | None]] | None = None
        engine.send = self._send

    def step(self) -> None:
        """Run a step; what it found is published while the next one runs."""
        news = self._engine.advance()
        self.settle(news)
        self._telling = news, self._teller.submit(self._tell, news)

    def settle(self, next_news: StepNews | None = None) -> None:
        """Wait until all that was found is published; `next_news` loses what rests on a step that was not."""
        if self._telling is None:
            return
        news, telling = self._telling
        self._telling = None
        error = telling.result()
        if error is None:
            return
        ends = self._engine.forsake(news, error)
        if next_news is not None:
            next_news.drop(news.deltas)
        self._publish(ends)

    def close(self) -> None:
        """Publish what is left and let the thread go."""
        try:
            self.settle()
        finally:
            self._engine.send = None
            self._teller.shutdown()
            self._transfer.shutdown()

    def _tell(self, news: StepNews) -> BaseException | None:
        """Publish what a step found; or give the error to the engine's thread."""
        try:
            deltas = self._engine.tell(news)
        except BaseException as error:  # noqa: BLE001 - it ends the requests of this step, and not the engine
            return error
        with self._engine.clock.part("publish"):
            self._publish(deltas)
        return None

    def _send(self, tensor: Tensor) -> Callable[[], Tensor]:
        number = next(self._numbers)
        self._transfer.submit_transfer(tensor, number)
        # A copy of its own, since readers hold on to rows: the buffer is for the next step.
        return lambda: self._transfer.get_result(number).clone()
