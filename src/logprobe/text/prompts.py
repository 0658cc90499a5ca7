"""Prompts as vLLM takes them: a text, token ids, or a dict with one of the two."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from logprobe.errors import ParameterError, require

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logprobe.records.values import IntArray

    Prompt: TypeAlias = str | Sequence[int] | IntArray | Mapping[str, Any]

KEYS: Final = ("prompt", "prompt_token_ids")


def is_prompt_dict(value: Any) -> bool:
    """Return True for a prompt given as a dict; a message of a conversation is a dict with other keys."""
    return isinstance(value, Mapping) and not ("role" in value or "content" in value)


def plain_prompt(prompt: Any) -> Any:
    """Return the token ids or the text of a prompt given as a dict; return any other value unchanged.

    Raises:
        ParameterError: the dict has neither, or has keys that are not supported.
    """
    if not isinstance(prompt, Mapping):
        return prompt
    for name, value in prompt.items():
        if name not in KEYS and value is not None:
            raise ParameterError("prompt", f"has an unsupported key {name!r}; give {' or '.join(KEYS)}")
    ids = prompt.get("prompt_token_ids")
    if ids is not None:
        return ids
    text = prompt.get("prompt")
    require(
        isinstance(text, str), "prompt", "must have the key prompt (a text) or prompt_token_ids", got=prompt
    )
    return text


def text_of(prompt: Prompt) -> str | None:
    """Return the text of a prompt that is a text, or a dict with a text and token ids."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Return the prompts of a call as a list; a single prompt becomes a list of one.

    Raises:
        ParameterError: `prompts` is neither a prompt nor a list.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    is_list = isinstance(prompts, Sequence | np.ndarray)
    known = "must be a string, a list of token ids, a dict of one of the two, or a list of these"
    require(is_list, "prompts", known, got=prompts)
    if len(prompts) and isinstance(prompts[0], int | np.integer):
        return [prompts]  # type: ignore[list-item]  # one prompt of ids
    return prompts  # type: ignore[return-value]


def as_list(values: Any, name: str, known: str) -> list[Any]:
    """Return the items of an iterable argument as a list.

    Raises:
        ParameterError: `values` is not iterable, or is a text, bytes or a mapping. The message is `known`.
    """
    return list(_items(values, name, known))


def each_text(texts: str | Iterable[str], name: str = "texts") -> Iterator[str]:
    """Yield the texts of an argument that is a text or an iterable of texts.

    Raises:
        ParameterError: `texts` or one of its items is of another type.
    """
    known = "must be a text (str) or an iterable of texts"
    items = [texts] if isinstance(texts, str) else _items(texts, name, known)
    for number, text in enumerate(items):
        if not isinstance(text, str):
            raise ParameterError(name, f"{known}, but item {number} is {text!r:.60}")
        yield text


def _items(values: Any, name: str, known: str) -> Iterable[Any]:
    is_many = isinstance(values, Iterable) and not isinstance(values, str | bytes | bytearray | Mapping)
    require(is_many, name, known, got=values)
    items: Iterable[Any] = values
    return items
