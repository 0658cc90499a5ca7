"""A text of any length → its token ids, piece by piece: the tokens of the whole, in the memory of a piece.

Each piece begins within the one before it. Where the two agree on a run of tokens up to near the earlier
one's end, the earlier one's tokens up to the run and the later one's from there on are those of the whole:
what comes after a token reaches back a few characters only. Before it: files. After it: windows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from logprobe.records.values import IntArray
    from logprobe.text.edge import TextEdge

PIECE_CHARS = 1 << 16
OVERLAP_CHARS = 4096
GUARD_CHARS = 512  # before the end of a piece, where what follows may still change the tokens
SHORTEST_RUN = 16  # tokens that two pieces must agree on


@dataclass(frozen=True, slots=True)
class Piece:
    """Some text with its tokens and the character at which each begins, (T,)."""

    text: str
    token_ids: IntArray
    starts: IntArray


def encode_pieces(
    texts: Iterable[str],
    edge: TextEdge,
    *,
    piece_chars: int = PIECE_CHARS,
    overlap_chars: int = OVERLAP_CHARS,
) -> Iterator[IntArray]:
    """Token ids of the joined texts without special tokens, as `TextEdge.encode` gives them for the whole.

    Raises:
        ParameterError: the text is not valid Unicode, or the tokenizer would drop part of it.
    """
    blocks = _blocks(texts, piece_chars)
    known = _encode(next(blocks, ""), edge)
    for block in blocks:
        overlap = overlap_chars
        while True:
            cut = _cut(known.text, overlap)
            later = _encode(known.text[cut:] + block, edge)
            seam = _seam(known, later, cut)
            if seam is not None or cut == 0:
                break
            overlap *= 4  # until the two pieces are encoded as one
        mine, theirs = seam or (0, 0)
        yield known.token_ids[:mine]
        first = int(later.starts[theirs]) if theirs < len(later.starts) else 0
        known = Piece(later.text[first:], later.token_ids[theirs:], later.starts[theirs:] - first)
    yield known.token_ids


def _blocks(texts: Iterable[str], size: int) -> Iterator[str]:
    waiting: list[str] = []
    num_waiting = 0
    for text in texts:
        for start in range(0, len(text), size):
            part = text[start : start + size]
            waiting.append(part)
            num_waiting += len(part)
            if num_waiting >= size:
                yield "".join(waiting)
                waiting, num_waiting = [], 0
    if num_waiting:
        yield "".join(waiting)


def _encode(text: str, edge: TextEdge) -> Piece:
    ids, starts = edge.encode_with_starts(text)
    return Piece(text, ids, starts)


def _cut(text: str, overlap: int) -> int:
    """Where the last characters begin: best where a space does, as there most tokenizers begin a token."""
    at = len(text) - overlap
    if at <= 0:
        return 0
    for place in range(at, at + overlap // 4):
        if text[place].isspace() and not text[place - 1].isspace():
            return place
    return at


def _seam(known: Piece, later: Piece, cut: int) -> tuple[int, int] | None:
    """Tokens of both pieces from which on they agree: (place in the earlier, place in the later)."""
    limit = len(known.text) - GUARD_CHARS
    end = int(np.searchsorted(known.starts, limit))
    at = {int(start): place for place, start in enumerate(later.starts) if cut + start < limit}
    first = int(np.searchsorted(known.starts, cut))
    for mine in range(first, end - SHORTEST_RUN):
        theirs = at.get(int(known.starts[mine]) - cut)
        if theirs is None:
            continue
        run = end - mine
        if np.array_equal(known.token_ids[mine:end], later.token_ids[theirs : theirs + run]):
            return mine, theirs
    return None
