"""Convert the prompts and conversations in request bodies to token ids and, for an echo, to texts.

The size of a text is checked before the text is tokenized. An unknown field in a message is rejected, unless
it has a value that the chat template may use.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from logprobe.server.http.errors import bad_request
from logprobe.server.limits import check_count, utf8_bytes
from logprobe.text.chat import ANSWER, EMPTY, PART_REPORTS, TEXT_PARTS, Layout, lay_out
from logprobe.text.reasoning import FIELDS, lay_out_reasoning

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from logprobe.records.values import IntArray
    from logprobe.server.openai.bodies import (
        ChatBody,
        CompletionBody,
        GenerationBody,
        LoglikelihoodBody,
        TokenizeBody,
    )
    from logprobe.server.service import Service
    from logprobe.text.chat import Conversation

LARGEST_ID = 2**31 - 1

MESSAGE_FIELDS: Final = frozenset(
    {"role", "content", "name", "tool_calls", "tool_call_id", "function_call", "refusal", "audio"}
    | {"annotations", "parsed", "phase"}
    # Fields in other servers' replies.
    | {"reasoning", "reasoning_content", "reasoning_details", "images", "provider_specific_fields"}
)
PART_FIELDS: Final = frozenset(
    {"type", "text", "parsed", "prompt_cache_breakpoint", "cache_control", *PART_REPORTS}
)
CALL_FIELDS: Final = frozenset({"id", "type", "index", "function"})
FUNCTION_FIELDS: Final = frozenset({"name", "arguments", "parsed_arguments"})

EFFORT: Final = "reasoning_effort"
THINKING: Final = "enable_thinking"
"""`EFFORT` and `THINKING` are the chat template variables that control reasoning."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids of a prompt, and for an echo the bytes of each token."""

    token_ids: IntArray
    parts: list[bytes] = field(default_factory=list)  # bytes of the text per token; empty without an echo


def read_prompts(body: CompletionBody, max_tokens: int, service: Service) -> list[Prompt]:
    """Read the prompts in a body: a text or a list of ids, or a list of texts or of lists of ids.

    `max_tokens` is the number of tokens to generate.

    Raises:
        ApiError: 400 if the prompt is empty, mixes texts and ids, or exceeds the limit on text.
        ParameterError: the tokenizer cannot encode a text.
    """
    prompt: str | Sequence[Any] = body.prompt
    text, is_echoed = service.text, bool(body.echo)
    add_special_tokens = body.add_special_tokens is not False
    bytes_of = text.vocabulary.bytes_of if body.skip_special_tokens is False else text.bytes_of
    kept, is_whole = kept_tokens(body, max_tokens, service), body.truncate_prompt_tokens is None

    def from_text(part: str) -> Prompt:
        if not is_echoed:
            return Prompt(text.encode(part, add_special_tokens=add_special_tokens)[kept])
        ids, spans = text.encode_with_spans(part, add_special_tokens=add_special_tokens)
        data = part.encode()
        # A part extends to where the next token begins; if tokens share a span, only the last one has bytes.
        bounds = [*spans[:, 0].tolist(), len(data)]
        return Prompt(ids[kept], [data[start:end] for start, end in pairwise(bounds)][kept])

    def from_ids(part: Sequence[Any]) -> Prompt:
        ids = as_ids(part, "prompt")[kept]
        return Prompt(ids, [bytes_of([token_id]) for token_id in ids.tolist()] if is_echoed else [])

    if isinstance(prompt, str):
        check_texts([prompt], "prompt", service, is_whole=is_whole)
        return [from_text(prompt)]
    if not prompt:
        raise bad_request("prompt", "is empty; give a text, token ids, or a list of either")
    if all(isinstance(part, int) for part in prompt):
        return [from_ids(prompt)]
    if all(isinstance(part, str) for part in prompt):
        check_texts(prompt, "prompt", service, is_whole=is_whole)
        return [from_text(part) for part in prompt]
    if all(isinstance(part, list) for part in prompt):
        return [from_ids(part) for part in prompt]
    raise bad_request("prompt", "mixes texts and token ids; give a list of one kind")


def check_one_of(body: Any, name: str) -> None:
    """Check that a body has either the field `name` or `messages`.

    Raises:
        ApiError: 400 if the body has neither or both.
    """
    if (getattr(body, name) is None) == (body.messages is None):
        raise bad_request(name, f"give either {name} or messages")


def as_ids(ids: Sequence[Any], name: str) -> IntArray:
    """Convert token ids to an int32 array; the engine checks them against the vocabulary.

    Raises:
        ApiError: 400 if an item is not an integer in [0, 2**31).
    """
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in ids):
        raise bad_request(name, "a list of token ids has an item that is not an integer")
    if not all(0 <= token_id <= LARGEST_ID for token_id in ids):
        raise bad_request(name, "a token id is outside the vocabulary")
    return np.array(ids, dtype=np.int32)


def check_texts(texts: Sequence[str], param: str, service: Service, *, is_whole: bool = True) -> None:
    """Check the total size of texts in bytes before they are tokenized.

    With `is_whole`, also reject a text that cannot fit into the model's context, because it has more bytes
    than a context full of the longest tokens.

    Raises:
        ApiError: 400 if a text is too long, or all texts together are.
    """
    sizes = list(map(utf8_bytes, texts))
    check_count(service.settings, "max_text_bytes", param, sum(sizes), "bytes of text")
    limit = service.capabilities.max_model_len
    if is_whole and max(sizes, default=0) > (limit + 1) * service.max_token_bytes:
        message = f"has a text of {max(sizes)} bytes, which exceeds the model's context of {limit} tokens"
        raise bad_request(param, message, code="context_length_exceeded")


def encode_messages(messages: Conversation, service: Service, layout: Layout = ANSWER) -> IntArray:
    """Convert a conversation to token ids, by default with the generation prompt.

    Raises:
        ApiError: 400 if a field is unknown, or the text exceeds the limit on text or the model's context.
        ParameterError: the chat template rejects the conversation, or would ignore a part of it.
    """
    return encode_laid_out(render_messages(messages, service, layout), service)


def encode_laid_out(text: str, service: Service, *, add_special_tokens: bool = False) -> IntArray:
    """Tokenize a rendered conversation."""
    return service.text.encode(text, add_special_tokens=add_special_tokens)


def render_messages(
    messages: Conversation,
    service: Service,
    layout: Layout = ANSWER,
    *,
    reasoning_field: str = "messages.reasoning_content",
    is_whole: bool = True,
) -> str:
    """Render a conversation with the model's chat template; raises the errors of `encode_messages`.

    If the template drops reasoning, for example from earlier turns, the reply's `Warning` header names
    `reasoning_field`. With `is_whole=False`, the text may be longer than the model's context.
    """
    check_fields(messages)
    text, has_reasoning = (
        lay_out_reasoning(messages, service.text, layout)
        if any(field in message for message in messages for field in FIELDS)
        else (lay_out(messages, service.text, layout), True)
    )
    if not has_reasoning:
        service.call.without_effect.append(reasoning_field)
    check_texts([text], "messages", service, is_whole=is_whole)
    return text


def kept_tokens(body: GenerationBody, max_tokens: int | None, service: Service) -> slice:
    """Return the slice of a prompt's tokens that `truncate_prompt_tokens` keeps at the end, by default all.

    -1 keeps as many as fit into the model's context before `max_tokens` new tokens (None counts as 1).

    Raises:
        ApiError: 400 if no token would be left.
    """
    count = body.truncate_prompt_tokens
    if count is None:
        return slice(None)
    if count == -1:
        room = service.capabilities.max_model_len + 1 - (1 if max_tokens is None else max_tokens)
        return slice(-max(room, 1), None)
    if count == 0:
        raise bad_request("truncate_prompt_tokens", "must be -1 or positive, got 0")
    return slice(-count, None)


def layout_of(
    body: ChatBody | LoglikelihoodBody | TokenizeBody,
    service: Service,
    functions: Sequence[Mapping[str, Any]] | None,
) -> Layout:
    """Return how to lay out a body's conversation: tools, template variables, and generation prompt."""
    template = service.request_template(body)
    if template is None and getattr(body, "chat_template", None) is not None:
        remedy = "leave it out, or start the server with --trust-request-chat-template"
        raise bad_request("chat_template", f"is not allowed by this server; {remedy}")
    return Layout(
        tools=functions,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        chat_template=template,
        chat_template_kwargs=template_variables(body, service.template_variables(body)),
    )


def variables_by_field(body: Any) -> dict[str, dict[str, Any]]:
    """Return the fields set in a body that control reasoning, each with the template variables it sets."""
    reasoning, kwargs = getattr(body, "reasoning", None), getattr(body, "chat_template_kwargs", None) or {}
    efforts = {
        "reasoning_effort": getattr(body, "reasoning_effort", None),
        "reasoning.effort": None if reasoning is None else reasoning.effort,
    }
    switches = {
        "chat_template_kwargs.enable_thinking": kwargs.get(THINKING),
        "enable_thinking": getattr(body, "enable_thinking", None),
    }
    fields: dict[str, dict[str, Any]] = {
        name: {EFFORT: effort} | ({THINKING: False} if effort == "none" else {})
        for name, effort in efforts.items()
        if effort is not None
    }
    return fields | {name: {THINKING: value} for name, value in switches.items() if value is not None}


def unread_fields(body: Any, known: AbstractSet[str]) -> list[str]:
    """Return the body's reasoning fields that set no variable in `known`, the template's variables."""
    return [name for name, variables in variables_by_field(body).items() if known.isdisjoint(variables)]


def template_variables(body: Any, known: AbstractSet[str]) -> dict[str, Any]:
    """Return the chat template variables that a body sets.

    Variables that control reasoning are included only if the template uses them, that is, if they are in
    `known`.

    Raises:
        ApiError: 400 if two fields set a variable to different values.
    """
    given = getattr(body, "chat_template_kwargs", None) or {}
    variables = {name: value for name, value in given.items() if name != THINKING}
    for name, values in variables_by_field(body).items():
        for variable in known & values.keys():
            if variables.setdefault(variable, values[variable]) != values[variable]:
                message = (
                    f"sets {variable}, but another field sets it to a different value; set only one of them"
                )
                raise bad_request(name, message)
    return variables


def check_fields(messages: Conversation) -> None:
    """Reject unknown fields in messages, text parts, tool calls and functions.

    An unknown field in a message is rejected here only if it is empty; otherwise it is passed to the chat
    template.

    Raises:
        ApiError: 400 that names the field.
    """
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        _check_known((name for name, value in message.items() if value in EMPTY), MESSAGE_FIELDS, path)
        for part in _objects(message.get("content")):
            if part.get("type") in TEXT_PARTS:
                _check_known(part, PART_FIELDS, f"{path}.content")
        for number, call in enumerate(_objects(message.get("tool_calls"))):
            _check_known(call, CALL_FIELDS, f"{path}.tool_calls[{number}]")
            for function in _objects([call.get("function")]):
                _check_known(function, FUNCTION_FIELDS, f"{path}.tool_calls[{number}].function")


def _objects(values: Any) -> list[dict[str, Any]]:
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []


def _check_known(names: Iterable[str], known: frozenset[str], path: str) -> None:
    for name in names:
        if name not in known:
            message = "is not a supported field; leave it out"
            raise bad_request(f"{path}.{name}", message, code="unknown_parameter")
