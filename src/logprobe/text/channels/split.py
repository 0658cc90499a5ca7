"""Split one completion into channels, with the bytes that each token contributes to each channel.

Special tokens contribute no bytes to a channel. The exceptions are special tokens within a tool call, whose
text is reported as written, and those that the pieces show as text (`Piece.text_tokens`).
Whitespace before and after a marker is dropped with the marker; a reply without markers keeps all of its
whitespace. A tool call must have a name, and arguments that are a JSON object. Any other text between call
markers becomes content, together with the markers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from logprobe.text.channels.calls import ToolCall, read_calls
from logprobe.text.channels.forms import CALLS, REASONING
from logprobe.text.channels.regions import Close, Open, Regions, Text
from logprobe.text.channels.source import PROMPT, Bit, TokenText, first_position, slices
from logprobe.text.channels.tool_types import ToolTypes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from logprobe.text.channels.forms import ResponseForm
    from logprobe.text.channels.regions import Step
    from logprobe.text.edge import TextEdge
    from logprobe.text.pieces import Piece

Channel = Literal["content", "reasoning", "tool_call"]


@dataclass(frozen=True, slots=True)
class Part:
    """The text that one piece of a completion adds to a channel, with the bytes of each token in it.

    `rows` has, in order, a pair (position in the completion, bytes of the token in this text) per token. In
    each channel, all bytes of a token are in the same part, in streams as well.
    """

    channel: Channel
    index: int  # index of the tool call; 0 for other channels
    text: str
    rows: list[tuple[int, bytes]]
    call: ToolCall | None = None  # set for tool calls only; a call is always one part


@dataclass(slots=True)
class _Region:
    """A region of tool calls whose closing marker has not been read yet."""

    captures: dict[str, str]
    opening: list[Bit]
    body: list[Bit]
    num_bytes: int = 0  # size of `body`


class Channels:
    """Split the pieces of one completion, taken in order, into channels.

    Args:
        form: the syntax of the model's replies.
        prefix: the rendered conversation, which may contain the start of the reply.
        text: the model's tokenizer.
        tools: the tools that may be called; without tools, calls are not parsed and become content.
    """

    def __init__(
        self,
        form: ResponseForm,
        prefix: str,
        text: TextEdge,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        self._calls_field = form.template.fields.get(CALLS)
        self._has_tools = bool(tools)
        self._source = TokenText(text)
        self._special_token_ids = text.special_token_ids
        self._regions = Regions(form.template)
        self._types = ToolTypes(tools or ())
        self._speech = _Speech()
        self._region: _Region | None = None  # open region of calls
        self._calls: list[Part] = []  # complete, not yet returned
        self._num_calls = 0
        self._follow(self._regions.advance(self._source.add_prompt(begun_reply(form, prefix))))

    def take(self, piece: Piece[Any]) -> list[Part]:
        """Return the parts that are certain after this piece: at most one part of content, one of reasoning.

        Each complete tool call is a further part. For a piece with a finish reason, return all that is left.
        """
        is_last = piece.finish_reason is not None
        ids, special = piece.completion.token_ids, self._special_token_ids
        self._speech.shown.update(position for position in piece.text_tokens if ids[position] in special)
        self._follow(self._regions.advance(self._source.add(piece), final=is_last))
        if is_last:
            if rest := self._source.cut(self._source.num_chars):  # not covered by any step
                self._speech.say("content", rest)
            self._speech.end()
        parts = self._speech.release(None if is_last else self._first_undecided()) + self._calls
        self._calls = []
        return parts

    @property
    def num_held_chars(self) -> int:
        """Number of characters not yet returned; the next piece may cause them to be parsed again."""
        return self._source.num_held_chars + (0 if self._region is None else self._region.num_bytes)

    def _first_undecided(self) -> int | None:
        """Return the position of the first token that has bytes without a channel, or None."""
        first = [self._source.first_position, first_position(self._speech.space)]
        if self._region is not None:
            first += [first_position(self._region.opening), first_position(self._region.body)]
        return min((position for position in first if position is not None), default=None)

    def _follow(self, steps: list[Step]) -> None:
        for step in steps:
            bits = self._source.cut(step.stop)
            if step.field == CALLS:
                self._follow_calls(step, bits)
            elif isinstance(step, Text) and step.field is not None:
                self._speech.say("reasoning" if step.field in REASONING else "content", bits)
            else:
                self._speech.mark(bits)

    def _follow_calls(self, step: Step, bits: list[Bit]) -> None:
        if not self._has_tools:
            self._speech.say("content", bits)
        elif isinstance(step, Open):
            self._region = _Region(step.captures, bits, [])
        else:
            assert self._region is not None, "a region of calls is open"
            if isinstance(step, Close):
                self._end_calls(self._region, bits)
            else:
                self._region.body += bits
                self._region.num_bytes += sum(len(bit.data) for bit in bits)

    def _end_calls(self, region: _Region, closing: list[Bit]) -> None:
        """Add the calls in a region to the result, or treat the region as content if a call is invalid."""
        self._region = None
        stop = len(region.body)
        while stop and not closing and _is_empty(region.body[stop - 1]):  # the text ended inside the call
            stop -= 1
        data = b"".join(bit.data for bit in region.body[:stop])
        assert self._calls_field is not None, "a region of calls was open"
        found = read_calls(self._calls_field, data, region.captures, self._types.typed)
        if not found:
            self._speech.say("content", [*region.opening, *region.body, *closing])
            return
        self._speech.mark(region.opening)
        own = slices(region.body, [(one.start, one.stop) for one in found])
        for one, bits in zip(found, own, strict=True):
            self._calls.append(_part("tool_call", bits, self._num_calls, one.call))
            self._num_calls += 1


def begun_reply(form: ResponseForm, prefix: str) -> str:
    """Return the beginning of the reply that the prompt contains; empty if the reply's start is not found."""
    ends = [match.end() for match in form.template.start_anchor.finditer(prefix)]
    return prefix[ends[-1] :] if ends else ""


def opens_reasoning(form: ResponseForm, prefix: str) -> bool:
    """Return True if the rendered conversation `prefix` ends within reasoning."""
    regions = Regions(form.template)
    regions.advance(begun_reply(form, prefix))
    return regions.field in REASONING


def _is_empty(bit: Bit) -> bool:
    return bit.is_special or not bit.data.strip()


def _part(channel: Channel, bits: Iterable[Bit], index: int = 0, call: ToolCall | None = None) -> Part:
    rows: list[tuple[int, bytes]] = []
    for position, data, _ in bits:
        if position == PROMPT:
            continue
        if rows and rows[-1][0] == position:
            rows[-1] = (position, rows[-1][1] + data)
        else:
            rows.append((position, data))
    text = b"".join(data for _, data in rows).decode("utf-8", "replace")
    return Part(channel, index, text, rows, call)


class _Speech:
    """Buffer for content and reasoning that holds whitespace until it is known if a marker follows."""

    def __init__(self) -> None:
        self.space: list[Bit] = []  # held trailing whitespace
        self._bits: dict[Channel, list[Bit]] = {}  # not yet returned
        self._channel: Channel = "content"  # channel of the latest text
        self._is_after_mark = False
        self.shown: set[int] = set()  # positions of the special tokens that the pieces show

    def say(self, channel: Channel, bits: Iterable[Bit]) -> None:
        """Add text to a channel; special tokens that the pieces do not show are skipped."""
        self._channel = channel
        for position, data, is_special in bits:
            text = data.lstrip() if self._is_after_mark else data
            if (is_special and position not in self.shown) or not text:
                continue
            self._is_after_mark = False
            words = text.rstrip()
            if words:
                self._give([*self.space, Bit(position, words)])
                self.space = []
            if len(words) < len(text):
                self.space.append(Bit(position, text[len(words) :]))

    def mark(self, bits: list[Bit]) -> None:
        """Drop the whitespace around a marker; without `bits` (at the end of the text), do nothing."""
        if bits:
            self.space = []
            self._is_after_mark = True

    def end(self) -> None:
        """End the text: no marker follows, so held whitespace is kept."""
        self._give(self.space)
        self.space = []

    def _give(self, bits: list[Bit]) -> None:
        self._bits.setdefault(self._channel, []).extend(bits)

    def release(self, limit: int | None) -> list[Part]:
        """Return one part per channel with the text of tokens before position `limit` (None: all tokens)."""
        parts = []
        for channel, bits in self._bits.items():
            count = sum(limit is None or bit.position < limit for bit in bits)
            while 0 < count < len(bits) and _are_one(bits[count - 1], bits[count]):
                count -= 1
            ready = bits[:count]
            del bits[:count]
            if any(bit.position != PROMPT for bit in ready):
                parts.append(_part(channel, ready))
        return parts


def _are_one(bit: Bit, following: Bit) -> bool:
    """Return True if two bits belong to the same token or the same UTF-8 character."""
    return bit.position == following.position or following.data[0] & 0xC0 == 0x80
