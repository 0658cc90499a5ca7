"""`StepClock`: where the time of the engine's steps goes.

Written by the engine's thread alone; a reader on another thread sees totals that only grow.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class StepClock:
    """Seconds by part of a step, since the start."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {"schedule": 0.0, "forward": 0.0, "prompt_rows": 0.0, "sample": 0.0}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time of a block to a part, also where it raises."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start
