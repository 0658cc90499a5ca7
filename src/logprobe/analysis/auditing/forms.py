"""Requests and replies of OpenAI's completions and chats, with vLLM's prompt rows and llama.cpp's token ids.

An `Ask` becomes a body, and the JSON of a reply a `Reply` of rows. JSON of another shape is a `ServerError`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import msgspec

from logprobe.errors import ServerError
from logprobe.transport.http_client import printable

if TYPE_CHECKING:
    from logprobe.analysis.auditing.endpoint import Answer, Connection

COMPLETIONS: Final = "/v1/completions"
CHATS: Final = "/v1/chat/completions"
FORMS: Final[dict[str, str]] = {
    "completions": COMPLETIONS,
    "echo": COMPLETIONS,
    "prompt_logprobs": COMPLETIONS,
    "chat": CHATS,
    "chat prompt_logprobs": CHATS,
}
"""Form of a request → route."""
PROMPT_FORMS: Final = ("echo", "prompt_logprobs")
CHAT_FORMS: Final = ("chat", "chat prompt_logprobs")
ID_PREFIX: Final = "token_id:"  # of vLLM's `return_tokens_as_token_ids`


@dataclass(frozen=True, slots=True)
class Entry:
    """A token with its logprob in nats; None where that is null or infinite."""

    logprob: float | None
    token_id: int | None = None
    text: str | None = None
    data: bytes | None = None

    @property
    def key(self) -> tuple[int | None, str | None, bytes | None]:
        """Identity of the token as the server reports it."""
        return self.token_id, self.text, self.data


@dataclass(frozen=True, slots=True)
class Row:
    """One position; `is_map`: the alternatives hold the chosen token, however unlikely it is."""

    chosen: Entry | None
    alternatives: tuple[Entry, ...] | None = None
    is_map: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request: a prompt in a form, and sampling parameters by OpenAI's names."""

    form: str
    prompt: str | tuple[int, ...] | tuple[Mapping[str, str], ...]
    max_tokens: int = 0
    num_top: int = 5
    params: Mapping[str, Any] = field(default_factory=dict)
    stream: bool = False
    is_plain: bool = False  # without the fields that request token ids, which may change the reply

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
        """True for a form whose reply has rows of the prompt."""
        return self.form in PROMPT_FORMS or self.form == "chat prompt_logprobs"

    @property
    def ids(self) -> tuple[int, ...] | None:
        """The prompt as token ids, or None."""
        return tuple(one for one in self.prompt if isinstance(one, int)) or None

    @property
    def messages(self) -> list[dict[str, str]]:
        """The messages of a conversation."""
        return [dict(message) for message in self.prompt if isinstance(message, Mapping)]

    @property
    def shown(self) -> str:
        """The prompt, shortened, for reports."""
        if isinstance(self.prompt, str):
            return printable(self.prompt, 60)
        if self.ids is not None:
            return f"{len(self.ids)} ids {printable(str(list(self.ids[:8])), 40)}"
        return printable(" / ".join(message["content"] for message in self.messages), 60)

    def body(self, extras: Mapping[str, Any]) -> dict[str, Any]:
        """Return the JSON body, with extra fields."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A reply; None means absent."""

    text: str = ""
    prompt: tuple[Row | None, ...] | None = None
    completion: tuple[Row, ...] | None = None
    prompt_ids: tuple[int, ...] | None = None
    completion_ids: tuple[int, ...] | None = None
    num_prompt_tokens: int | None = None
    num_completion_tokens: int | None = None
    num_choices: int = 1
    has_usage: bool = False


@dataclass(frozen=True, slots=True)
class Refusal:
    """A request that the server rejected, with its message."""

    status: int
    message: str

    @property
    def is_failure(self) -> bool:
        """True if the server failed (5xx) rather than refused."""
        return self.status >= 500

    def __str__(self) -> str:
        return f"{self.status}: {self.message}"


async def exchange(
    connection: Connection, ask: Ask, extras: Mapping[str, Any], model: str | None
) -> Reply | Refusal:
    """Send an ask with extra body fields, and parse the reply.

    Raises:
        ServerError: no reply, or one that cannot be read.
        ParameterError: the server refuses the key.
    """
    path = FORMS[ask.form]
    body = ask.body(extras) | ({} if model is None else {"model": model})
    return read(await connection.post(path, body), ask, f"POST {connection.url}{path}")


def read(answer: Answer, ask: Ask, what: str) -> Reply | Refusal:
    """Parse an answer into a reply or a refusal."""
    if not answer.is_ok:
        return Refusal(answer.status, answer.message)
    try:
        if not ask.stream:
            return _reply(msgspec.convert(answer.value, _Body), ask)
        if not isinstance(answer.value, list):
            return Refusal(answer.status, "a whole reply in place of a stream")
        return _reply(_merged(msgspec.convert(answer.value, list[_Body])), ask)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ServerError(f"{what}: the reply has another shape than OpenAI's: {error}") from error


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
        text = self.decoded_token if self.token is None else self.token
        entry = _text_entry(text, self.logprob)
        token_id = self.id if self.token_id is None else self.token_id
        data = None if self.bytes is None else bytes(self.bytes)
        return replace(entry, token_id=entry.token_id if token_id is None else token_id, data=data)

    def row(self) -> Row:
        top = self.top_logprobs
        return Row(self.entry(), None if top is None else tuple(token.entry() for token in top))


class _Logprobs(msgspec.Struct):
    content: list[_Token] | None = None  # of chats; llama.cpp's completions have it, too
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
                None if top is None else tuple(_text_entry(text, value) for text, value in top.items()),
                is_map=True,
            )
            for token, number, top in zip(self.tokens, numbers, maps, strict=True)
        )

    def extend(self, other: _Logprobs) -> None:
        for name in self.__struct_fields__:
            if (values := getattr(other, name)) is not None:
                mine = getattr(self, name)
                if mine is None:
                    setattr(self, name, [*values])
                else:
                    mine += values


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    index: int | None = None
    text: str | None = None
    message: _Message | None = None
    delta: _Message | None = None
    logprobs: _Logprobs | None = None
    token_ids: list[_Id] | None = None
    prompt_token_ids: list[_Id] | None = None
    prompt_logprobs: _PromptRows | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Body(msgspec.Struct):
    choices: list[_Choice] | None = None  # an event of a stream may have none
    usage: _Usage | None = None
    prompt_token_ids: list[_Id] | None = None
    prompt_logprobs: _PromptRows | None = None


def _text_entry(text: str | None, logprob: float | None) -> Entry:
    number = logprob if logprob is not None and math.isfinite(logprob) and abs(logprob) < 1e300 else None
    digits = text.removeprefix(ID_PREFIX) if text is not None and text.startswith(ID_PREFIX) else ""
    return (
        Entry(number, int(digits)) if digits.isdecimal() and len(digits) < 10 else Entry(number, None, text)
    )


def _reply(body: _Body, ask: Ask) -> Reply:
    if not body.choices:
        raise msgspec.ValidationError("the reply has no choice")
    choice = body.choices[0]
    if ask.is_chat and choice.message is None:
        raise msgspec.ValidationError("the choice has no message")
    ids = choice.prompt_token_ids if body.prompt_token_ids is None else body.prompt_token_ids
    listed = choice.prompt_logprobs if body.prompt_logprobs is None else body.prompt_logprobs
    usage = _Usage() if body.usage is None else body.usage
    rows = None if choice.logprobs is None else choice.logprobs.rows()
    reply = Reply(
        text=(choice.message.content if ask.is_chat and choice.message else choice.text) or "",
        prompt=None if listed is None else _prompt_rows(listed, ids),
        completion=rows,
        prompt_ids=None if ids is None else tuple(ids),
        completion_ids=None if choice.token_ids is None else tuple(choice.token_ids),
        num_prompt_tokens=usage.prompt_tokens,
        num_completion_tokens=usage.completion_tokens,
        num_choices=len(body.choices),
        has_usage=body.usage is not None,
    )
    return reply if ask.form != "echo" or rows is None else _split_echo(reply, rows, ask.max_tokens)


def _split_echo(reply: Reply, rows: tuple[Row, ...], max_tokens: int) -> Reply:
    """Move the rows of an echoed prompt to `prompt`; some servers count one token too many."""
    counted = reply.num_completion_tokens
    num_generated = max_tokens if counted is None else min(counted, max_tokens)
    stop = len(rows) - min(num_generated, len(rows))
    prompt: tuple[Row | None, ...] = rows[:stop]
    if prompt and prompt[0] is not None and prompt[0].chosen and prompt[0].chosen.logprob is None:
        prompt = (None, *prompt[1:])
    return replace(reply, prompt=prompt, completion=rows[stop:])


def _prompt_rows(listed: _PromptRows, ids: list[int] | None) -> tuple[Row | None, ...]:
    """Read vLLM's maps of ids, whose first is the prompt's token, or this library's list of objects."""
    rows: list[Row | None] = []
    for index, item in enumerate(listed):
        if item is None:
            rows.append(None)
        elif "logprob" in item:
            rows.append(msgspec.convert(item, _Token).row())
        else:
            tokens = msgspec.convert(item, dict[_Id, _Token], strict=False)
            entries = {key: replace(token.entry(), token_id=key) for key, token in tokens.items()}
            own = ids[index] if ids is not None and len(ids) == len(listed) else -1
            chosen = entries.get(own, next(iter(entries.values()), None))
            rows.append(Row(chosen, tuple(entries.values()), is_map=True))
    return tuple(rows)


def _merged(events: list[_Body]) -> _Body:
    """Return the whole reply that the events of a stream amount to, with its first choice alone."""
    choices: list[_Choice] = []
    whole = _Body(choices=choices)
    for event in events:
        for name in ("usage", "prompt_token_ids", "prompt_logprobs"):
            if (value := getattr(event, name)) is not None:
                setattr(whole, name, value)
        for part in event.choices or []:
            if not part.index:
                if not choices:
                    choices.append(_Choice(text="", message=_Message("")))
                _extend(choices[0], part)
    return whole


def _extend(choice: _Choice, part: _Choice) -> None:
    for name in ("prompt_token_ids", "prompt_logprobs"):
        if (value := getattr(part, name)) is not None:
            setattr(choice, name, value)
    assert choice.message is not None
    assert choice.text is not None
    choice.text += part.text or ""
    choice.message.content = (choice.message.content or "") + ((part.delta and part.delta.content) or "")
    if part.token_ids is not None:
        choice.token_ids = choice.token_ids or []
        choice.token_ids += part.token_ids
    if part.logprobs is not None:
        choice.logprobs = choice.logprobs or _Logprobs()
        choice.logprobs.extend(part.logprobs)
