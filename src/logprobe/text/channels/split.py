"""One completion → what each channel says, with the share that each token has in it.

Before it: the pieces of a completion (`text/pieces.py`). After it: replies.

Special tokens have no bytes in a channel, as everywhere, except within a tool's call, which is told as it was
written. White space next to a mark belongs to it, on both sides; where a reply has no mark it all stays. A
call is what has a name, and arguments that are a JSON object. Anything else between the marks of a call is
content, together with the marks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from logprobe.text.channels.calls import ToolCall, read_calls
from logprobe.text.channels.forms import CALLS, REASONING
from logprobe.text.channels.source import PROMPT, Bit, TokenText, first_position, slices

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from logprobe.text.channels.forms import ResponseForm
    from logprobe.text.channels.regions import Step
    from logprobe.text.edge import TextEdge
    from logprobe.text.pieces import Piece

Channel = Literal["content", "reasoning", "tool_call"]


@dataclass(frozen=True, slots=True)
class Part:
    """What one piece adds to a channel.

    `rows` are (position in the completion, the bytes that the token gave to this text), in their order. Whole
    or streamed, a token is in one part of a channel at most, with all the bytes that it has there.
    """

    channel: Channel
    index: int  # of the tool's call; else 0
    text: str
    rows: list[tuple[int, bytes]]
    call: ToolCall | None = None  # of a tool's call, which comes whole


@dataclass(slots=True)
class _Region:
    """A region of calls that has not ended."""

    captures: dict[str, str]
    opening: list[Bit]
    body: list[Bit]
    num_bytes: int = 0  # of its body


class Channels:
    """Takes one completion's pieces in their order and gives what they add to each channel.

    Args:
        form: how the model writes its reply.
        prefix: the conversation as it was laid out, which may have begun the reply.
        text: the model's tokenizer.
        tools: what may be called; without them calls are not looked for and stay content.
    """

    def __init__(
        self,
        form: ResponseForm,
        prefix: str,
        text: TextEdge,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        from logprobe.text.channels.regions import Regions

        self._calls_field = form.template.fields.get(CALLS)
        self._has_tools = bool(tools)
        self._source = TokenText(text)
        self._regions = Regions(form.template, tools or ())
        self._speech = _Speech()
        self._region: _Region | None = None  # of calls
        self._calls: list[Part] = []  # not given out yet
        self._num_calls = 0
        self._follow(self._regions.advance(self._source.add_prompt(begun_reply(form, prefix))))

    def take(self, piece: Piece[Any]) -> list[Part]:
        """What a piece makes certain: at most one part of content, one of reasoning, and calls.

        After the piece with a finish reason all has been given out.
        """
        is_last = piece.finish_reason is not None
        self._follow(self._regions.advance(self._source.add(piece), final=is_last))
        if is_last:
            if rest := self._source.cut(self._source.num_chars):  # which no step covers
                self._speech.say("content", rest)
            self._speech.end()
        parts = self._speech.release(None if is_last else self._first_undecided()) + self._calls
        self._calls = []
        return parts

    @property
    def num_held_chars(self) -> int:
        """Characters that are not given out yet, which the next piece may have read once more."""
        return self._source.num_held_chars + (0 if self._region is None else self._region.num_bytes)

    def _first_undecided(self) -> int | None:
        """The first token of which bytes may still come to a channel."""
        first = [self._source.first_position, first_position(self._speech.space)]
        if self._region is not None:
            first += [first_position(self._region.opening), first_position(self._region.body)]
        return min((position for position in first if position is not None), default=None)

    def _follow(self, steps: list[Step]) -> None:
        from logprobe.text.channels.regions import Text

        for step in steps:
            bits = self._source.cut(step.stop)
            if step.field == CALLS:
                self._follow_calls(step, bits)
            elif isinstance(step, Text) and step.field is not None:
                self._speech.say("reasoning" if step.field in REASONING else "content", bits)
            else:
                self._speech.mark(bits)

    def _follow_calls(self, step: Step, bits: list[Bit]) -> None:
        from logprobe.text.channels.regions import Close, Open

        if not self._has_tools:
            self._speech.say("content", bits)
        elif isinstance(step, Open):
            self._region = _Region(step.captures, bits, [])
        else:
            assert self._region is not None, "it was opened"
            if isinstance(step, Close):
                self._end_calls(self._region, bits)
            else:
                self._region.body += bits
                self._region.num_bytes += sum(len(bit.data) for bit in bits)

    def _end_calls(self, region: _Region, closing: list[Bit]) -> None:
        """Give out the calls of a region, or take it for content."""
        self._region = None
        stop = len(region.body)
        while stop and not closing and _is_empty(region.body[stop - 1]):  # the text ended in the call
            stop -= 1
        data = b"".join(bit.data for bit in region.body[:stop])
        found = read_calls(self._calls_field, data, region.captures, self._regions.typed)
        if not found:
            self._speech.say("content", [*region.opening, *region.body, *closing])
            return
        self._speech.mark(region.opening)
        own = slices(region.body, [(one.start, one.stop) for one in found])
        for one, bits in zip(found, own, strict=True):
            self._calls.append(_part("tool_call", bits, self._num_calls, one.call))
            self._num_calls += 1


def begun_reply(form: ResponseForm, prefix: str) -> str:
    """What a prompt has written of the reply: nothing where it cannot be seen where that begins."""
    ends = [match.end() for match in form.template.start_anchor_re.finditer(prefix)]
    return prefix[ends[-1] :] if ends else ""


def opens_reasoning(form: ResponseForm, prefix: str) -> bool:
    """Whether a prompt ends within a reasoning."""
    from logprobe.text.channels.regions import Regions

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
    """What is said in content and reasoning; white space waits until it is known whether a mark follows."""

    def __init__(self) -> None:
        self.space: list[Bit] = []  # at the end of what was said
        self._bits: dict[Channel, list[Bit]] = {}  # not given out yet
        self._channel: Channel = "content"  # that spoke last
        self._is_after_mark = False

    def say(self, channel: Channel, bits: Iterable[Bit]) -> None:
        """Add text to a channel; special tokens have none."""
        self._channel = channel
        for position, data, is_special in bits:
            text = data.lstrip() if self._is_after_mark else data
            if is_special or not text:
                continue
            self._is_after_mark = False
            words = text.rstrip()
            if words:
                self._give([*self.space, Bit(position, words)])
                self.space = []
            if len(words) < len(text):
                self.space.append(Bit(position, text[len(words) :]))

    def mark(self, bits: list[Bit]) -> None:
        """A mark, with the white space around it; where the text ends a region has none."""
        if bits:
            self.space = []
            self._is_after_mark = True

    def end(self) -> None:
        """The text has ended: no mark follows."""
        self._give(self.space)
        self.space = []

    def _give(self, bits: list[Bit]) -> None:
        self._bits.setdefault(self._channel, []).extend(bits)

    def release(self, limit: int | None) -> list[Part]:
        """What was said by tokens before a position, a part a channel; all of it where there is no limit."""
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
    """Whether two bits are of one token, or of one character."""
    return bit.position == following.position or following.data[0] & 0xC0 == 0x80
