"""Malicious logits processors for a server process to load."""

from __future__ import annotations

import threading
import time
from typing import Any

import msgspec

from logprobe.processors import LogitsProcessor

FAULTS: dict[str, type[BaseException]] = {
    one.__name__: one for one in (SystemExit, KeyboardInterrupt, GeneratorExit, RuntimeError, RecursionError)
}


class FaultArgs(msgspec.Struct, forbid_unknown_fields=True):
    """Where to raise, and what."""

    apply: str = ""
    update_state: str = ""
    check_args: str = ""
    hang: bool = False
    sleep_s: float = 0.0


class FaultyLogitsProcessor(LogitsProcessor):
    """Raise what a request asks for, or hang."""

    Args = FaultArgs

    def __init__(self, config: Any) -> None:
        del config
        self._rows: list[Any] = []

    def check_args(self, args: Any) -> None:
        """Fail at admission."""
        _raise(args.check_args)

    def update_state(self, batch: Any) -> None:
        """Fail before the forward pass."""
        self._rows = list(batch.rows)
        for row in self._rows:
            _raise(row.args.update_state)

    def apply(self, logits: Any) -> Any:
        """Fail after the forward pass, or hang."""
        for row in self._rows:
            _raise(row.args.apply)
            time.sleep(row.args.sleep_s)
            if row.args.hang:
                threading.Event().wait()
        return logits


def _raise(name: str) -> None:
    if name:
        raise FAULTS[name]("on purpose")
