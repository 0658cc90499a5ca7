"""The fields of a request that built-in processors serve, as those processors' arguments.

Before it: `SamplingParams`. After it: the pipeline, where these processors stand without registration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from logprobe.config import require
from logprobe.processors import args as kinds
from logprobe.processors.convert import plain, to_args

if TYPE_CHECKING:
    import msgspec


class RequestParams(Protocol):
    """What a processor may read of a request's `SamplingParams`."""

    @property
    def stop_token_ids(self) -> Any:
        """Token ids that end the text."""

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is picked without a draw."""


@dataclass(frozen=True, slots=True)
class FieldArgs:
    """What one field, or one group of fields, asks of a built-in processor."""

    parameter: str
    processor: str
    args: msgspec.Struct


# Built-in processor, its arguments, the name that errors give, the request's fields of the same names.
_FIELDS: tuple[tuple[str, type[msgspec.Struct], tuple[str, ...]], ...] = (
    ("AllowedTokensLogitsProcessor", kinds.AllowedTokensArgs, ("allowed_token_ids",)),
    ("BannedWordsLogitsProcessor", kinds.BannedWordsArgs, ("bad_words",)),
    ("MinTokensLogitsProcessor", kinds.MinTokensArgs, ("min_tokens",)),
    ("LogitBiasLogitsProcessor", kinds.LogitBiasArgs, ("logit_bias",)),
    (
        "PenaltiesLogitsProcessor",
        kinds.PenaltiesArgs,
        ("repetition_penalty", "presence_penalty", "frequency_penalty"),
    ),
)
_FORMATS = {"json_schema": "json_schema", "regex": "regex", "choice": "choice", "ebnf": "ebnf"}


def field_args(params: Any) -> list[FieldArgs]:
    """What a request's own fields ask of the built-in processors; fields left at their defaults ask nothing.

    Raises:
        ParameterError: a value that no processor takes; it names the field.
    """
    found = []
    for processor, kind, names in _FIELDS:
        values = {name: plain(getattr(params, name)) for name in names}
        asked = {name: value for name, value in values.items() if _is_asked(kind, name, value)}
        if asked:
            parameter = next(iter(asked))
            found.append(FieldArgs(parameter, processor, _checked(asked, kind)))
    if params.response_format is not None:
        grammar = format_args(params.response_format)
        if grammar is not None:
            found.append(FieldArgs("response_format", "GrammarLogitsProcessor", grammar))
    return found


def _checked(asked: dict[str, Any], kind: type[msgspec.Struct]) -> msgspec.Struct:
    """Check each field under its own name, then all together."""
    for name, value in asked.items():
        args = to_args({name: value}, kind, name)
    return args if len(asked) == 1 else to_args(asked, kind, next(iter(asked)))


def _is_asked(kind: type[msgspec.Struct], name: str, value: Any) -> bool:
    if value is None or (name != "allowed_token_ids" and value in ([], {})):
        return False
    return bool(value != getattr(kind(), name))


def format_args(response_format: Any) -> kinds.GrammarArgs | None:
    """The grammar that a response format asks for; None for plain text.

    The types are OpenAI's `text`, `json_object` and `json_schema`, and beside them `regex`, `choice` and
    `ebnf`, each with a value of the same name.

    Raises:
        ParameterError: another type, or a value that is missing.
    """
    name = "response_format"
    is_mapping = isinstance(response_format, Mapping)
    require(is_mapping, name, f"must be an object with a type, got {response_format!r:.60}")
    kind = response_format.get("type")
    known = ("text", "json_object", *_FORMATS)
    require(kind in known, name, f"type must be one of {', '.join(known)}, got {kind!r}")
    if kind == "text":
        return None
    if kind == "json_object":
        return kinds.GrammarArgs(json_object=True)
    value = response_format.get(kind)
    if kind == "json_schema":
        is_wrapped = isinstance(value, Mapping) and isinstance(value.get("schema"), Mapping)
        require(is_wrapped, name, "json_schema must hold an object with a schema")
        value = value["schema"]
    require(value is not None, name, f"of type {kind} needs {kind}")
    return to_args({_FORMATS[kind]: plain(value)}, kinds.GrammarArgs, name)
