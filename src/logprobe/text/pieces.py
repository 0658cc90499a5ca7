"""Split a growing completion into pieces of whole tokens with their exact text, and find stop strings.

A streamed reply consists of several pieces; a reply that is not streamed is one piece with everything.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"
_Decoder = codecs.getincrementaldecoder("utf-8")


class GrowingCompletion(Protocol):
    """Protocol with the attributes of a running completion that `Cutter` reads."""

    @property
    def token_ids(self) -> Sequence[int]:
        """Ids of the tokens generated so far."""

    @property
    def finish_reason(self) -> str | None:
        """Reason why the completion finished; None while it is running."""

    @property
    def num_text_bytes(self) -> int | None:
        """Number of bytes to keep of a text that a stop string cut; None if the text was not cut."""


C = TypeVar("C", bound=GrowingCompletion)


@dataclass(slots=True, kw_only=True)
class Piece(Generic[C]):
    """Tokens [start, stop) of one completion, and their text."""

    index: int  # index of the choice
    completion: C
    start: int
    stop: int
    text: str
    # per token, index of its first character in the completion's text
    offsets: list[int] = field(default_factory=list)
    # positions, in [start, stop), of the tokens that have text
    text_tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def num_rows(self) -> int:
        """Number of tokens in the piece."""
        return self.stop - self.start


class TextWalk:
    """Incremental UTF-8 decoder that reports the character at which each token starts."""

    def __init__(self) -> None:
        self._decoder = _Decoder("replace")
        self.num_chars = 0  # characters decoded so far

    @property
    def pending(self) -> bytes:
        """The bytes of an incomplete character."""
        return self._decoder.getstate()[0]

    def feed(self, data: bytes, *, final: bool = False) -> tuple[str, int]:
        """Decode more bytes; return the text that is now complete, and the character where `data` starts."""
        pending = self.pending if data else b""
        begins_at, text = self.num_chars, ""
        if pending:
            text = self._decoder.decode(data[:1])
            is_whole = (pending + data[:1]) == _REPLACEMENT.encode()
            begins_at += text.startswith(_REPLACEMENT) and not is_whole
            data = data[1:]
        text += self._decoder.decode(data, final)
        self.num_chars += len(text)
        return text, begins_at


class Cutter(Generic[C]):
    """Return the tokens of a growing completion as soon as their text cannot change any more.

    Tokens are held while they end within a character, or may be the start of a stop string.

    Args:
        bytes_of: returns the bytes of tokens; empty for special tokens.
        stops: the stop strings.
        min_tokens: number of tokens up to which stop strings are ignored.
        index: index of the choice.
        walk: decoder of the text; it may have read a text that comes before the completion.
        special_bytes_of: returns the bytes of special tokens, for texts that contain them; stop strings are
            still found in the text without them. None: texts do not contain them.
        shows_end: with `special_bytes_of`, include the special token that ended the completion.
    """

    def __init__(
        self,
        bytes_of: Callable[[Sequence[int]], bytes],
        stops: Sequence[str],
        min_tokens: int,
        *,
        index: int = 0,
        walk: TextWalk | None = None,
        special_bytes_of: Callable[[Sequence[int]], bytes] | None = None,
        shows_end: bool = False,
    ) -> None:
        self._bytes_of = bytes_of
        self._special_bytes_of, self._shows_end = special_bytes_of, shows_end
        self._stops = [stop.encode() for stop in stops]
        self._min_tokens = min_tokens
        self._index = index
        self._walk = walk or TextWalk()
        self._num_taken = 0  # tokens released
        self._num_bytes = 0  # bytes of released tokens
        self._is_done = False
        self._held: list[bytes] = []  # bytes of tokens not yet released

    def take(self, completion: C) -> Piece[C] | None:
        """Return a piece with the new tokens whose text is final; None if there are none."""
        if self._is_done:
            return None
        reason = completion.finish_reason  # read before token_ids: the tokens are complete once it is set
        self._is_done = reason is not None
        ids = completion.token_ids
        for token_id in ids[self._num_taken + len(self._held) : len(ids)]:
            self._held.append(self._bytes_of([token_id]))
        count = len(self._held) if reason else self._num_certain()
        if not count and not reason:
            return None
        piece = Piece(
            index=self._index,
            completion=completion,
            start=self._num_taken,
            stop=self._num_taken + count,
            text="",
            finish_reason=reason,
        )
        self._fill(piece, self._held[:count], completion.num_text_bytes if reason else None)
        self._num_taken += count
        del self._held[:count]
        return piece

    def _fill(self, piece: Piece[C], parts: list[bytes], end: int | None) -> None:
        texts = []
        for index, part in enumerate(parts):
            shown = part if end is None else part[: max(end - self._num_bytes, 0)]
            if not part and not (end is not None and self._num_bytes > end):
                shown = self._special(piece, piece.start + index)
            self._num_bytes += len(part)
            text, begins_at = self._walk.feed(shown)
            texts.append(text)
            piece.offsets.append(begins_at)
            if shown:
                piece.text_tokens.append(piece.start + index)
        if piece.finish_reason:
            texts.append(self._walk.feed(b"", final=True)[0])
            # Tokens after the last text start at the end of the text, even if it ends in U+FFFD.
            last = max(piece.text_tokens, default=piece.start - 1)
            for index in range(last + 1 - piece.start, len(parts)):
                piece.offsets[index] = self._walk.num_chars
        piece.text = "".join(texts)

    def _special(self, piece: Piece[C], position: int) -> bytes:
        """Return the bytes to show of a token that has no bytes of its own."""
        is_last = position == piece.stop - 1 and piece.finish_reason == "stop"
        if self._special_bytes_of is None or (is_last and not self._shows_end):
            return b""
        return self._special_bytes_of([piece.completion.token_ids[position]])

    def _num_certain(self) -> int:
        """Return how many held tokens end at a character boundary before any possible stop string."""
        held = b"".join(self._held)
        limit = len(held) - self._held_back(held)
        certain = end = 0
        check = _Decoder("replace")
        check.setstate((self._walk.pending, 0))
        for count, part in enumerate(self._held, start=1):
            end += len(part)
            if end > limit:
                break
            check.decode(part)
            if not check.getstate()[0]:
                certain = count
        return certain

    def _held_back(self, held: bytes) -> int:
        """Return how many bytes at the end of `held` are, or may become, part of a stop string."""
        starts = [start for stop in self._stops if (start := held.find(stop)) >= 0]
        if starts and self._num_taken + len(self._held) >= self._min_tokens:
            return len(held) - min(starts)
        return max((_overlap(held, stop) for stop in self._stops), default=0)


def _overlap(text: bytes, stop: bytes) -> int:
    """Return the length of the longest prefix of `stop` that `text` ends with."""
    return next((n for n in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:n])), 0)


class StopMatcher:
    """Find the first stop string in a growing text; the text ends before it, or after it if `is_included`."""

    def __init__(self, stops: Sequence[str], *, is_included: bool = False) -> None:
        self._stops = [(stop, stop.encode()) for stop in stops]
        self._is_included = is_included
        self._longest = max(len(needle) for _, needle in self._stops)
        self._text = bytearray()

    def feed(self, piece: bytes) -> tuple[str, int] | None:
        """Add a token's bytes; return a stop string, if found, and the byte at which to cut the text."""
        search_from = max(0, len(self._text) - self._longest + 1)
        self._text += piece
        starts = [(self._text.find(needle, search_from), stop) for stop, needle in self._stops]
        matches = [(start, stop) for start, stop in starts if start >= 0]
        if not matches:
            return None
        start, stop = min(matches)
        return stop, start + len(stop.encode()) if self._is_included else start
