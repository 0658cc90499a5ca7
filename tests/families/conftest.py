"""What the tests of families share."""

from __future__ import annotations

import pytest

from families.tiny import VOCAB_SIZE
from logprobe.models import Vocabulary
from logprobe.text.edge import TextEdge


@pytest.fixture(scope="session")
def text() -> TextEdge:
    """No tokenizer: requests and answers are ids here."""
    pieces = [bytes([97 + token_id % 26]) for token_id in range(VOCAB_SIZE)]
    return TextEdge(None, Vocabulary(pieces), frozenset())
