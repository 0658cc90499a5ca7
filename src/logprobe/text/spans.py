"""Map tokens to the bytes of the text they were encoded from.

The bytes of the tokens may differ from those of the text: a normalizer may compose characters (NFC), replace
them (lower case, NFKC) or remove some, an added token may absorb the spaces around it, and SentencePiece
prepends a space. The offsets of `tokenizers` map tokens to characters, with gaps: trimmed spaces, combining
marks merged into a composed character, and removed characters belong to no token.

Plan: if the concatenated tokens equal the text, token lengths give exact spans. Otherwise cut the text where
offsets do not overlap and the next character is not a combining mark. Within such a segment the tokens either
equal the segment, which is exact again, or each of them gets the whole segment as its span.
"""

from __future__ import annotations

import unicodedata
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

PREFIX_SPACE = b" "  # which SentencePiece tokenizers prepend to a text


Spans: TypeAlias = "NDArray[np.int64]"
"""Bytes [start, end) of a text's UTF-8, (num_tokens, 2) int64."""

Offsets: TypeAlias = "Sequence[tuple[int, int]]"
"""Characters [start, end) of each token, as returned by `tokenizers`."""


def byte_spans(text: str, pieces: Sequence[bytes], offsets: Callable[[], Offsets]) -> Spans:
    """Return the bytes [start, end) of a text's UTF-8 that each token comes from, (num_tokens, 2) int64.

    Both columns are non-decreasing, and the spans cover the text. Tokens of a segment that the tokenizer
    rewrote all have the whole segment as their span; all other spans are consecutive.

    Args:
        text: the text that was encoded.
        pieces: the bytes of each token.
        offsets: returns the tokens' offsets; not called if the concatenated tokens equal the text.
    """
    data = text.encode()
    exact = _spelled(pieces, data, may_have_prefix=True)
    if exact is not None:
        return _array(exact)
    byte_of = [0, *accumulate(len(character.encode()) for character in text)]
    spans: list[tuple[int, int]] = []
    for (first, start), (end, stop) in pairwise(_cuts(text, offsets())):
        segment = data[byte_of[start] : byte_of[stop]]
        exact = _spelled(pieces[first:end], segment, may_have_prefix=first == 0)
        own = exact if exact is not None else [(0, len(segment))] * (end - first)
        spans += [(byte_of[start] + begin, byte_of[start] + finish) for begin, finish in own]
    return _array(spans)


def _array(spans: Sequence[tuple[int, int]]) -> Spans:
    return np.array(spans, np.int64).reshape(-1, 2)


def _spelled(pieces: Sequence[bytes], data: bytes, *, may_have_prefix: bool) -> list[tuple[int, int]] | None:
    """Return spans of tokens that concatenate to `data`, optionally after one extra space; None if not."""
    joined = b"".join(pieces)
    if joined == data:
        shift = 0
    elif may_have_prefix and joined == PREFIX_SPACE + data:
        shift = len(PREFIX_SPACE)
    else:
        return None
    bounds = [max(bound - shift, 0) for bound in accumulate(map(len, pieces), initial=0)]
    return list(pairwise(bounds))


def _cuts(text: str, offsets: Offsets) -> list[tuple[int, int]]:
    """Return (token, character) pairs at which the text can be cut between tokens, both ends included."""
    cuts, reached = [(0, 0)], 0
    for token, (start, end) in enumerate(offsets):
        if token and start >= reached:
            gap = text[reached:start]
            # Composed combining marks belong to the previous token, trimmed spaces to the next one.
            at = next((reached + i for i, character in enumerate(gap) if character.isspace()), start)
            if at == len(text) or not unicodedata.combining(text[at]):
                cuts.append((token, at))
        reached = max(reached, min(end, len(text)))
    if len(offsets) > cuts[-1][0]:
        cuts.append((len(offsets), len(text)))
    return cuts
