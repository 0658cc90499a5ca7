"""Convert a completion's tokens to the text that the marker parser reads, and map that text back to bytes.

The text includes special tokens, since markers often are special tokens. The bytes of ordinary tokens are
decoded as one stream, as in the completion's text, even if special tokens come between them.
"""

from __future__ import annotations

import codecs
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from logprobe.text.edge import TextEdge
    from logprobe.text.pieces import Piece

PROMPT: Final = -1  # position of reply text that the prompt already contains
_Decoder: Final = codecs.getincrementaldecoder("utf-8")


class Bit(NamedTuple):
    """Bytes that one token contributes, with the token's position in the completion."""

    position: int
    data: bytes
    is_special: bool = False


class TokenText:
    """Buffer between tokens and the marker parser: add tokens to get text, cut parsed text to get bytes."""

    def __init__(self, text: TextEdge) -> None:
        self._text = text
        self._decoder = _Decoder("surrogateescape")  # keeps the bytes of invalid UTF-8
        # What is not cut off yet: texts, each with the position of its special token or None for ordinary
        # text, and the bytes of ordinary tokens.
        self._chunks: deque[tuple[str, int | None]] = deque()
        self._ordinary: deque[Bit] = deque()
        self.num_chars = 0  # characters added
        self._num_cut = 0  # characters cut off
        self._num_bytes = 0  # bytes of ordinary tokens so far

    @property
    def first_position(self) -> int | None:
        """Position of the first ordinary token with bytes that are not cut off yet; None if there is none."""
        return first_position(self._ordinary)

    @property
    def num_held_chars(self) -> int:
        """Number of characters not cut off yet."""
        return self.num_chars - self._num_cut

    def add_prompt(self, text: str) -> str:
        """Add reply text that the prompt already contains; return it with lone surrogates replaced by `?`."""
        data = text.encode("utf-8", "replace")
        if data:
            self._ordinary.append(Bit(PROMPT, data))
        return self._shown(data.decode())

    def add(self, piece: Piece[Any]) -> str:
        """Add the tokens in the completion's next piece and return their text."""
        ids, is_last = piece.completion.token_ids, piece.finish_reason is not None
        end = piece.completion.num_text_bytes if is_last else None
        texts = [self._add(position, int(ids[position]), end) for position in range(piece.start, piece.stop)]
        if is_last:
            texts.append(self._shown(self._decoder.decode(b"", final=True)))
        return "".join(texts)

    def _add(self, position: int, token_id: int, end: int | None) -> str:
        if token_id in self._text.special_token_ids:
            is_cut = end is not None and self._num_bytes > end
            text = self._text.vocabulary.token_bytes(token_id).decode("utf-8", "replace")
            return "" if is_cut else self._shown(text, position)
        data = self._text.bytes_of([token_id])
        shown = data if end is None else data[: max(end - self._num_bytes, 0)]
        self._num_bytes += len(data)
        if shown:
            self._ordinary.append(Bit(position, shown))
        return self._shown(self._decoder.decode(shown))

    def _shown(self, text: str, special: int | None = None) -> str:
        if text:
            self._chunks.append((text, special))
            self.num_chars += len(text)
        return text

    def cut(self, stop: int) -> list[Bit]:
        """Remove the text before character `stop`, counted from the start; return its bytes per token."""
        bits: list[Bit] = []
        while self._num_cut < stop:
            text, special = self._chunks.popleft()
            count = min(stop - self._num_cut, len(text))
            if count < len(text):
                self._chunks.appendleft((text[count:], special))
            self._num_cut += count
            data = text[:count].encode("utf-8", "surrogateescape")
            if special is None:
                bits += self._draw(len(data))
            else:
                bits.append(Bit(special, data, is_special=True))
        return bits

    def _draw(self, num_bytes: int) -> Iterator[Bit]:
        """Remove and yield the next `num_bytes` bytes of ordinary tokens."""
        while num_bytes:
            bit = self._ordinary.popleft()
            if len(bit.data) > num_bytes:
                self._ordinary.appendleft(Bit(bit.position, bit.data[num_bytes:]))
                bit = Bit(bit.position, bit.data[:num_bytes])
            num_bytes -= len(bit.data)
            yield bit


def first_position(bits: Iterable[Bit]) -> int | None:
    """Return the position of the first bit that does not come from the prompt; None if there is none."""
    return next((bit.position for bit in bits if bit.position != PROMPT), None)


def slices(bits: list[Bit], spans: Iterable[tuple[int, int]]) -> Iterator[list[Bit]]:
    """Yield the bits of each byte span; spans must be in ascending order."""
    index = at = 0
    for start, stop in spans:
        found: list[Bit] = []
        while index < len(bits) and at < stop:
            position, data, is_special = bits[index]
            first, last = max(start - at, 0), min(stop - at, len(data))
            if first < last:
                found.append(Bit(position, data[first:last], is_special))
            if at + len(data) > stop:
                break  # this bit also has bytes after the span
            at += len(data)
            index += 1
        yield found
