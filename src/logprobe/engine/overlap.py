"""`OverlappedLoop`: the next step runs while the one before it is still being published.

What the next step rests on (tokens, ends, slots) is settled by `Engine.advance` before it begins; the rest of
a step's work, from the copy of its rows to the readers that are woken, goes on beside it on a thread of its
own. It publishes the same as the `SerialLoop` of `thread`.
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
    from logprobe.engine.recorder import StepDeltas
    from logprobe.transport.messages import Event


class OverlappedLoop:
    """A step is published beside the next one; messages keep their order."""

    def __init__(
        self,
        engine: Engine,
        publish: Callable[[Sequence[Event]], None],
        transfer: AsyncCPUTransfer | None = None,
    ) -> None:
        """`transfer` copies what lies on a device; it is closed with this."""
        self._engine = engine
        self._publish = publish
        self._transfer = transfer or AsyncCPUTransfer()
        self._numbers = itertools.count()
        self._publisher = ThreadPoolExecutor(1, thread_name_prefix="logprobe-publish")
        self._publishing: tuple[StepDeltas, Future[BaseException | None]] | None = None
        engine.send = self._send

    def step(self) -> None:
        """Run a step; it is published while the next one runs."""
        step = self._engine.advance()
        self.settle(step)
        self._publishing = step, self._publisher.submit(self._publish_step, step)

    def settle(self, next_step: StepDeltas | None = None) -> None:
        """Wait until every step is published; `next_step` loses what rests on one that could not be."""
        if self._publishing is None:
            return
        step, publishing = self._publishing
        self._publishing = None
        error = publishing.result()
        if error is None:
            return
        ends = self._engine.fail_step(step, error)
        if next_step is not None:
            next_step.drop(step.deltas)
        self._publish(ends)

    def close(self) -> None:
        """Publish what is left and let the thread go."""
        try:
            self.settle()
        finally:
            self._engine.send = None
            self._publisher.shutdown()
            self._transfer.shutdown()

    def _publish_step(self, step: StepDeltas) -> BaseException | None:
        """Publish what a step gave; or give the error to the engine's thread."""
        try:
            events = self._engine.events_of(step)
        except BaseException as error:  # noqa: BLE001 - it ends the requests of this step, and not the engine
            return error
        with self._engine.clock.part("publish"):
            self._publish(events)
        return None

    def _send(self, tensor: Tensor) -> Callable[[], Tensor]:
        number = next(self._numbers)
        self._transfer.submit_transfer(tensor, number)
        # A copy of its own, since readers hold on to rows: the buffer is for the next step.
        return lambda: self._transfer.get_result(number).clone()
