"""Map tokens to the bytes of the text that was given.

The bytes of the tokens are not always those of the text: a normaliser may compose characters (NFC), replace
them (lower case, NFKC) or remove some, an added token may swallow the spaces around it, and SentencePiece
puts a space first. The offsets of `tokenizers` say which characters a token comes from, with gaps: trimmed
spaces, the marks that a composed character takes in, and removed characters belong to no token there.

Plan: where the tokens spell the text, their lengths are exact. Otherwise the text is cut where offsets do not
overlap and no character combines with the one before. Within such a segment the tokens either spell it, which
is exact again, or each of them covers the whole segment.
"""

from __future__ import annotations

import unicodedata
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

PREFIX_SPACE = b" "  # that SentencePiece tokenizers put before a text


Spans: TypeAlias = "NDArray[np.int64]"
"""Bytes [start, end) of a text's UTF-8, (num_tokens, 2)."""

Offsets: TypeAlias = "Sequence[tuple[int, int]]"
"""Characters [start, end) of each token, as `tokenizers` has them."""


def byte_spans(text: str, pieces: Sequence[bytes], offsets: Callable[[], Offsets]) -> Spans:
    """Bytes [start, end) of a text's UTF-8 that each token comes from, (num_tokens, 2) int64.

    Both columns ascend, and the spans cover the text. Tokens of a segment that the tokenizer rewrote share
    one span, the whole segment; all others follow one another.

    Args:
        text: what was encoded.
        pieces: the bytes of each token.
        offsets: gives the tokens' offsets; not called where the tokens spell the text.
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
    """Spans of tokens whose bytes are `data`, or `data` after one more space; None where they are not."""
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
    """Where the text can be cut between tokens, as (token, character), both ends included."""
    cuts, reached = [(0, 0)], 0
    for token, (start, end) in enumerate(offsets):
        if token and start >= reached:
            gap = text[reached:start]
            # Marks that were composed belong to the token before; trimmed spaces to the one after.
            at = next((reached + i for i, character in enumerate(gap) if character.isspace()), start)
            if at == len(text) or not unicodedata.combining(text[at]):
                cuts.append((token, at))
        reached = max(reached, min(end, len(text)))
    if len(offsets) > cuts[-1][0]:
        cuts.append((len(offsets), len(text)))
    return cuts
