"""Shared fixtures of the family tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from families.tiny import VOCAB_SIZE
from reply_forms import edge_of

if TYPE_CHECKING:
    from logprobe.text.edge import TextEdge


@pytest.fixture(scope="session")
def text() -> TextEdge:
    """A text edge without a tokenizer: the tests only use ids."""
    pieces = [bytes([97 + token_id % 26]) for token_id in range(VOCAB_SIZE)]
    return edge_of(pieces)
