"""Prompts and conversations as clients write them → token ids, and the text that an echo repeats.

Texts are refused by their bytes before they are tokenised, and fields of messages that no client of OpenAI's
has where the chat template is not asked of them.
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
    from logprobe.server.openai.bodies import ChatBody, ScoreBody, TokenizeBody
    from logprobe.server.service import Service
    from logprobe.text.chat import Conversation

LARGEST_ID = 2**31 - 1

MESSAGE_FIELDS: Final = frozenset(
    {"role", "content", "name", "tool_calls", "tool_call_id", "function_call", "refusal", "audio"}
    | {"annotations", "parsed", "phase"}
    # What other servers' replies have.
    | {"reasoning", "reasoning_content", "reasoning_details", "images", "provider_specific_fields"}
)
PART_FIELDS: Final = frozenset(
    {"type", "text", "parsed", "prompt_cache_breakpoint", "cache_control", *PART_REPORTS}
)
CALL_FIELDS: Final = frozenset({"id", "type", "index", "function"})
FUNCTION_FIELDS: Final = frozenset({"name", "arguments", "parsed_arguments"})

EFFORT: Final = "reasoning_effort"
THINKING: Final = "enable_thinking"
"""Variables by which templates know how to reason."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Ids, and for an echo what each of them gives of the text."""

    token_ids: IntArray
    parts: list[bytes] = field(default_factory=list)  # a token, for an echo alone; together the text


def read_prompts(
    prompt: str | Sequence[Any], service: Service, *, is_echoed: bool, add_special_tokens: bool = True
) -> list[Prompt]:
    """The prompts of a body: one as text or ids, or a list of either.

    Raises:
        ApiError: empty, of mixed kinds, or more text than a request may have.
        ParameterError: a text that the tokenizer cannot hold.
    """
    text = service.text

    def from_text(part: str) -> Prompt:
        if not is_echoed:
            return Prompt(text.encode(part, add_special_tokens=add_special_tokens))
        ids, spans = text.encode_with_spans(part, add_special_tokens=add_special_tokens)
        data = part.encode()
        # To the next token's begin: of those that share a span, all begin with it and the last one has it.
        bounds = [*spans[:, 0].tolist(), len(data)]
        return Prompt(ids, [data[start:end] for start, end in pairwise(bounds)])

    def from_ids(part: Sequence[Any]) -> Prompt:
        ids = as_ids(part, "prompt")
        return Prompt(ids, [text.bytes_of([token_id]) for token_id in part] if is_echoed else [])

    if isinstance(prompt, str):
        check_texts([prompt], "prompt", service)
        return [from_text(prompt)]
    if not prompt:
        raise bad_request("prompt", "is empty; give a text, token ids, or a list of either")
    if all(isinstance(part, int) for part in prompt):
        return [from_ids(prompt)]
    if all(isinstance(part, str) for part in prompt):
        check_texts(prompt, "prompt", service)
        return [from_text(part) for part in prompt]
    if all(isinstance(part, list) for part in prompt):
        return [from_ids(part) for part in prompt]
    raise bad_request("prompt", "mixes texts and token ids; give a list of one kind")


def check_one_of(body: Any, name: str) -> None:
    """Require a text or ids in the field of this name, or else a conversation in `messages`.

    Raises:
        ApiError: 400, neither or both are given.
    """
    if (getattr(body, name) is None) == (body.messages is None):
        raise bad_request(name, f"give either {name} or messages")


def as_ids(ids: Sequence[Any], name: str) -> IntArray:
    """Token ids as an array; whether the model has them is the engine's to say.

    Raises:
        ApiError: something else is among them, or a number that no vocabulary has.
    """
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in ids):
        raise bad_request(name, "a list of token ids holds something else")
    if not all(0 <= token_id <= LARGEST_ID for token_id in ids):
        raise bad_request(name, "a token id lies outside the vocabulary")
    return np.array(ids, dtype=np.int32)


def check_texts(texts: Sequence[str], param: str, service: Service, *, is_whole: bool = True) -> None:
    """Refuse texts by their bytes, before they are tokenised: all of them, and any that cannot fit.

    With `is_whole` each is to fit into the model's context; no token is longer than the longest.

    Raises:
        ApiError: 400.
    """
    sizes = list(map(utf8_bytes, texts))
    check_count(service.settings, "max_text_bytes", param, sum(sizes), "bytes of text")
    limit = service.capabilities.max_model_len
    if is_whole and max(sizes, default=0) > (limit + 1) * service.max_token_bytes:
        message = f"holds a text of {max(sizes)} bytes, which are more than the model's {limit} tokens"
        raise bad_request(param, message, code="context_length_exceeded")


def encode_messages(messages: Conversation, service: Service, layout: Layout = ANSWER) -> IntArray:
    """A conversation as ids, by default ready for the assistant's turn.

    Raises:
        ApiError: more text than a request may have, or than the model can take.
        ParameterError: what the model's chat template refuses or passes over.
    """
    return encode_laid_out(render_messages(messages, service, layout), service)


def encode_laid_out(text: str, service: Service, *, add_special_tokens: bool = False) -> IntArray:
    """The ids of a conversation that is laid out."""
    return service.text.encode(text, add_special_tokens=add_special_tokens)


def render_messages(
    messages: Conversation,
    service: Service,
    layout: Layout = ANSWER,
    *,
    reasoning_field: str = "messages.reasoning_content",
) -> str:
    """A conversation as the model's chat template writes it; raises as `encode_messages` does.

    Where the template leaves reasoning out, that of earlier turns or all of it, the reply names the field.
    """
    check_fields(messages)
    text, is_whole = (
        lay_out_reasoning(messages, service.text, layout)
        if any(field in message for message in messages for field in FIELDS)
        else (lay_out(messages, service.text, layout), True)
    )
    if not is_whole:
        service.call.without_effect.append(reasoning_field)
    check_texts([text], "messages", service)
    return text


def layout_of(
    body: ChatBody | ScoreBody | TokenizeBody, service: Service, functions: Sequence[Mapping[str, Any]] | None
) -> Layout:
    """How a body's conversation is to be laid out, with these tools."""
    return Layout(
        tools=functions,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        chat_template_kwargs=template_variables(body, service.template_variables()),
    )


def variables_by_field(body: Any) -> dict[str, dict[str, Any]]:
    """The fields of a body that say how to reason, each with the variables that say the same."""
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
    """Those that say nothing to a template that reads these variables."""
    return [name for name, variables in variables_by_field(body).items() if known.isdisjoint(variables)]


def template_variables(body: Any, known: AbstractSet[str]) -> dict[str, Any]:
    """The variables that a body gives a template, of those about reasoning the ones that it knows.

    Raises:
        ApiError: 400, two fields say different things.
    """
    given = getattr(body, "chat_template_kwargs", None) or {}
    variables = {name: value for name, value in given.items() if name != THINKING}
    for name, values in variables_by_field(body).items():
        for variable in known & values.keys():
            if variables.setdefault(variable, values[variable]) != values[variable]:
                message = f"and another field give {variable} different values; give one of them"
                raise bad_request(name, message)
    return variables


def check_fields(messages: Conversation) -> None:
    """Refuse fields of no known name that say nothing; those that say something are the template's to take.

    Raises:
        ApiError: 400 naming the field.
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
            message = "is no field that is read here; leave it out"
            raise bad_request(f"{path}.{name}", message, code="unknown_parameter")
