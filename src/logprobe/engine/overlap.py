"""`OverlappedLoop`: runs the next step while the previous one is being published.

`Engine.advance` does the part of a step that the next step depends on: tokens, finished samples and slots.
The rest, from copying rows to the host to waking the readers, runs on another thread. The published events
are the same as with `SerialLoop` in `backends.thread`.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from logprobe import runtime
from logprobe.transport import AsyncCPUTransfer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from torch import Tensor

    from logprobe.engine.engine import Engine
    from logprobe.engine.recorder import StepDeltas
    from logprobe.transport.messages import Event


class OverlappedLoop:
    """Publishes each step while the next one runs; events keep their order."""

    def __init__(
        self,
        engine: Engine,
        publish: Callable[[Sequence[Event]], None],
        transfer: AsyncCPUTransfer | None = None,
    ) -> None:
        """`transfer` copies rows from a device; it is shut down by `close`."""
        self._engine = engine
        self._publish = publish
        self._transfer = transfer or AsyncCPUTransfer()
        self._numbers = itertools.count()
        self._publisher = runtime.ThreadPoolExecutor(1, thread_name_prefix="logprobe-publish")
        self._publishing: tuple[StepDeltas, Future[BaseException | None]] | None = None
        engine.send = self._send

    def step(self) -> None:
        """Run a step, and start publishing its events on the other thread."""
        step = self._engine.advance()
        self.settle(step)
        self._publishing = step, self._publisher.submit(self._publish_step, step)

    def settle(self, next_step: StepDeltas | None = None) -> None:
        """Wait until the previous step is published.

        If publishing failed, end the step's samples with an error and remove them from `next_step`.
        """
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
        """Wait until the pending step is published, and stop the publishing thread."""
        try:
            self.settle()
        finally:
            self._engine.send = None
            self._publisher.shutdown()
            self._transfer.shutdown()

    def _publish_step(self, step: StepDeltas) -> BaseException | None:
        """Publish a step's events; return the error if they cannot be computed, else None."""
        try:
            events = self._engine.events_of(step)
        except BaseException as error:  # noqa: BLE001 - it ends the requests of this step, not the engine
            return error
        with self._engine.clock.part("publish"):
            self._publish(events)
        return None

    def _send(self, tensor: Tensor) -> Callable[[], Tensor]:
        number = next(self._numbers)
        self._transfer.submit_transfer(tensor, number)
        # Clone it: readers keep rows, and the transfer buffer is reused.
        return lambda: self._transfer.get_result(number).clone()
