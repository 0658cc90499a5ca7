"""Typed processor arguments, converted from plain values or from fields of `SamplingParams`.

The argument types of built-in processors define JSON Schemas and validate fields of `SamplingParams`. Every
default means "not requested". Processors do not validate values again.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, Final, Protocol, TypeAlias, TypeVar

import msgspec
from msgspec import inspect

from logprobe.errors import ParameterError, require

if TYPE_CHECKING:
    from collections.abc import Iterator

LARGEST_FLOAT: Final = 3.4e38  # largest accepted magnitude, close to float32's largest value
PLAIN_TYPES: Final = frozenset({type(None), bool, int, float, str})

S = TypeVar("S", bound=msgspec.Struct)


def plain(value: Any) -> Any:
    """Return a copy that consists only of dicts, lists, strings and numbers, none shared with the original.

    Raises:
        TypeError: a mapping has a key such as a tuple: it would become a list, which cannot be a key.
    """
    if type(value) in PLAIN_TYPES:
        return value
    if hasattr(value, "tolist"):  # numpy or torch
        return value.tolist()
    if isinstance(value, str):
        return str.__str__(value)  # instances of subclasses cannot be sent to other processes
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return value


def to_args(values: dict[str, Any], args_type: type[S], parameter: str) -> S:
    """Convert plain values to typed arguments; numeric keys may be strings, as in JSON.

    Raises:
        ParameterError: a value has a wrong type or is out of bounds, or a number is not finite.
    """
    try:
        args = msgspec.convert(values, args_type, str_keys=True)
    except msgspec.ValidationError as error:
        raise ParameterError(parameter, f"{error} (of {parameter})") from error
    _check_finite(parameter, msgspec.structs.asdict(args))
    return args


def keys_of(args_type: type[msgspec.Struct]) -> tuple[str, ...]:
    """Return the arguments' names as in JSON (msgspec's `encode_name`)."""
    return tuple(field.encode_name for field in msgspec.structs.fields(args_type))


def check_token_ids(args: msgspec.Struct, vocab_size: int, parameter: str) -> None:
    """Raise `ParameterError` if a value with the type `TokenId` is outside [0, vocab_size)."""
    for name, field_type in _token_fields(type(args)):
        where = "" if name == parameter else f"{name}: "
        for token_id in _token_ids(field_type, getattr(args, name)):
            require(
                token_id < vocab_size,
                parameter,
                f"{where}token id {token_id} lies outside the vocabulary [0, {vocab_size})",
            )


@functools.cache
def _token_fields(args_type: type[msgspec.Struct]) -> tuple[tuple[str, inspect.Type], ...]:
    info = inspect.type_info(args_type)
    assert isinstance(info, inspect.StructType)
    return tuple((field.name, field.type) for field in info.fields if _holds_token_ids(field.type))


def _holds_token_ids(kind: Any) -> bool:
    if isinstance(kind, inspect.Metadata):
        return bool((kind.extra or {}).get("is_token_id")) or _holds_token_ids(kind.type)
    parts = ("item_type", "key_type", "value_type")
    inner = [getattr(kind, part) for part in parts if hasattr(kind, part)]
    return any(map(_holds_token_ids, [*inner, *getattr(kind, "types", ())]))


def _token_ids(kind: Any, value: Any) -> Iterator[int]:
    """Yield the token ids in a value whose msgspec type is `kind`."""
    if isinstance(kind, inspect.Metadata):
        if (kind.extra or {}).get("is_token_id"):
            yield value
        else:
            yield from _token_ids(kind.type, value)
    elif isinstance(kind, inspect.UnionType):
        members = [member for member in kind.types if _holds_token_ids(member)] if value is not None else []
        for member in members:
            yield from _token_ids(member, value)
    elif isinstance(kind, inspect.DictType):
        for key, item in value.items():
            yield from _token_ids(kind.key_type, key)
            yield from _token_ids(kind.value_type, item)
    elif _holds_token_ids(kind):
        for item in value:
            yield from _token_ids(kind.item_type, item)


def _check_finite(parameter: str, value: Any) -> None:
    if isinstance(value, float):
        require(abs(value) <= LARGEST_FLOAT, parameter, f"contains {value}, which is not a finite float32")
    elif isinstance(value, dict):
        for item in value.values():
            _check_finite(parameter, item)
    elif isinstance(value, list):
        for item in value:
            _check_finite(parameter, item)


TokenId: TypeAlias = Annotated[int, msgspec.Meta(ge=0, extra={"is_token_id": True})]
"""A token id that is validated against the model's vocabulary; usable in any processor's `Args`."""

Penalty: TypeAlias = Annotated[float, msgspec.Meta(ge=-2, le=2)]


Word: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
"""A string whose tokens a processor caches beyond the request."""


class _Args(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class for arguments: frozen and keyword-only, and unknown keys are errors."""


class LogitBiasArgs(_Args, frozen=True):
    """Biases added to the logits of single tokens."""

    logit_bias: dict[TokenId, float] = {}  # token id -> bias in nats


class AllowedTokensArgs(_Args, frozen=True):
    """The only tokens that may be sampled."""

    allowed_token_ids: Annotated[list[TokenId], msgspec.Meta(min_length=1)] | None = None


class BannedWordsArgs(_Args, frozen=True):
    """Texts or token id sequences that must not be generated."""

    bad_words: list[Word] = []
    bad_words_token_ids: list[Annotated[list[TokenId], msgspec.Meta(min_length=1)]] = []


class MinTokensArgs(_Args, frozen=True):
    """Minimum number of tokens to generate before an end token."""

    min_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0


class PenaltiesArgs(_Args, frozen=True):
    """Penalties on tokens that have already occurred."""

    repetition_penalty: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0


class ThinkingBudgetArgs(_Args, frozen=True):
    """Maximum number of tokens between the start and the end marker of thinking."""

    thinking_budget: Annotated[int, msgspec.Meta(ge=0)] | None = None
    # The processor writes this before the end marker; its tokens count toward the budget.
    think_stop_sentence: Annotated[str, msgspec.Meta(max_length=1024)] | None = None
    think_start: Word = "<think>"
    think_end: Word = "</think>"
    # replaces `think_start`; the next two fields replace the other texts
    think_start_token_ids: list[TokenId] = []
    think_end_token_ids: list[TokenId] = []
    think_stop_sentence_token_ids: list[TokenId] = []


class GrammarArgs(_Args, frozen=True):
    """The constraint on the text; exactly one field is set."""

    json_schema: dict[str, Any] | str | None = None  # a schema, or its JSON text
    json_object: bool = False  # any JSON object
    regex: str | None = None
    choice: Annotated[list[str], msgspec.Meta(min_length=1)] | None = None
    ebnf: str | None = None  # llguidance's dialect of Lark


class CaptureArgs(_Args, frozen=True):
    """Capture a request's rows: True stores them under the request's id, a string under that name."""

    capture: bool | str = False


class NoArgs(_Args, frozen=True):
    """Arguments of a processor without arguments."""


class RequestParams(Protocol):
    """The parts of a request's `SamplingParams` that processors read."""

    @property
    def stop_token_ids(self) -> Any:
        """Token ids that end the completion."""

    @property
    def is_greedy(self) -> bool:
        """True if the most likely token is always chosen."""


@dataclass(frozen=True, slots=True)
class FieldArgs:
    """Arguments for a built-in processor, set by one field of a request or by a group of fields."""

    parameter: str
    processor: str
    args: msgspec.Struct


# Built-in processor, its argument type, and the request fields with the same names as arguments.
_FIELDS: tuple[tuple[str, type[msgspec.Struct], tuple[str, ...]], ...] = (
    ("AllowedTokensLogitsProcessor", AllowedTokensArgs, ("allowed_token_ids",)),
    ("BannedWordsLogitsProcessor", BannedWordsArgs, ("bad_words",)),
    ("MinTokensLogitsProcessor", MinTokensArgs, ("min_tokens",)),
    ("LogitBiasLogitsProcessor", LogitBiasArgs, ("logit_bias",)),
    (
        "PenaltiesLogitsProcessor",
        PenaltiesArgs,
        ("repetition_penalty", "presence_penalty", "frequency_penalty"),
    ),
)
_DEFAULTS = {name: getattr(kind(), name) for _, kind, names in _FIELDS for name in names}
field_values = attrgetter(*_DEFAULTS, "response_format")
"""Function that returns the values of all these fields in a request."""
DEFAULT_VALUES = (*(_DEFAULTS | {"bad_words": (), "logit_bias": None}).values(), None)
"""The values of these fields in a request that sets none of them."""
_FORMATS = {"json_schema": "json_schema", "regex": "regex", "choice": "choice", "ebnf": "ebnf"}


def field_args(params: Any) -> list[FieldArgs]:
    """Return the arguments for built-in processors that a request's fields set; defaults are skipped.

    Raises:
        ParameterError: a value is invalid; the error's `parameter` is the field.
    """
    if field_values(params) == DEFAULT_VALUES:
        return []
    asked_args = []
    for processor, kind, names in _FIELDS:
        values = ((name, getattr(params, name)) for name in names)
        asked = {name: plain(value) for name, value in values if _is_asked(name, value)}
        if asked:
            parameter = next(iter(asked))
            asked_args.append(FieldArgs(parameter, processor, _checked(asked, kind)))
    if params.response_format is not None:
        grammar = format_args(params.response_format)
        if grammar is not None:
            asked_args.append(FieldArgs("response_format", "GrammarLogitsProcessor", grammar))
    return asked_args


def _checked(asked: dict[str, Any], kind: type[msgspec.Struct]) -> msgspec.Struct:
    """Validate each field alone, so that errors name the field, and then all together."""
    for name, value in asked.items():
        args = to_args({name: value}, kind, name)
    return args if len(asked) == 1 else to_args(asked, kind, next(iter(asked)))


def _is_asked(name: str, value: Any) -> bool:
    if value is None or value == _DEFAULTS[name]:
        return False
    return name == "allowed_token_ids" or value not in ((), [], {})


def format_args(response_format: Any) -> GrammarArgs | None:
    """Return the grammar for a response format; None for plain text.

    The types are OpenAI's `text`, `json_object` and `json_schema`, and further `regex`, `choice` and `ebnf`;
    the value of each of the last three is under a key with the name of the type.

    Raises:
        ParameterError: the type is unknown, or the value is missing.
    """
    name = "response_format"
    is_mapping = isinstance(response_format, Mapping)
    require(is_mapping, name, "must be an object with a type", got=response_format)
    require(all(isinstance(key, str) for key in response_format), name, "has a key that is not a string")
    kind = response_format.get("type")
    known = ("text", "json_object", *_FORMATS)
    require(kind in known, name, f"type must be one of {', '.join(known)}, got {kind!r:.60}")
    if kind == "text":
        return None
    if kind == "json_object":
        return GrammarArgs(json_object=True)
    value = response_format.get(kind)
    if kind == "json_schema":
        is_wrapped = isinstance(value, Mapping) and isinstance(value.get("schema"), Mapping)
        require(is_wrapped, name, "json_schema must be an object with a schema")
        value = value["schema"]
    require(value is not None, name, f"of type {kind} requires the key {kind}")
    return to_args({_FORMATS[kind]: plain(value)}, GrammarArgs, name)
