"""Requests and replies of OpenAI's completions and chats, with vLLM's prompt rows and llama.cpp's token ids.

`Ask.body` makes the JSON of a request, and `read` parses the JSON of a reply into a `Reply` with rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import msgspec

from logprobe.analysis.auditing.endpoint import Refusal
from logprobe.analysis.auditing.report import Evidence
from logprobe.errors import ServerError
from logprobe.transport.http_client import printable

if TYPE_CHECKING:
    from logprobe.analysis.auditing.report import Where

FORMS: Final[dict[str, str]] = {
    "completions": "/v1/completions",
    "echo": "/v1/completions",
    "prompt_logprobs": "/v1/completions",
    "chat": "/v1/chat/completions",
    "chat prompt_logprobs": "/v1/chat/completions",
}
"""Route of each form of request."""
PROMPT_FORMS: Final = ("echo", "prompt_logprobs")
CHAT_FORMS: Final = ("chat", "chat prompt_logprobs")
MAX_EVENTS: Final = 1 << 14
ID_PREFIX: Final = "token_id:"  # written before ids with vLLM's `return_tokens_as_token_ids`


@dataclass(frozen=True, slots=True)
class Entry:
    """A token with its logprob in nats, which is None if the server reports null or an infinite value."""

    logprob: float | None
    token_id: int | None = None
    text: str | None = None
    data: bytes | None = None

    @property
    def key(self) -> tuple[int | None, str | None, bytes | None]:
        """The token as the server reports it, for comparisons between replies."""
        return self.token_id, self.text, self.data


@dataclass(frozen=True, slots=True)
class Row:
    """The tokens that a server reports at one position."""

    chosen: Entry | None
    alternatives: tuple[Entry, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request: a form from `FORMS`, a prompt, and sampling parameters under OpenAI's names."""

    form: str
    prompt: str | tuple[int, ...] | tuple[Mapping[str, str], ...]
    max_tokens: int = 0
    num_top: int = 5
    params: Mapping[str, Any] = field(default_factory=dict)
    stream: bool = False

    @property
    def label(self) -> str:
        """Form and parameters, for reports."""
        params = [f"{name} {value}" for name, value in self.params.items() if name != "seed"]
        return ", ".join([self.form, *params, *(["streamed"] if self.stream else [])])

    @property
    def is_chat(self) -> bool:
        """True for a conversation."""
        return self.form in CHAT_FORMS

    @property
    def wants_prompt(self) -> bool:
        """True if the reply to a request of this form has log-probabilities of the prompt's tokens."""
        return self.form in PROMPT_FORMS or self.form == "chat prompt_logprobs"

    @property
    def ids(self) -> tuple[int, ...] | None:
        """The prompt's token ids, or None if the prompt is not given as ids."""
        return tuple(one for one in self.prompt if isinstance(one, int)) or None

    @property
    def messages(self) -> list[dict[str, str]]:
        """The messages of a conversation."""
        return [dict(message) for message in self.prompt if isinstance(message, Mapping)]

    @property
    def shown(self) -> str:
        """The prompt, shortened for reports."""
        if isinstance(self.prompt, str):
            return printable(self.prompt, 60)
        if self.ids is not None:
            return f"{len(self.ids)} ids {printable(str(list(self.ids[:8])), 40)}"
        return printable(" / ".join(message["content"] for message in self.messages), 60)

    def as_chat(self) -> Ask:
        """Return this request with its text as a user message if the form is a chat, otherwise unchanged."""
        return (
            replace(self, prompt=({"role": "user", "content": str(self.prompt)},)) if self.is_chat else self
        )

    @property
    def where(self) -> Where:
        """The rows in the reply that are compared: those of the prompt or of the completion."""
        return "prompt" if self.wants_prompt else "completion"

    def evidence(self, position: int | None = None, *, where: Where | None = None, **values: Any) -> Evidence:
        """Return evidence from a reply to this request."""
        where = where or self.where
        return Evidence(ask=self.label, prompt=self.shown, position=position, where=where, **values)

    def body(self, extras: Mapping[str, Any]) -> dict[str, Any]:
        """Return the JSON body of the request, with `extras` as further fields."""
        body: dict[str, Any] = {"max_tokens": self.max_tokens}
        if self.is_chat:
            body |= {"messages": self.messages, "logprobs": True, "top_logprobs": self.num_top}
        else:
            body["prompt"] = self.prompt if self.ids is None else list(self.ids)
            if self.form != "prompt_logprobs":
                body["logprobs"] = self.num_top
        body |= {**extras, **self.params}
        if self.form == "echo":
            body["echo"] = True
        elif self.wants_prompt:
            body["prompt_logprobs"] = self.num_top
        return body | ({"stream": True} if self.stream else {})


@dataclass(slots=True, kw_only=True)
class Reply:
    """A parsed reply; a field is None if the server did not send it."""

    text: str = ""
    prompt: tuple[Row | None, ...] | None = None
    completion: tuple[Row, ...] | None = None
    prompt_ids: tuple[int, ...] | None = None
    completion_ids: tuple[int, ...] | None = None
    num_completion_tokens: int | None = None
    num_choices: int = 0
    has_usage: bool = False


def read(value: Any, ask: Ask, what: str) -> Reply | Refusal:
    """Parse the JSON of a reply; `what` names the request in errors.

    Raises:
        ServerError: the JSON does not match OpenAI's schema, has no choices, or has too many events.
    """
    if isinstance(value, Refusal):
        return value
    if ask.stream and not isinstance(value, list):
        return Refusal(200, "a whole reply in place of a stream")
    if ask.stream and len(value) > MAX_EVENTS:
        raise ServerError(f"{what}: the stream has {len(value)} events, more than {MAX_EVENTS}")
    reply = Reply()
    try:
        for body in msgspec.convert(value if ask.stream else [value], list[_Body]):
            body.add_to(reply, ask)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ServerError(f"{what}: the reply does not have OpenAI's format: {error}") from error
    if not reply.num_choices:
        raise ServerError(f"{what}: the reply has no choices; does the server implement OpenAI's API?")
    if ask.form == "echo":
        _split_echo(reply, ask.max_tokens)
    return reply


def _split_echo(reply: Reply, max_tokens: int) -> None:
    """Move the rows of an echoed prompt from `completion` to `prompt`.

    At most `max_tokens` rows stay in `completion`, because some servers report one generated token too many.
    """
    if reply.completion is None:
        return
    rows, counted = reply.completion, reply.num_completion_tokens
    stop = max(len(rows) - (max_tokens if counted is None else min(counted, max_tokens)), 0)
    has_first = stop > 0 and rows[0].chosen is not None and rows[0].chosen.logprob is not None
    reply.prompt = rows[:stop] if has_first or not stop else (None, *rows[1:stop])
    reply.completion = rows[stop:]


# -- the JSON ------------------------------------------------------------------------------------------------

_Id: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Byte: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=255)]
_PromptRows: TypeAlias = list[dict[str, Any] | None]


class _Token(msgspec.Struct):
    logprob: float | None = None
    token: str | None = None
    decoded_token: str | None = None  # vLLM's prompt rows
    bytes: list[_Byte] | None = None
    token_id: _Id | None = None
    id: _Id | None = None  # llama.cpp
    top_logprobs: list[_Token] | None = None

    def entry(self) -> Entry:
        entry = _text_entry(self.decoded_token if self.token is None else self.token, self.logprob)
        token_id = self.id if self.token_id is None else self.token_id
        data = None if self.bytes is None else bytes(self.bytes)
        return replace(entry, token_id=entry.token_id if token_id is None else token_id, data=data)

    def row(self) -> Row:
        top = self.top_logprobs
        return Row(self.entry(), None if top is None else tuple(token.entry() for token in top))


class _Logprobs(msgspec.Struct):
    content: list[_Token] | None = None  # in chats, and in llama.cpp's completions
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None
    top_logprobs: list[dict[str, float | None] | None] | None = None

    def rows(self) -> tuple[Row, ...] | None:
        if self.content is not None:
            return tuple(token.row() for token in self.content)
        if self.tokens is None:
            return None
        maps = [None] * len(self.tokens) if self.top_logprobs is None else self.top_logprobs
        numbers = self.token_logprobs or []
        if not len(self.tokens) == len(numbers) == len(maps):
            sizes = f"{len(self.tokens)} tokens, {len(numbers)} numbers, {len(maps)} maps"
            raise msgspec.ValidationError(f"the arrays of logprobs have different lengths: {sizes}")
        return tuple(
            Row(
                _text_entry(token, number),
                None if top is None else tuple(map(_text_entry, top, top.values())),
            )
            for token, number, top in zip(self.tokens, numbers, maps, strict=True)
        )


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    index: int | None = None
    text: str | None = None
    message: _Message | None = None
    delta: _Message | None = None  # in streams
    logprobs: _Logprobs | None = None
    token_ids: list[_Id] | None = None
    prompt_token_ids: list[_Id] | None = None
    prompt_logprobs: _PromptRows | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int | None = None


class _Body(msgspec.Struct):
    choices: list[_Choice] | None = None  # absent from some events in a stream
    usage: _Usage | None = None
    prompt_token_ids: list[_Id] | None = None
    prompt_logprobs: _PromptRows | None = None

    def add_to(self, reply: Reply, ask: Ask) -> None:
        """Add the first choice of a whole reply, or of one event in a stream, to `reply`."""
        choices = self.choices or []
        choice = next((one for one in choices if not one.index), _Choice())
        message = choice.delta if ask.stream else choice.message
        if ask.is_chat and choices and message is None and not ask.stream:
            raise msgspec.ValidationError("the choice has no message")
        reply.text += (message and message.content if ask.is_chat else choice.text) or ""
        rows = None if choice.logprobs is None else choice.logprobs.rows()
        if rows is not None:
            reply.completion = (reply.completion or ()) + rows
        if choice.token_ids is not None:
            reply.completion_ids = (*(reply.completion_ids or ()), *choice.token_ids)
        ids = choice.prompt_token_ids if self.prompt_token_ids is None else self.prompt_token_ids
        if ids is not None:
            reply.prompt_ids = tuple(ids)
        listed = choice.prompt_logprobs if self.prompt_logprobs is None else self.prompt_logprobs
        if listed is not None:
            reply.prompt = tuple(_prompt_row(item) for item in listed)
        if self.usage is not None:
            reply.has_usage = True
            reply.num_completion_tokens = self.usage.completion_tokens
        reply.num_choices = max(reply.num_choices, len(choices))


def _text_entry(text: str | None, logprob: float | None) -> Entry:
    number = logprob if logprob is not None and math.isfinite(logprob) and abs(logprob) < 1e300 else None
    digits = text.removeprefix(ID_PREFIX) if text is not None and text.startswith(ID_PREFIX) else ""
    is_id = digits.isdecimal() and len(digits) < 10
    return Entry(number, int(digits)) if is_id else Entry(number, None, text)


def _prompt_row(item: dict[str, Any] | None) -> Row | None:
    """Convert a prompt row: vLLM's map by token id, or this library's object.

    The first key in each of vLLM's maps is the prompt's token.
    """
    if item is None:
        return None
    if "logprob" in item:
        return msgspec.convert(item, _Token).row()
    tokens = msgspec.convert(item, dict[_Id, _Token], strict=False)
    entries = tuple(replace(token.entry(), token_id=key) for key, token in tokens.items())
    return Row(entries[0] if entries else None, entries)
