"""Tokens with slots, as in a step's plan: the input of a sample to the forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Placed:
    """A text with a slot for every token."""

    token_ids: Any  # (n,) int32
    slots: Any  # (n,) int32
    lora: Any = None
    is_long: bool = False

    def ids_between(self, start: int, end: int) -> Any:
        return self.token_ids[start:end]
