"""Prompts as clients write them → token ids, and the text that an echo repeats.

Before it: a typed body. After it: engine requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from logprobe.server.http.errors import bad_request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.records.values import IntArray
    from logprobe.server.service import Service
    from logprobe.text.edge import TextEdge

LARGEST_ID = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Prompt:
    """Ids, and for an echo what each of them gives of the text."""

    token_ids: IntArray
    parts: list[bytes] = field(default_factory=list)  # a token; together the text


def read_prompts(prompt: str | Sequence[Any], service: Service, *, name: str = "prompt") -> list[Prompt]:
    """The prompts of a body: one as text or ids, or a list of either.

    Raises:
        ApiError: empty, of mixed kinds, or more text than a request may have.
        ParameterError: a text that the tokenizer cannot hold.
    """
    text = service.text
    if isinstance(prompt, str):
        service.check_texts([prompt], name)
        return [_from_text(prompt, text)]
    if not prompt:
        raise bad_request(name, "is empty; give a text, token ids, or a list of either")
    if all(isinstance(one, int) for one in prompt):
        return [_from_ids(prompt, text, name)]
    if all(isinstance(one, str) for one in prompt):
        service.check_texts(prompt, name)
        return [_from_text(one, text) for one in prompt]
    if all(isinstance(one, list) for one in prompt):
        return [_from_ids(one, text, name) for one in prompt]
    raise bad_request(name, "mixes texts and token ids; give a list of one kind")


def _from_text(prompt: str, text: TextEdge) -> Prompt:
    ids = text.encode(prompt)
    return Prompt(ids, _aligned(ids.tolist(), prompt.encode(), text))


def _from_ids(ids: Sequence[Any], text: TextEdge, name: str) -> Prompt:
    return Prompt(as_ids(ids, name), [text.bytes_of([one]) for one in ids])


def as_ids(ids: Sequence[Any], name: str) -> IntArray:
    """Token ids as an array; whether the model has them is the engine's to say.

    Raises:
        ApiError: something else is among them, or a number that no vocabulary has.
    """
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
        raise bad_request(name, "a list of token ids holds something else")
    if not all(0 <= one <= LARGEST_ID for one in ids):
        raise bad_request(name, "a token id lies outside the vocabulary")
    return np.array(ids, dtype=np.int32)


def _aligned(ids: list[int], data: bytes, text: TextEdge) -> list[bytes]:
    """What each token gives of the text it came from: special ones that the tokenizer added give nothing."""
    whole = [text.vocabulary.token_bytes(token_id) for token_id in ids]
    for num_added in (0, 1):
        if b"".join(whole[num_added:]) == data:
            return [b""] * num_added + whole[num_added:]
    return [text.bytes_of([token_id]) for token_id in ids]
