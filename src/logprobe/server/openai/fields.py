"""Convert body fields to `SamplingParams`; unsupported values are rejected, never silently dropped."""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from logprobe.errors import ConflictingParametersError, ParameterError, shortened
from logprobe.ignored_kwargs import NEUTRAL_FIELDS
from logprobe.records.rows import KERNEL_EXTRAS
from logprobe.sampling import SamplingParams
from logprobe.server.http.errors import ApiError, as_api_error, bad_request
from logprobe.server.openai.bodies import GUIDED, ResponsesBody
from logprobe.server.openai.ignored_fields import has_effect

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from logprobe.server.openai.bodies import (
        ChatBody,
        CompletionBody,
        GenerationBody,
        RoutedExperts,
        UncertaintyBody,
    )
    from logprobe.server.settings import ServerSettings

ENGINE_FIELDS: Final = frozenset(field.name for field in fields(SamplingParams))
SAMPLING_FIELDS: Final = (
    "n",
    "best_of",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "include_stop_str_in_output",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "logits_processors_args",
    "lora",
    "response_format",
    "logprobs_mode",
    "logprob_token_ids",
    "prompt_logprobs",
    "entropy",
    "varentropy",
    "margin",
    "explain",
    "digest",
    "return_routed_experts",
)
"""Body fields that have the same name and meaning as in `SamplingParams`."""

PLAIN_TEXT: Final = NEUTRAL_FIELDS["response_format"].accepted or ()  # formats without a constraint

MAX_BIAS: Final = 100

LOGPROBS: Final = "message.output_text.logprobs"
INCLUDED: Final = (LOGPROBS, "reasoning.encrypted_content")

LOGPROBS_FIELDS: Final = (
    "chat/completions top_logprobs",
    "completions logprobs",
    "responses top_logprobs",
    "prompt_logprobs",
)
"""Routes and fields that request alternatives; `max_logprobs` limits each of these fields."""

REPORTS: Final = (*KERNEL_EXTRAS, "explain", "digest", "logprob_token_ids", "logprobs_mode")
"""Extensions that require logprobs."""

# Keys of vLLM's `structured_outputs`, which are converted to a `response_format`.
FORMS: Final = ("json", "json_object", "regex", "choice", "grammar")
STRUCTURED: Final = "structured_outputs."


def chat_params(
    body: ChatBody, settings: ServerSettings, calls: dict[str, Any] | None, *, room: int
) -> SamplingParams:
    """Convert a chat body to sampling parameters.

    Args:
        body: body of the request.
        settings: settings of the server.
        calls: response format that enforces tool calls, if the request requires them.
        room: number of tokens that fit after the prompt, which is the default of `max_tokens`.

    Raises:
        ApiError: 400 if a field is invalid, unsupported, or conflicts with another field.
    """
    if body.top_logprobs is not None and not body.logprobs and has_effect(body, "top_logprobs"):
        raise bad_request("top_logprobs", "is allowed only if logprobs is true; set logprobs as well")
    check_max_logprobs("top_logprobs", body.top_logprobs, settings)
    is_twice = body.max_tokens is not None and body.max_completion_tokens is not None
    if is_twice and body.max_tokens != body.max_completion_tokens:
        raise bad_request("max_tokens", "differs from max_completion_tokens; set only one of them")
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    max_tokens = max(room, 1) if limit is None else limit
    fixed: dict[str, Any] = {"logprobs": logprobs, "max_tokens": max_tokens}
    form = _with_calls(structured_format(body), _form_fields(body), calls)
    return _params(body, settings, {"logprobs": "top_logprobs"}, **fixed | form)


def responses_params(
    body: ResponsesBody, settings: ServerSettings, calls: dict[str, Any] | None, *, room: int
) -> SamplingParams:
    """Convert a responses body to sampling parameters; see `chat_params`."""
    unknown = [name for name in body.include or () if name not in INCLUDED]
    if unknown:
        known = " and ".join(map(repr, INCLUDED))
        raise bad_request("include", f"{shortened(unknown[0])!r} is not supported; use {known}")
    check_max_logprobs("top_logprobs", body.top_logprobs, settings)
    has_logprobs = LOGPROBS in (body.include or ())
    if body.top_logprobs and not has_logprobs:
        raise bad_request("top_logprobs", f"is allowed only if include contains {LOGPROBS!r}")
    if body.prompt is not None:
        raise bad_request(
            "prompt", "stored prompts are not supported; send input", code="unsupported_parameter"
        )
    max_tokens = body.max_output_tokens or max(room, 1)
    logprobs = (body.top_logprobs or 0) if has_logprobs else None
    names = {"logprobs": "top_logprobs", "max_tokens": "max_output_tokens"}
    form = _response_format(body.text)
    given = _with_calls(form, [] if form is None else ["text"], calls)
    return _params(body, settings, names, logprobs=logprobs, max_tokens=max_tokens, **given)


def _response_format(text: dict[str, Any] | None) -> dict[str, Any] | None:
    form = (text or {}).get("format")
    unknown = (text or {}).keys() - {"format", "verbosity"}
    if unknown or (text or {}).get("verbosity") not in {None, "medium"}:
        what = "supports only format and a verbosity of medium; leave the other fields out"
        raise bad_request("text", what, code="unsupported_parameter")
    if form is None or form in PLAIN_TEXT:
        return None
    if not isinstance(form, dict):
        raise bad_request("text.format", "must be an object with a type")
    if form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {k: v for k, v in form.items() if k != "type"}}


def completion_params(body: CompletionBody, settings: ServerSettings) -> SamplingParams:
    """Convert a completions body to sampling parameters; with `echo`, `logprobs` covers the prompt too."""
    check_max_logprobs("logprobs", body.logprobs, settings)
    fixed: dict[str, Any] = {"logprobs": body.logprobs}
    fixed["max_tokens"] = 16 if body.max_tokens is None else body.max_tokens
    if body.echo and body.logprobs is not None:
        if body.prompt_logprobs not in {None, body.logprobs}:
            raise bad_request(
                "prompt_logprobs", "differs from logprobs; with echo, leave prompt_logprobs out"
            )
        fixed["prompt_logprobs"] = body.logprobs
    if fixed["max_tokens"] == 0 and not body.echo and body.prompt_logprobs is None:
        raise bad_request("max_tokens", "0 is allowed only if echo is true or prompt_logprobs is set")
    if body.best_of is not None and body.stream and body.best_of > (body.n or 1):
        raise bad_request(
            "best_of", "cannot be streamed: the best are known only at the end; set best_of = n"
        )
    return _params(body, settings, {}, **fixed | _structured(body))


def uncertainty_params(body: UncertaintyBody) -> SamplingParams:
    """Convert an uncertainty body to the sampling parameters of its answers.

    Raises:
        ParameterError: a value is invalid.
    """
    names = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "lora")
    given = {name: getattr(body, name) for name in names if getattr(body, name) is not None}
    return SamplingParams(**given)


def _form_fields(body: ChatBody) -> list[str]:
    """Return the names of the fields in a chat body that set the format of the reply."""
    is_given = body.response_format is not None and body.response_format not in PLAIN_TEXT
    return [name for name, _ in _forms_of(body)] + ["response_format"] * is_given


def _with_calls(
    form: dict[str, Any] | None, given_by: list[str], calls: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the `response_format` parameter: the body's (`form`), or the one for required tool calls.

    A body that asks for both is rejected; `given_by` names the fields that set the body's format.
    """
    if calls is None:
        return {} if form is None else {"response_format": form}
    if given_by:
        message = f"requires a format of the reply, but {given_by[0]} also sets it; set only one of the two"
        raise bad_request("tool_choice", message)
    return {"response_format": calls}


def _structured(body: GenerationBody) -> dict[str, Any]:
    form = structured_format(body)
    return {} if form is None else {"response_format": form}


def _check_bias(bias: dict[str, float] | None) -> None:
    """Check `logit_bias` against OpenAI's bound, which the logits processor itself does not have."""
    beyond = [value for value in (bias or {}).values() if not abs(value) <= MAX_BIAS]
    if beyond:
        remedy = "for larger values, use logits_processors_args of LogitBiasLogitsProcessor"
        raise bad_request("logit_bias", f"must be in [-{MAX_BIAS}, {MAX_BIAS}], got {beyond[0]}; {remedy}")


def check_max_logprobs(name: str, value: int | None, settings: ServerSettings) -> None:
    """Reject a number of alternatives that is negative or above `max_logprobs`."""
    max_logprobs = settings.max_logprobs
    if value is None or max_logprobs == -1:
        return
    if not 0 <= value <= max_logprobs:
        raise bad_request(name, f"must be in [0, {max_logprobs}] (max_logprobs), got {value}")


def check_neutral(body: Any) -> None:
    """Reject an unsupported field, unless its value would have no effect anyway."""
    for name, keyword in NEUTRAL_FIELDS.items():
        value = getattr(body, name, None)
        if value is None or keyword.accepts(value) or name in ENGINE_FIELDS:
            continue
        raise bad_request(name, "is not supported by this server; leave it out", code="unsupported_parameter")


def _params(
    body: GenerationBody | ResponsesBody, settings: ServerSettings, names: dict[str, str], **fixed: Any
) -> SamplingParams:
    check_neutral(body)
    _check_bias(body.logit_bias)
    prompt_logprobs = getattr(body, "prompt_logprobs", None)
    check_max_logprobs("prompt_logprobs", prompt_logprobs, settings)
    requested = {name: getattr(body, name, None) for name in SAMPLING_FIELDS}
    if requested["response_format"] in PLAIN_TEXT:
        requested["response_format"] = None
    values = {name: value for name, value in requested.items() if value is not None}
    for name in values.keys() - ENGINE_FIELDS:
        if not _asks_nothing(name, values[name]):
            message = "is not supported by this engine; leave it out"
            raise bad_request(name, message, code="unsupported_parameter")
        del values[name]
    reported = fixed["logprobs"] is not None or fixed.get("prompt_logprobs", prompt_logprobs) is not None
    for name in REPORTS:
        if values.get(name) and not reported:
            raise bad_request(name, "requires logprobs; request them as well")
    if getattr(body, "prompt_rows", None) and prompt_logprobs is None:
        raise bad_request("prompt_rows", "requires prompt_logprobs; request them as well")
    if getattr(body, "field_logprobs", None) and fixed["logprobs"] is None:
        raise bad_request("field_logprobs", "requires logprobs; request them as well")
    if reported:
        values.setdefault("logprobs_mode", settings.logprobs_mode)
    if getattr(body, "return_routed_experts", None) and body.stream and (getattr(body, "n", None) or 1) > 1:
        raise bad_request("return_routed_experts", "cannot be streamed with n > 1; send n requests")
    if (routes := getattr(body, "routed_experts", None)) is not None:
        values["routed_experts"] = _routes_of(routes)
    try:
        return SamplingParams(**values | fixed)
    except ValueError as error:
        raise as_api_error(error, names) from error
    except TypeError as error:  # a value of the wrong type inside an untyped field
        raise ApiError(400, str(error), code="invalid_value") from error


def _routes_of(routes: RoutedExperts) -> NDArray[Any]:
    """Return the expert routes in a body as an array (positions, layers, experts per token)."""
    dtype = np.dtype(routes.dtype).newbyteorder("<")
    num_bytes = math.prod(routes.shape) * dtype.itemsize
    if num_bytes != len(routes.data):
        message = f"has {len(routes.data)} bytes, but this shape and dtype need {num_bytes}"
        raise bad_request("routed_experts.data", message)
    return np.frombuffer(routes.data, dtype).reshape(routes.shape)


def _asks_nothing(name: str, value: Any) -> bool:
    return value in (0, False, {}, []) or (name == "repetition_penalty" and value == 1)


def structured_format(body: GenerationBody) -> dict[str, Any] | None:
    """Convert `guided_*` or `structured_outputs` to a response format, or return None if neither is set.

    Raises:
        ApiError: 400 if more than one format is set, the format is unknown, or a grammar is not in Lark's
            notation.
    """
    forms = _forms_of(body)
    for name, _ in forms:
        if name.startswith(STRUCTURED) and name.removeprefix(STRUCTURED) not in FORMS:
            message = f"is not a supported format; use one of {', '.join(FORMS)}"
            raise bad_request(name, message, code="unsupported_parameter")
    if not forms:
        return None
    if len(forms) > 1 or getattr(body, "response_format", None) is not None:
        others = [name for name, _ in forms[1:]] or ["response_format"]
        raise bad_request(
            forms[0][0], f"sets the format of the reply, but so does {others[0]}; set only one of the two"
        )
    [(name, value)] = forms
    return _as_format(name, value)


@contextmanager
def named_as_asked(body: GenerationBody | ResponsesBody, *, is_call: bool = False) -> Iterator[None]:
    """Make errors about `response_format` and `max_tokens` name the body field that set them.

    For tool calls, `tools` sets `response_format`.
    """
    try:
        yield
    except (ParameterError, ApiError) as error:
        field = "tools" if is_call else _form_field(body)
        if isinstance(error, ConflictingParametersError) and field is not None:
            raise as_api_error(error, {"response_format": field}) from error
        refusal = as_api_error(error)
        fields = {"response_format": field, "max_tokens": _max_tokens_field(body)}
        field = fields.get(refusal.param or "")
        if field is None:
            raise
        raise refusal.at(field) from error


def _max_tokens_field(body: GenerationBody | ResponsesBody) -> str | None:
    """Return the field that set the number of tokens, or None if it was `max_tokens` or no field."""
    if isinstance(body, ResponsesBody):
        return "max_output_tokens"
    names = ("max_tokens", "max_completion_tokens")
    given = [name for name in names if getattr(body, name, None) is not None]
    return "max_completion_tokens" if given == ["max_completion_tokens"] else None


def _form_field(body: GenerationBody | ResponsesBody) -> str | None:
    """Return the field that set the format, or None if it was `response_format` or no field."""
    if isinstance(body, ResponsesBody):
        return "text"
    return next((name for name, _ in _forms_of(body)), None)


def _forms_of(body: GenerationBody) -> list[tuple[str, Any]]:
    """Return the names and values of the `guided_*` and `structured_outputs` fields set, without repeats."""
    guided = [
        (name, getattr(body, name))
        for name in GUIDED
        if getattr(body, name) is not None and has_effect(body, name)
    ]
    structured = [
        (f"{STRUCTURED}{name}", value)
        for name, value in (body.structured_outputs or {}).items()
        if value is not None
    ]
    return guided + structured


def _decoded(name: str, text: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise bad_request(name, f"is not valid JSON: {error}") from error


def _as_format(name: str, value: Any) -> dict[str, Any] | None:
    form = name.removeprefix(STRUCTURED).removeprefix("guided_")
    if form == "json":
        if isinstance(value, str):
            value = _decoded(name, value)
        return {"type": "json_schema", "json_schema": {"schema": value}}
    if form == "json_object":
        return {"type": "json_object"} if value else None
    if form != "grammar":
        return {"type": form, form: value}
    if not isinstance(value, str) or "::=" in value:
        remedy = 'response_format {"type": "ebnf", "ebnf": "start: ..."}'
        raise bad_request(name, f"must be a grammar in Lark's notation, as in {remedy}")
    return {"type": "ebnf", "ebnf": value}
