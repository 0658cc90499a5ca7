"""What a reply says, as what it is: its content, its reasoning, its calls of tools, each by its own tokens.

Before it: pieces of completions. After it: the shapes of chat and responses, and their rows. A reply that is
not split is content from its first token to its last.
"""

from __future__ import annotations

import secrets
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from logprobe.errors import ParameterError, require
from logprobe.text.channels import Channels
from logprobe.text.channels.split import begun_reply

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from logprobe.engine.request import CompletionPiece
    from logprobe.server.service import Service
    from logprobe.text.channels import Part, ResponseForm, ToolCall

    Rows = list[tuple[int, bytes]]  # positions in the completion, each with what its token gave


MOST_BEGUN_CHARS: Final = 1 << 14
"""Of a prompt's end, in which it is looked for what the prompt has begun of its reply."""


CHARS_A_TOKEN: Final = 4  # at least, of text that takes as long to split as a token takes to write


def end_of(prompt: str) -> str:
    """The end of a prompt, which alone can have begun its reply."""
    return prompt[-MOST_BEGUN_CHARS:]


@dataclass(frozen=True, slots=True)
class Said:
    """Text of one channel, and the tokens that gave it."""

    channel: str  # content, reasoning or tool_call
    text: str
    rows: Sequence[int]  # positions in the completion
    parts: Mapping[int, bytes] = field(default_factory=dict)  # of those that gave it not all of their bytes
    call: ToolCall | None = None  # which comes whole
    call_id: str | None = None


class Splitter:
    """Says of the pieces of a reply's choices what they are; all of them go through it in order."""

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
        self._said: defaultdict[int, list[Said]] = defaultdict(list)
        self._num_calls = Counter[int]()

    @property
    def is_split(self) -> bool:
        """Whether a reply may be more than content."""
        return self._form is not None

    def take(self, piece: CompletionPiece) -> list[Said]:
        """What a piece says; nothing where its tokens gave no text, or their text is not certain yet."""
        if self._form is None:
            return self._whole(piece)
        said = self._split(piece, self._form)
        self._said[piece.index] += said
        self._num_calls[piece.index] += sum(one.call is not None for one in said)
        return said

    def num_calls(self, index: int) -> int:
        """Calls that a choice has made so far."""
        return self._num_calls[index]

    def num_entries(self, piece: CompletionPiece) -> int:
        """Return what a piece costs beside its own tokens, as tokens: what its choice has held back so far.

        The last piece of a choice has all that the choice has said gone through once more.
        """
        if self._form is None:
            return 0
        channels = self._channels.get(piece.index)
        num_chars = self._num_begun_chars if channels is None else channels.num_held_chars
        num_said = len(self._said[piece.index]) if piece.finish_reason is not None else 0
        return num_said + num_chars // CHARS_A_TOKEN

    @property
    def begun_entries(self) -> int:
        """What the prompt has begun of a reply costs each choice, as tokens."""
        return self._num_begun_chars // CHARS_A_TOKEN

    def all_of(self, index: int) -> Sequence[Said]:
        """What a choice has said so far, of a reply that is split."""
        return self._said[index]

    @staticmethod
    def _whole(piece: CompletionPiece) -> list[Said]:
        is_any = piece.text or piece.text_tokens
        return [Said("content", piece.text, piece.text_tokens)] if is_any else []

    def _split(self, piece: CompletionPiece, form: ResponseForm) -> list[Said]:
        channels = self._channels.get(piece.index)
        if channels is None:
            channels = Channels(form, self._prompt, self._text, self._functions)
            self._channels[piece.index] = channels
        ids, own_bytes = piece.completion.token_ids, self._text.vocabulary.token_bytes
        said = []
        for part, rows in in_order(channels.take(piece)):
            parts = {row: data for row, data in rows if data != own_bytes(ids[row])}
            text = part.text if len(rows) == len(part.rows) else _text(rows)
            call_id = None if part.call is None else f"call_{secrets.token_hex(12)}"
            said.append(Said(part.channel, text, [row for row, _ in rows], parts, part.call, call_id))
        return said


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
class Told:
    """All that a choice, or an increment of one, says, by channels."""

    content: Sequence[Said]
    reasoning: Sequence[Said]
    calls: Sequence[Said]

    @classmethod
    def of(cls, said: Sequence[Said]) -> Told:
        """The parts by their channels, each in its order."""
        content, reasoning, calls = (
            [one for one in said if one.channel == channel]
            for channel in ("content", "reasoning", "tool_call")
        )
        return cls(content, reasoning, calls)


def text_of(said: Sequence[Said]) -> str:
    """The text of parts, one after another."""
    return "".join(one.text for one in said)


def segments(said: Sequence[Said]) -> list[Sequence[Said]]:
    """What belongs together: parts of one channel that follow each other, and each call by itself."""
    runs = groupby(enumerate(said), lambda item: (item[1].channel, item[0] if item[1].call else None))
    return [[one for _, one in run] for _, run in runs]


def read_response_template(path: str | None) -> dict[str, Any] | None:
    """What a file says of how a model writes its replies, in transformers' format; None without a file.

    Raises:
        ParameterError: it cannot be read, or holds no JSON object.
    """
    if path is None:
        return None
    try:
        template = msgspec.json.decode(Path(path).read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ParameterError("response_template", f"{path} cannot be read as JSON: {reason}") from error
    require(isinstance(template, dict), "response_template", f"{path} holds no JSON object")
    read: dict[str, Any] = template
    return read
