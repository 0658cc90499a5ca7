"""`WeightSwap`: one forward pass takes another's place, as when a model in training gets new weights.

No number that the old one gave is left in a cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from logprobe.engine.protocol import ForwardBackend
    from logprobe.transport.messages import Admitted


class WeightSwap:
    """Forward passes that are ready, the one that waits until nothing runs, and the requests behind it."""

    def __init__(self) -> None:
        self.number = 0  # of the load of the weights that answer
        self.ready: dict[int, ForwardBackend] = {}  # by the numbers of their loads
        self.next: int | None = None  # the load that waits
        self.held: list[Admitted] = []

    def end(self) -> tuple[ForwardBackend, list[Admitted]]:
        """What takes over, and the requests that waited for it."""
        assert self.next is not None
        self.number, held = self.next, self.held
        self.next, self.held = None, []
        return self.ready.pop(self.number), held

    def take(self, request_id: str) -> int | None:
        """Give up a request that waits: the number of its samples; None where it does not wait."""
        for admitted in self.held:
            if admitted.request.request_id == request_id:
                self.held.remove(admitted)
                return admitted.request.params.num_samples
        return None
