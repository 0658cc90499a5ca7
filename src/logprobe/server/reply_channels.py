"""Split a reply into channels (content, reasoning, tool calls), each with the tokens that gave it.

A reply that is not split is content from its first token to its last.
"""

from __future__ import annotations

import secrets
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from logprobe.text.channels import Channels
from logprobe.text.channels.split import begun_reply

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from logprobe.engine.request import CompletionPiece
    from logprobe.server.service import Service
    from logprobe.text.channels import Part, ResponseForm, ToolCall

    Rows = list[tuple[int, bytes]]  # positions in the completion, each with what its token gave


MAX_BEGUN_CHARS: Final = 1 << 14
"""Of a prompt's end, in which it is looked for what the prompt has begun of its reply."""


CHARS_A_TOKEN: Final = 4  # at least, of text that takes as long to split as a token takes to write


def end_of(prompt: str) -> str:
    """The end of a prompt, which alone can have begun its reply."""
    return prompt[-MAX_BEGUN_CHARS:]


@dataclass(frozen=True, slots=True)
class ReplySegment:
    """Text of one channel, and the tokens that gave it."""

    channel: str  # content, reasoning or tool_call
    text: str
    rows: Sequence[int]  # positions in the completion
    parts: Mapping[int, bytes] = field(default_factory=dict)  # of those that gave it not all of their bytes
    call: ToolCall | None = None  # which comes whole
    call_id: str | None = None


class Splitter:
    """Splits the pieces of a reply's choices into segments; all pieces go through it in order."""

    def __init__(
        self,
        service: Service,
        prompt: str,
        functions: Sequence[Mapping[str, Any]] | None = None,
        *,
        is_formed: bool = False,
    ) -> None:
        """`prompt` is the text that the reply follows, and `functions` are the tools that it may call.

        A reply that `is_formed` keeps to a form of the client's from its first token on: a reasoning that the
        prompt has opened is not gone on with.
        """
        form = service.reply_form()
        may_call = bool(functions) and form is not None and form.tools is not None
        self._form = form if form is not None and (form.has_reasoning or may_call) else None
        self._text = service.text
        self._prompt = "" if is_formed else end_of(prompt)
        self._num_begun_chars = 0 if self._form is None else len(begun_reply(self._form, self._prompt))
        self._functions = functions
        self._channels: dict[int, Channels] = {}  # by choice
        self._segments: defaultdict[int, list[ReplySegment]] = defaultdict(list)
        self._num_calls = Counter[int]()

    @property
    def is_split(self) -> bool:
        """Whether a reply may be more than content."""
        return self._form is not None

    def take(self, piece: CompletionPiece) -> list[ReplySegment]:
        """Return a piece's segments; none where its tokens gave no text, or their text is not certain yet."""
        if self._form is None:
            return self._whole(piece)
        segments = self._split(piece, self._form)
        self._segments[piece.index] += segments
        self._num_calls[piece.index] += sum(segment.call is not None for segment in segments)
        return segments

    def num_calls(self, index: int) -> int:
        """Calls that a choice has made so far."""
        return self._num_calls[index]

    def num_entries(self, piece: CompletionPiece) -> int:
        """Return what a piece costs beside its own tokens, as tokens: what its choice has held back so far.

        The last piece of a choice has all of its segments gone through once more.
        """
        if self._form is None:
            return 0
        channels = self._channels.get(piece.index)
        num_chars = self._num_begun_chars if channels is None else channels.num_held_chars
        num_segments = len(self._segments[piece.index]) if piece.finish_reason is not None else 0
        return num_segments + num_chars // CHARS_A_TOKEN

    @property
    def begun_entries(self) -> int:
        """What the prompt has begun of a reply costs each choice, as tokens."""
        return self._num_begun_chars // CHARS_A_TOKEN

    def all_of(self, index: int) -> Sequence[ReplySegment]:
        """Return the segments of a choice so far, of a reply that is split."""
        return self._segments[index]

    @staticmethod
    def _whole(piece: CompletionPiece) -> list[ReplySegment]:
        is_any = piece.text or piece.text_tokens
        return [ReplySegment("content", piece.text, piece.text_tokens)] if is_any else []

    def _split(self, piece: CompletionPiece, form: ResponseForm) -> list[ReplySegment]:
        channels = self._channels.get(piece.index)
        if channels is None:
            channels = Channels(form, self._prompt, self._text, self._functions)
            self._channels[piece.index] = channels
        ids, own_bytes = piece.completion.token_ids, self._text.vocabulary.token_bytes
        segments = []
        for part, rows in in_order(channels.take(piece)):
            parts = {row: data for row, data in rows if data != own_bytes(ids[row])}
            text = part.text if len(rows) == len(part.rows) else _text(rows)
            call_id = None if part.call is None else f"call_{secrets.token_hex(12)}"
            positions = [row for row, _ in rows]
            segments.append(ReplySegment(part.channel, text, positions, parts, part.call, call_id))
        return segments


def in_order(parts: Sequence[Part]) -> Iterator[tuple[Part, Rows]]:
    """Parts by the places of their tokens, one in several where others stand between; a call stays whole."""
    bits: list[tuple[int, int, Rows]] = []  # a position, the number of its part, and its rows
    for number, part in enumerate(parts):
        if part.call is None:
            bits += [(row[0], number, [row]) for row in part.rows]
        else:
            # The body of a call without arguments may have no token: it stays behind what was read before.
            before = bits[-1][0] if bits else 0
            bits.append((part.rows[0][0] if part.rows else before, number, part.rows))
    bits.sort(key=lambda bit: bit[0])  # where two have one token they stay as they are
    for number, run in groupby(bits, lambda bit: bit[1]):
        yield parts[number], [row for _, _, rows in run for row in rows]


def _text(rows: Rows) -> str:
    return b"".join(data for _, data in rows).decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class ReplyChannels:
    """The segments of a choice, or of an increment of one, by channels."""

    content: Sequence[ReplySegment]
    reasoning: Sequence[ReplySegment]
    calls: Sequence[ReplySegment]

    @classmethod
    def of(cls, segments: Sequence[ReplySegment]) -> ReplyChannels:
        """Sort segments into channels, in their order."""
        content, reasoning, calls = (
            [segment for segment in segments if segment.channel == channel]
            for channel in ("content", "reasoning", "tool_call")
        )
        return cls(content, reasoning, calls)


def text_of(segments: Sequence[ReplySegment]) -> str:
    """Join the texts of segments."""
    return "".join(segment.text for segment in segments)


def grouped(segments: Sequence[ReplySegment]) -> list[Sequence[ReplySegment]]:
    """Group segments that follow each other in one channel; each call is a group of its own."""
    runs = groupby(enumerate(segments), lambda item: (item[1].channel, item[0] if item[1].call else None))
    return [[segment for _, segment in run] for _, run in runs]
