"""Split a reply into channels (content, reasoning, tool calls), each with its tokens.

If the format of the model's replies is unknown, the whole reply is content.
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

    Rows = list[tuple[int, bytes]]  # position in the completion, and the bytes that its token contributed


MAX_BEGUN_CHARS: Final = 1 << 14
"""Number of characters at the end of a prompt in which the reply may begin (for example with `<think>`)."""


CHARS_A_TOKEN: Final = 4  # splitting this many characters takes at most as long as encoding a token


def end_of(prompt: str) -> str:
    """Return the end of a prompt; only this part may contain the beginning of the reply."""
    return prompt[-MAX_BEGUN_CHARS:]


@dataclass(frozen=True, slots=True)
class ReplySegment:
    """A stretch of text in one channel, with the positions of its tokens."""

    channel: str  # content, reasoning or tool_call
    text: str
    rows: Sequence[int]  # positions of the tokens in the completion
    parts: Mapping[int, bytes] = field(default_factory=dict)  # bytes of partly included tokens, by position
    call: ToolCall | None = None  # the complete tool call, if this is one
    call_id: str | None = None


class Splitter:
    """Splits the pieces of a reply's choices into segments; each choice's pieces must come in order."""

    def __init__(
        self,
        service: Service,
        prompt: str,
        functions: Sequence[Mapping[str, Any]] | None = None,
        *,
        is_formed: bool = False,
    ) -> None:
        """Prepare to split a reply.

        Args:
            service: the service of the model that generates the reply.
            prompt: the text before the reply.
            functions: the tools that the reply may call.
            is_formed: the reply follows the request's response format from its first token on, so it does not
                continue reasoning that the prompt opens.
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
        """True if a reply may have channels other than content."""
        return self._form is not None

    def take(self, piece: CompletionPiece) -> list[ReplySegment]:
        """Return a piece's segments; none if the piece has no text, or its channel is still undecided."""
        if self._form is None:
            return self._whole(piece)
        segments = self._split(piece, self._form)
        self._segments[piece.index] += segments
        self._num_calls[piece.index] += sum(segment.call is not None for segment in segments)
        return segments

    def num_calls(self, index: int) -> int:
        """Return the number of tool calls in a choice so far."""
        return self._num_calls[index]

    def num_entries(self, piece: CompletionPiece) -> int:
        """Return the cost (in tokens) of writing a piece, in addition to the piece's own tokens.

        This is the cost of the text that the choice has held back so far. For the choice's last piece, the
        cost of all segments of the choice is added, because these are processed again.
        """
        if self._form is None:
            return 0
        channels = self._channels.get(piece.index)
        num_chars = self._num_begun_chars if channels is None else channels.num_held_chars
        num_segments = len(self._segments[piece.index]) if piece.finish_reason is not None else 0
        return num_segments + num_chars // CHARS_A_TOKEN

    @property
    def begun_entries(self) -> int:
        """Cost (in tokens), per choice, of the beginning of the reply that the prompt already contains."""
        return self._num_begun_chars // CHARS_A_TOKEN

    def all_of(self, index: int) -> Sequence[ReplySegment]:
        """Return the segments of a choice so far, or none if the reply is not split."""
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
    """Yield parts in the order of their tokens, each with the positions and bytes of its tokens.

    A part is divided if tokens of another part lie between its tokens; a tool call is never divided.
    """
    bits: list[tuple[int, int, Rows]] = []  # position, part number, rows
    for number, part in enumerate(parts):
        if part.call is None:
            bits += [(row[0], number, [row]) for row in part.rows]
        else:
            # A call without arguments may have no tokens: it keeps its position after the previous part.
            before = bits[-1][0] if bits else 0
            bits.append((part.rows[0][0] if part.rows else before, number, part.rows))
    bits.sort(key=lambda bit: bit[0])  # stable: two parts of the same token keep their order
    for number, run in groupby(bits, lambda bit: bit[1]):
        yield parts[number], [row for _, _, rows in run for row in rows]


def _text(rows: Rows) -> str:
    return b"".join(data for _, data in rows).decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class ReplyChannels:
    """The segments in a choice, or in a streamed part of a choice, by channel."""

    content: Sequence[ReplySegment]
    reasoning: Sequence[ReplySegment]
    calls: Sequence[ReplySegment]

    @classmethod
    def of(cls, segments: Sequence[ReplySegment]) -> ReplyChannels:
        """Sort segments into channels, keeping their order."""
        content, reasoning, calls = (
            [segment for segment in segments if segment.channel == channel]
            for channel in ("content", "reasoning", "tool_call")
        )
        return cls(content, reasoning, calls)


def text_of(segments: Sequence[ReplySegment]) -> str:
    """Join the texts of segments."""
    return "".join(segment.text for segment in segments)


def grouped(segments: Sequence[ReplySegment]) -> list[Sequence[ReplySegment]]:
    """Group consecutive segments of the same channel; each tool call forms its own group."""
    runs = groupby(enumerate(segments), lambda item: (item[1].channel, item[0] if item[1].call else None))
    return [[segment for _, segment in run] for _, run in runs]
