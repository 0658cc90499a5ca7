"""`Creator`: detects a fork and the interpreter's shutdown, after which an object's threads do not run."""

from __future__ import annotations

import os
import sys

from logprobe.errors import EngineClosedError


class Creator:
    """Remembers the id of the process in which it was created."""

    __slots__ = ("_pid",)

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_gone(self) -> bool:
        """True where none of the engine's threads run: in a fork, and once the interpreter shuts down.

        Python stops daemon threads before it destroys a program's last objects, whose `__del__` or `finally`
        may use the engine.
        """
        return sys.is_finalizing() or os.getpid() != self._pid

    def check(self) -> None:
        """Raise an error where waiting for the engine's threads would block forever.

        Raises:
            EngineClosedError: this is a fork of the process that made the object, or the interpreter is
                shutting down.
        """
        if sys.is_finalizing():
            raise EngineClosedError("the program is ending; use the engine before its end")
        if self.is_gone:
            raise EngineClosedError(
                f"the engine was started in process {self._pid} and cannot be used in a forked process; "
                "create a new one in this process, or use the start method 'spawn' or 'forkserver'"
            )
