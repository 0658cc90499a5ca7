"""`Creator`: the process that made an object whose threads and locks do not survive a fork."""

from __future__ import annotations

import os

from logprobe.errors import EngineClosedError


class Creator:
    """The process in which this was made."""

    __slots__ = ("_pid",)

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_gone(self) -> bool:
        """True in a process that was forked from it, where no thread of the engine runs."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """Refuse to go on in a forked process, where every wait would be endless.

        Raises:
            EngineClosedError: this is a fork of the process that made the object.
        """
        if self.is_gone:
            raise EngineClosedError(
                f"the engine was started in process {self._pid} and does not work in a fork of it; "
                "make a new one in this process, or use the start method 'spawn' or 'forkserver'"
            )
