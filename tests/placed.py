"""Tokens that have their slots, as a step's plan takes them: what a sample is to the forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Placed:
    """A text whose every token has a slot."""

    token_ids: Any  # (n,) int32
    slots: Any  # (n,) int32
    lora: Any = None
    is_long: bool = False

    def ids_between(self, start: int, end: int) -> Any:
        return self.token_ids[start:end]
