"""`Succession`: one forward pass takes another's place, as when a model in training gets new weights.

Before it: a message with a forward pass that is ready. After it: the engine runs that one, and no number that
the old one gave is left in a cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from logprobe.transport.messages import Admitted, ReplaceForward


class Succession:
    """The forward pass that waits until nothing runs, and the requests that wait for it."""

    def __init__(self) -> None:
        self.number = 0  # of the load of the weights that answer
        self.next: ReplaceForward | None = None
        self.held: list[Admitted] = []

    def begin(self, command: ReplaceForward) -> None:
        """Wait for the end of what runs; of two that wait the later counts."""
        if self.next is not None:
            self.next.on_done()
        self.next = command

    def end(self) -> tuple[ReplaceForward, list[Admitted]]:
        """What takes over, and the requests that waited for it."""
        assert self.next is not None
        command, held = self.next, self.held
        self.next, self.held = None, []
        self.number = command.number
        return command, held

    def take(self, request_id: str) -> int | None:
        """Give up a request that waits: the number of its samples; None where it does not wait."""
        for admitted in self.held:
            if admitted.request.request_id == request_id:
                self.held.remove(admitted)
                return admitted.request.params.num_samples
        return None
