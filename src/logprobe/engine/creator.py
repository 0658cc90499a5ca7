"""`Creator`: detects a fork, after which an object's threads and locks no longer work."""

from __future__ import annotations

import os

from logprobe.errors import EngineClosedError


class Creator:
    """Remembers the id of the process in which it was created."""

    __slots__ = ("_pid",)

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_gone(self) -> bool:
        """True in a forked child of the creating process, where none of the engine's threads run."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """Raise an error in a forked child, where waiting for the engine's threads would block forever.

        Raises:
            EngineClosedError: this is a fork of the process that made the object.
        """
        if self.is_gone:
            raise EngineClosedError(
                f"the engine was started in process {self._pid} and cannot be used in a forked process; "
                "create a new one in this process, or use the start method 'spawn' or 'forkserver'"
            )
