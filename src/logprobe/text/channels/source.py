"""The tokens of a completion → the text that a parser of marks is shown, and back to each token's bytes.

The text holds special tokens as they are written, since marks are often such. Bytes of ordinary tokens become
text together, as they do in a completion's own text, whatever special tokens stand between them.
"""

from __future__ import annotations

import codecs
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from logprobe.text.edge import TextEdge
    from logprobe.text.pieces import Piece

PROMPT: Final = -1  # the position of what the prompt has written of a reply
_Decoder: Final = codecs.getincrementaldecoder("utf-8")


class Bit(NamedTuple):
    """Bytes that a token gave."""

    position: int
    data: bytes
    is_special: bool = False


class TokenText:
    """Takes tokens and gives their text; what of it is certain is then cut off as the tokens' bytes."""

    def __init__(self, text: TextEdge) -> None:
        self._text = text
        self._decoder = _Decoder("surrogateescape")  # so that each character knows its bytes
        # Not cut off yet: texts with the positions of special tokens, and the bytes of the ordinary ones.
        self._chunks: deque[tuple[str, int | None]] = deque()
        self._ordinary: deque[Bit] = deque()
        self.num_chars = 0  # added
        self._num_cut = 0  # of them
        self._num_bytes = 0  # of the ordinary tokens so far

    @property
    def first_position(self) -> int | None:
        """The first ordinary token of which something is not cut off."""
        return first_position(self._ordinary)

    @property
    def num_held_chars(self) -> int:
        """Characters that are not cut off yet."""
        return self.num_chars - self._num_cut

    def add_prompt(self, text: str) -> str:
        """Add what the prompt has written of a reply."""
        data = text.encode("utf-8", "replace")
        if data:
            self._ordinary.append(Bit(PROMPT, data))
        return self._shown(data.decode())

    def add(self, piece: Piece[Any]) -> str:
        """Add the tokens of a completion's next piece."""
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
        """Cut off the characters up to a place, counted from the first that was ever added."""
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
        """The next bytes of ordinary tokens."""
        while num_bytes:
            bit = self._ordinary.popleft()
            if len(bit.data) > num_bytes:
                self._ordinary.appendleft(Bit(bit.position, bit.data[num_bytes:]))
                bit = Bit(bit.position, bit.data[:num_bytes])
            num_bytes -= len(bit.data)
            yield bit


def first_position(bits: Iterable[Bit]) -> int | None:
    """The position of the first of some bits that the completion wrote."""
    return next((bit.position for bit in bits if bit.position != PROMPT), None)


def slices(bits: list[Bit], spans: Iterable[tuple[int, int]]) -> Iterator[list[Bit]]:
    """The bits of each of some spans of bytes, which ascend."""
    index = at = 0
    for start, stop in spans:
        found: list[Bit] = []
        while index < len(bits) and at < stop:
            position, data, is_special = bits[index]
            first, last = max(start - at, 0), min(stop - at, len(data))
            if first < last:
                found.append(Bit(position, data[first:last], is_special))
            if at + len(data) > stop:
                break  # it has bytes of what comes after, too
            at += len(data)
            index += 1
        yield found
