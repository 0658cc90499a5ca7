"""Models for actors of the Ray tests; in a separate module, as Ray's processes import it by name."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from logprobe import LLM

HELD_S = 300.0


class HoldingLLM(LLM):
    """Record calls in `notes`; the first process to begin its second call waits to be killed."""

    def __init__(self, folder: str, notes: str) -> None:
        super().__init__(folder, kv_cache_memory_bytes=1 << 21)
        self._notes = Path(notes)
        self._num_calls = 0

    def score(self, *arguments: Any, **keywords: Any) -> Any:
        self._num_calls += 1
        (self._notes / f"{os.getpid()}.{self._num_calls}").touch()
        if self._num_calls == 2:
            with suppress(FileExistsError), (self._notes / "victim").open("x") as file:
                file.write(str(os.getpid()))
                file.flush()
                threading.Event().wait(HELD_S)
        return super().score(*arguments, **keywords)
