"""Prompts as vLLM takes them: a text, token ids, or a dict with one of the two."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from logprobe.errors import ParameterError, require

if TYPE_CHECKING:
    from collections.abc import Sequence

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
