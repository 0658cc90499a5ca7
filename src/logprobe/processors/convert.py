"""Plain values → typed arguments, with an error that names the parameter and the place in it.

Before it: keyword arguments or JSON. After it: processors, which trust every value.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
from msgspec import inspect

from logprobe.config import require
from logprobe.errors import ParameterError

if TYPE_CHECKING:
    from collections.abc import Iterator

LARGEST_FLOAT: Final = 3.4e38  # what float32 holds

S = TypeVar("S", bound=msgspec.Struct)


def plain(value: Any) -> Any:
    """A copy made of dicts, lists and numbers alone, so that the caller's later changes do not matter."""
    if hasattr(value, "tolist"):  # numpy or torch
        return value.tolist()
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return value


def to_args(values: dict[str, Any], args_type: type[S], parameter: str) -> S:
    """Typed arguments from plain ones; keys that are numbers may be texts, as in JSON.

    Raises:
        ParameterError: a wrong type, a value out of bounds, or a number that is not finite.
    """
    try:
        args = msgspec.convert(values, args_type, str_keys=True)
    except msgspec.ValidationError as error:
        raise ParameterError(parameter, f"{error} (of {parameter})") from error
    _check_finite(parameter, msgspec.structs.asdict(args))
    return args


def keys_of(args_type: type[msgspec.Struct]) -> tuple[str, ...]:
    """The names of the arguments, as they are written."""
    return tuple(field.encode_name for field in msgspec.structs.fields(args_type))


def check_token_ids(args: msgspec.Struct, vocab_size: int, parameter: str) -> None:
    """Raise `ParameterError` where a value of type `TokenId` lies outside [0, vocab_size)."""
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
    """The token ids within a value of this type."""
    if isinstance(kind, inspect.Metadata):
        if (kind.extra or {}).get("is_token_id"):
            yield value
        else:
            yield from _token_ids(kind.type, value)
    elif isinstance(kind, inspect.UnionType):
        fitting = [one for one in kind.types if _holds_token_ids(one)] if value is not None else []
        for one in fitting:
            yield from _token_ids(one, value)
    elif isinstance(kind, inspect.DictType):
        for key, item in value.items():
            yield from _token_ids(kind.key_type, key)
            yield from _token_ids(kind.value_type, item)
    elif _holds_token_ids(kind):
        for item in value:
            yield from _token_ids(kind.item_type, item)


def _check_finite(parameter: str, value: Any) -> None:
    if isinstance(value, float):
        require(abs(value) <= LARGEST_FLOAT, parameter, f"holds {value}, which is not a finite float32")
    elif isinstance(value, dict):
        for item in value.values():
            _check_finite(parameter, item)
    elif isinstance(value, list):
        for item in value:
            _check_finite(parameter, item)
