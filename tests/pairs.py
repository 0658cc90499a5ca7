"""Contexts and continuations as lm-evaluation-harness encodes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from logprobe.text.boundary import split_texts

if TYPE_CHECKING:
    from logprobe.records.values import IntArray
    from logprobe.text.edge import TextEdge


def encode_pair(edge: TextEdge, context: str, continuation: str) -> tuple[IntArray, int]:
    """Return the ids of a context and its continuation, and how many of them are the context's.

    They are the tokens of the joined text, split after as many tokens as the context alone has.
    """
    (split,) = split_texts(edge, context, [continuation], rule="token")
    return split.token_ids, split.start
