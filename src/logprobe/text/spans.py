"""Map tokens to the bytes of the text they were encoded from.

The bytes of the tokens may differ from those of the text: a normalizer may compose characters (NFC), replace
them (lower case, NFKC) or remove some, an added token may absorb the spaces around it, and SentencePiece
prepends a space. The offsets of `tokenizers` map tokens to characters, with gaps: trimmed spaces, combining
marks merged into a composed character, and removed characters belong to no token.

If the concatenated tokens equal the text, the token lengths give exact spans. Otherwise the text is cut into
segments where offsets do not overlap and the next character is not a combining mark. If the tokens in a
segment equal its text, their spans are exact as well; if not, the span of each is the whole segment.
"""

from __future__ import annotations

import unicodedata
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

PREFIX_SPACE = b" "  # SentencePiece tokenizers prepend this to a text


Spans: TypeAlias = "NDArray[np.int64]"
"""The bytes [start, end) of each token in the UTF-8 of a text, (num_tokens, 2) int64."""

Offsets: TypeAlias = "Sequence[tuple[int, int]]"
"""The characters [start, end) of each token in a text, as returned by `tokenizers`."""


def byte_spans(text: str, pieces: Sequence[bytes], offsets: Callable[[], Offsets]) -> Spans:
    """Return the bytes [start, end) in the UTF-8 of a text that each token comes from, (num_tokens, 2) int64.

    Both columns are non-decreasing, and the spans cover the text. In a segment that the tokenizer changed,
    the span of every token is the whole segment; the spans of all other tokens do not overlap.

    Args:
        text: the text that was encoded.
        pieces: the bytes of each token.
        offsets: function that returns the tokens' offsets; only called if the tokens differ from the text.
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
    """Return the span of each token in `data`; None if the tokens do not concatenate to `data`.

    With `may_have_prefix`, the tokens may begin with one extra space.
    """
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
    """Return (token index, character index) of each point where the text can be cut, including both ends."""
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
