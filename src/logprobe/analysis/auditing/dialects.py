"""The forms in which servers take a request and give its rows: OpenAI's, vLLM's, SGLang's, llama.cpp's.

Before it: an `Ask`. After it: a `Reply` of rows, whose tokens are known by id, bytes or text, as they were
given. What is of no known shape is a `ServerError` that names the place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from logprobe.analysis.auditing.endpoint import Answered, printable
from logprobe.errors import ServerError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from logprobe.analysis.auditing.endpoint import Connection

Prompt: TypeAlias = "str | tuple[int, ...]"
ID_PREFIX: Final = "token_id:"


@dataclass(frozen=True, slots=True)
class Entry:
    """One token with its number, nats; None where that is null or infinite."""

    logprob: float | None
    token_id: int | None = None
    text: str | None = None
    data: bytes | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One position; `is_map`: the chosen token stands among the alternatives whether likely or not."""

    chosen: Entry | None
    alternatives: tuple[Entry, ...] | None = None
    is_map: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request: a prompt in a form, with what shapes its draw in OpenAI's words."""

    form: str
    prompt: Prompt | tuple[Mapping[str, str], ...]
    max_tokens: int = 0
    num_top: int = 5
    params: Mapping[str, Any] = field(default_factory=dict)
    stream: bool = False
    is_plain: bool = False  # without the fields that have the server return ids, which may change the reply

    @property
    def label(self) -> str:
        """What was asked, for people."""
        asked = [f"{name} {value}" for name, value in self.params.items() if name != "seed"]
        return ", ".join([self.form, *asked, *(["streamed"] if self.stream else [])])

    @property
    def ids(self) -> tuple[int, ...] | None:
        """The prompt, where it is given by ids."""
        if isinstance(self.prompt, str):
            return None
        ids = tuple(one for one in self.prompt if isinstance(one, int))
        return ids or None

    @property
    def messages(self) -> list[dict[str, str]]:
        """The prompt, where it is a conversation."""
        return [dict(one) for one in self.prompt if isinstance(one, Mapping)]

    @property
    def shown(self) -> str:
        """The prompt, shortened."""
        if isinstance(self.prompt, str):
            return printable(self.prompt, 60)
        if self.ids is not None:
            return f"{len(self.ids)} ids {printable(str(list(self.ids[:8])), 40)}"
        return printable(" / ".join(message["content"] for message in self.messages), 60)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What came back; None is 'not there'."""

    text: str = ""
    prompt: tuple[Row | None, ...] | None = None
    completion: tuple[Row, ...] | None = None
    prompt_ids: tuple[int, ...] | None = None
    completion_ids: tuple[int, ...] | None = None
    num_prompt_tokens: int | None = None
    num_completion_tokens: int | None = None
    texts: tuple[str, ...] = ()
    has_usage: bool = False


@dataclass(frozen=True, slots=True)
class Refusal:
    """A form or a field that the server does not take, in its words."""

    status: int
    words: str

    @property
    def is_failure(self) -> bool:
        """Whether the server failed, rather than refused."""
        return self.status >= 500

    def __str__(self) -> str:
        return f"{self.status}: {self.words}"


@dataclass(frozen=True, slots=True)
class Form:
    """A way to ask."""

    path: str
    body: Callable[[Ask, Mapping[str, Any]], dict[str, Any]]
    read: Callable[[Any, Ask], Reply]
    takes_model: bool = True


async def exchange(
    connection: Connection, ask: Ask, extras: Mapping[str, Any], model: str | None
) -> Reply | Refusal:
    """Send an ask with further fields of the body, and read its reply.

    Raises:
        ServerError: a reply that cannot be read, or none.
        ParameterError: the key is refused.
    """
    form = FORMS[ask.form]
    body = form.body(ask, extras) | ({"model": model} if form.takes_model and model is not None else {})
    if ask.stream:
        body["stream"] = True
    answered = await connection.post(form.path, body)
    return read(answered, ask, f"POST {connection.url}{form.path}")


def read(answered: Answered, ask: Ask, what: str) -> Reply | Refusal:
    """The rows of a reply."""
    if not answered.is_ok:
        return Refusal(answered.status, answered.words)
    value = answered.value
    try:
        if ask.stream:
            if not isinstance(value, list):
                return Refusal(answered.status, "no stream, but a whole reply")
            value = _merged(value)
        return FORMS[ask.form].read(value, ask)
    except ShapeError as error:
        raise ServerError(f"{what}: {error}") from error


class ShapeError(ValueError):
    """A reply has another shape than its form."""


# -- reading values ------------------------------------------------------------------------------------------


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ShapeError(f"{what} is {_kind(value)}, not an object")
    return value


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise ShapeError(f"{what} is {_kind(value)}, not a list")
    return value


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise ShapeError(f"{what} is {_kind(value)}, not a text")
    return value


def _number(value: Any, what: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ShapeError(f"{what} is {_kind(value)}, not a number")
    return float(value) if abs(value) < 1e300 and math.isfinite(value) else None


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _ids(value: Any, what: str) -> tuple[int, ...] | None:
    if value is None:
        return None
    ids = _list(value, what)
    if not all(isinstance(one, int) and not isinstance(one, bool) and 0 <= one < 1 << 31 for one in ids):
        raise ShapeError(f"{what} contains an invalid token id")
    return tuple(ids)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _entry(text: Any, logprob: Any, what: str, *, token_id: Any = None, data: Any = None) -> Entry:
    number = _number(logprob, f"the logprob of {what}")
    known = _count(token_id)
    if known is not None and known < 0:
        raise ShapeError(f"the id of {what} is {known}")
    shown = None if text is None else _text(text, f"the token of {what}")
    if known is None and shown is not None and shown.startswith(ID_PREFIX):
        digits = shown.removeprefix(ID_PREFIX)
        known = int(digits) if digits.isdecimal() and len(digits) < 10 else None
        shown = None if known is not None else shown
    own = None
    if data is not None:
        values = _list(data, f"the bytes of {what}")
        if not all(isinstance(one, int) and 0 <= one < 256 for one in values):
            raise ShapeError(f"the bytes of {what} are none")
        own = bytes(values)
    return Entry(number, known, shown, own)


# -- rows ----------------------------------------------------------------------------------------------------


def _chat_row(value: Any, index: int) -> Row:
    """One position of OpenAI's chat; llama.cpp and this library's server give ids, too."""
    row, what = _object(value, f"row {index}"), f"row {index}"
    chosen = _chat_entry(row, what)
    top = row.get("top_logprobs")
    if top is None:
        return Row(chosen)
    entries = [_chat_entry(_object(one, what), f"an alternative of {what}") for one in _list(top, what)]
    return Row(chosen, tuple(entries))


def _chat_entry(value: dict[str, Any], what: str) -> Entry:
    token_id = value.get("token_id", value.get("id"))
    return _entry(value.get("token"), value.get("logprob"), what, token_id=token_id, data=value.get("bytes"))


def _legacy_rows(value: dict[str, Any]) -> tuple[Row, ...]:
    """The parallel arrays of OpenAI's completions."""
    tokens = _list(value.get("tokens"), "logprobs.tokens")
    numbers = _list(value.get("token_logprobs"), "logprobs.token_logprobs")
    tops = value.get("top_logprobs")
    maps = [None] * len(tokens) if tops is None else _list(tops, "logprobs.top_logprobs")
    if not len(tokens) == len(numbers) == len(maps):
        sizes = f"{len(tokens)} tokens, {len(numbers)} numbers, {len(maps)} maps"
        raise ShapeError(f"the arrays of logprobs have different lengths: {sizes}")
    rows = []
    for index, (token, number, top) in enumerate(zip(tokens, numbers, maps, strict=True)):
        what = f"row {index}"
        entries = None
        if top is not None:
            pairs = _object(top, f"the alternatives of {what}").items()
            entries = tuple(_entry(text, logprob, f"an alternative of {what}") for text, logprob in pairs)
        rows.append(Row(_entry(token, number, what), entries, is_map=True))
    return tuple(rows)


def _prompt_rows(value: Any, ids: tuple[int, ...] | None) -> tuple[Row | None, ...] | None:
    """VLLM's map of ids for each token of a prompt, or this library's list of objects."""
    if value is None:
        return None
    rows: list[Row | None] = []
    listed = _list(value, "prompt_logprobs")
    for index, item in enumerate(listed):
        if item is None:
            rows.append(None)
            continue
        row = _object(item, f"prompt row {index}")
        if "logprob" in row:
            rows.append(_chat_row(row, index))
            continue
        entries = [
            _entry(
                _object(one, f"prompt row {index}").get("decoded_token"),
                one.get("logprob"),
                f"prompt row {index}",
                token_id=int(key) if key.isdecimal() and len(key) < 10 else None,
            )
            for key, one in row.items()
        ]
        own = ids[index] if ids is not None and len(ids) == len(listed) else None  # else the first
        chosen = next((entry for entry in entries if entry.token_id == own), None) or next(
            iter(entries), None
        )
        rows.append(Row(chosen, tuple(entries), is_map=True))
    return tuple(rows)


# -- OpenAI's routes -----------------------------------------------------------------------------------------


def _completion_body(ask: Ask, extras: Mapping[str, Any]) -> dict[str, Any]:
    prompt = ask.prompt if ask.ids is None else list(ask.ids)
    body = {"prompt": prompt, "max_tokens": ask.max_tokens, **extras, **ask.params}
    return body if ask.form == "prompt_logprobs" else {"logprobs": ask.num_top, **body}


def _echo_body(ask: Ask, extras: Mapping[str, Any]) -> dict[str, Any]:
    return _completion_body(ask, extras) | {"echo": True}


def _prompt_body(ask: Ask, extras: Mapping[str, Any]) -> dict[str, Any]:
    return _completion_body(ask, extras) | {"prompt_logprobs": ask.num_top}


def _chat_body(ask: Ask, extras: Mapping[str, Any]) -> dict[str, Any]:
    asked = {"messages": ask.messages, "max_tokens": ask.max_tokens}
    return asked | {"logprobs": True, "top_logprobs": ask.num_top} | dict(extras) | dict(ask.params)


def _chat_prompt_body(ask: Ask, extras: Mapping[str, Any]) -> dict[str, Any]:
    return _chat_body(ask, extras) | {"prompt_logprobs": ask.num_top}


def _read_completion(value: Any, ask: Ask) -> Reply:
    body, choices = _choices(value)
    choice = choices[0]
    prompt_ids = _ids(choice.get("prompt_token_ids", body.get("prompt_token_ids")), "prompt_token_ids")
    prompt = _prompt_rows(choice.get("prompt_logprobs", body.get("prompt_logprobs")), prompt_ids)
    reply = replace(_frame(body, choices, "text"), prompt_ids=prompt_ids, prompt=prompt)
    logprobs = choice.get("logprobs")
    if logprobs is None:
        return reply
    rows = _rows_of(_object(logprobs, "logprobs"))
    if ask.form != "echo" or rows is None:
        return replace(reply, completion=rows)
    num_generated = reply.num_completion_tokens
    # Some generate a token that nobody asked, count it, and give it no row (vLLM 0.32 beside ids).
    num_generated = ask.max_tokens if num_generated is None else min(num_generated, ask.max_tokens)
    stop = len(rows) - min(num_generated, len(rows))
    first: tuple[Row | None, ...] = rows[:stop]
    if first and first[0] is not None and first[0].chosen is not None and first[0].chosen.logprob is None:
        first = (None, *first[1:])
    return replace(reply, prompt=first, completion=rows[stop:])


def _rows_of(logprobs: dict[str, Any]) -> tuple[Row, ...] | None:
    content = logprobs.get("content")
    if content is not None:  # OpenAI's chat, and llama.cpp's completions
        return tuple(_chat_row(row, index) for index, row in enumerate(_list(content, "logprobs.content")))
    return None if logprobs.get("tokens") is None else _legacy_rows(logprobs)


def _read_chat(value: Any, ask: Ask) -> Reply:
    del ask
    body, choices = _choices(value)
    choice = choices[0]
    prompt_ids = _ids(body.get("prompt_token_ids", choice.get("prompt_token_ids")), "prompt_token_ids")
    prompt = _prompt_rows(body.get("prompt_logprobs", choice.get("prompt_logprobs")), prompt_ids)
    texts = [{**one, "text": _message_text(one)} for one in choices]
    reply = replace(_frame(body, texts, "text"), prompt_ids=prompt_ids, prompt=prompt)
    logprobs = choice.get("logprobs")
    return reply if logprobs is None else replace(reply, completion=_rows_of(_object(logprobs, "logprobs")))


def _message_text(choice: dict[str, Any]) -> str:
    message = _object(choice.get("message"), "message")
    content = message.get("content")
    return "" if content is None else _text(content, "content")


def _choices(value: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    body = _object(value, "the reply")
    choices = [_object(one, "a choice") for one in _list(body.get("choices"), "choices")]
    if not choices:
        raise ShapeError("the reply has no choice")
    return body, choices


def _frame(body: dict[str, Any], choices: Sequence[dict[str, Any]], name: str) -> Reply:
    usage = body.get("usage")
    usage = usage if isinstance(usage, dict) else {}
    texts = [one.get(name) for one in choices]
    return Reply(
        text=_text(texts[0] or "", name),
        texts=tuple(_text(text or "", name) for text in texts),
        completion_ids=_ids(choices[0].get("token_ids"), "token_ids"),
        num_prompt_tokens=_count(usage.get("prompt_tokens")),
        num_completion_tokens=_count(usage.get("completion_tokens")),
        has_usage=bool(usage),
    )


def _merged(events: list[Any]) -> dict[str, Any]:
    """The whole reply that the events of a stream come to, of their first choice."""
    whole: dict[str, Any] = {}
    choice: dict[str, Any] = {}
    for event in events:
        body = _object(event, "an event")
        for name in ("usage", "prompt_token_ids", "prompt_logprobs"):
            if body.get(name) is not None:
                whole[name] = body[name]
        for item in _list(body.get("choices", []), "choices"):
            _add_delta(choice, _object(item, "a choice"))
    return whole | {"choices": [choice] if choice else []}


def _add_delta(choice: dict[str, Any], item: dict[str, Any]) -> None:
    if item.get("index", 0) != 0:
        return
    for name in ("prompt_token_ids", "prompt_logprobs"):
        if item.get(name) is not None:
            choice[name] = item[name]
    if "delta" in item:
        delta = _object(item["delta"] or {}, "delta")
        message = choice.setdefault("message", {"content": ""})
        message["content"] += _text(delta.get("content") or "", "content")
    else:
        choice["text"] = choice.get("text", "") + _text(item.get("text") or "", "text")
    if item.get("token_ids") is not None:
        choice["token_ids"] = choice.get("token_ids", []) + _list(item["token_ids"], "token_ids")
    if item.get("logprobs") is not None:
        merged = choice["logprobs"] if choice.get("logprobs") else {}
        for name, values in _object(item["logprobs"], "logprobs").items():
            if isinstance(values, list):
                merged[name] = (merged.get(name) or []) + values
        choice["logprobs"] = merged


# -- SGLang's own and llama.cpp's own ------------------------------------------------------------------------

_SGLANG_WORDS: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "ignore_eos",
)


def _generate_body(ask: Ask, extras: Mapping[str, Any]) -> dict[str, Any]:
    del extras
    prompt = {"text": ask.prompt} if ask.ids is None else {"input_ids": list(ask.ids)}
    shape = {name: ask.params[name] for name in _SGLANG_WORDS if name in ask.params}
    return prompt | {
        "sampling_params": shape | {"max_new_tokens": ask.max_tokens},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": ask.num_top,
        "return_text_in_logprobs": True,
    }


def _read_generate(value: Any, ask: Ask) -> Reply:
    del ask
    body = _object(value[0] if isinstance(value, list) and value else value, "the reply")
    meta = _object(body.get("meta_info"), "meta_info")
    prompt = _sglang_rows(meta, "input")
    completion = _sglang_rows(meta, "output")
    ids = _ids(body.get("output_ids"), "output_ids")
    if ids is None and completion is not None:
        known = [row.chosen.token_id for row in completion if row.chosen is not None]
        ids = tuple(one for one in known if one is not None) if None not in known else None
    first: tuple[Row | None, ...] | None = prompt
    if prompt and prompt[0].chosen is not None and prompt[0].chosen.logprob is None:
        first = (None, *prompt[1:])
    known = [None if row.chosen is None else row.chosen.token_id for row in prompt or ()]
    return Reply(
        text=_text(body.get("text") or "", "text"),
        texts=(_text(body.get("text") or "", "text"),),
        prompt=first,
        completion=completion,
        prompt_ids=tuple(one for one in known if one is not None) if known and None not in known else None,
        completion_ids=ids,
        num_prompt_tokens=_count(meta.get("prompt_tokens")),
        num_completion_tokens=_count(meta.get("completion_tokens")),
    )


def _sglang_rows(meta: dict[str, Any], which: str) -> tuple[Row, ...] | None:
    rows = meta.get(f"{which}_token_logprobs")
    if rows is None:
        return None
    tops = meta.get(f"{which}_top_logprobs") or []
    found = []
    for index, item in enumerate(_list(rows, f"{which}_token_logprobs")):
        what = f"{which} row {index}"
        top = _list(tops, what)[index] if index < len(tops) else None
        entries = None if top is None else tuple(_triple(one, what) for one in _list(top, what))
        found.append(Row(_triple(item, what), entries))
    return tuple(found)


def _triple(value: Any, what: str) -> Entry:
    triple = [*_list(value, what), None, None, None]
    return _entry(triple[2], triple[0], what, token_id=triple[1])


_LLAMA_WORDS: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "ignore_eos",
)


def _llama_body(ask: Ask, extras: Mapping[str, Any]) -> dict[str, Any]:
    del extras
    prompt = ask.prompt if ask.ids is None else list(ask.ids)
    shape = {name: ask.params[name] for name in _LLAMA_WORDS if name in ask.params}
    bias = ask.params.get("logit_bias")
    if bias:
        shape["logit_bias"] = [[int(key), value] for key, value in bias.items()]
    asked = {"prompt": prompt, "n_predict": ask.max_tokens, "n_probs": ask.num_top, "return_tokens": True}
    return asked | shape


def _read_llama(value: Any, ask: Ask) -> Reply:
    del ask
    body = _object(value, "the reply")
    rows = body.get("completion_probabilities")
    completion = None
    if rows is not None:
        completion = tuple(_chat_row(row, index) for index, row in enumerate(_list(rows, "rows")))
    text = _text(body.get("content"), "content")
    return Reply(
        text=text,
        texts=(text,),
        completion=completion,
        completion_ids=_ids(body.get("tokens") or None, "tokens"),
        num_prompt_tokens=_count(body.get("tokens_evaluated")),
        num_completion_tokens=_count(body.get("tokens_predicted")),
    )


FORMS: Final[dict[str, Form]] = {
    "completions": Form("/v1/completions", _completion_body, _read_completion),
    "echo": Form("/v1/completions", _echo_body, _read_completion),
    "prompt_logprobs": Form("/v1/completions", _prompt_body, _read_completion),
    "chat": Form("/v1/chat/completions", _chat_body, _read_chat),
    "chat prompt_logprobs": Form("/v1/chat/completions", _chat_prompt_body, _read_chat),
    "generate": Form("/generate", _generate_body, _read_generate, takes_model=False),
    "completion": Form("/completion", _llama_body, _read_llama, takes_model=False),
}
"""Forms by the name that reports have for them."""
PROMPT_FORMS: Final = ("echo", "prompt_logprobs", "generate")
COMPLETION_FORMS: Final = ("completions", "generate", "completion")
CHAT_FORMS: Final = ("chat", "chat prompt_logprobs")
