"""What each processor has cost so far; written by the engine's thread, read by anybody."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ProcessorCounter:
    """One processor's totals since the engine's start."""

    num_steps: int = 0  # steps with a row for it
    num_rows: int = 0  # rows that it was given
    num_failures: int = 0  # samples that it failed
    seconds: float = 0.0  # wall time in update_state and apply
