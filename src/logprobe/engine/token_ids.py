"""Prompts as callers write them → arrays of token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from logprobe.errors import ParameterError, require

if TYPE_CHECKING:
    from logprobe.engine.plan.radix import IntArray


def as_token_ids(prompt: Any, name: str = "prompt") -> IntArray:
    """Token ids of any integer sequence, (num_tokens,) int32, an array of its own.

    Raises:
        ParameterError: it is nothing of the kind, or an id lies outside every vocabulary.
    """
    try:
        ids = np.asarray(prompt)
    except ValueError:  # lists of different lengths within
        ids = np.array(None)
    is_ids = ids.ndim == 1 and (ids.size == 0 or np.issubdtype(ids.dtype, np.integer))
    require(is_ids, name, f"must be a list of token ids, got {prompt!r:.60}")
    outside = ids[(ids < 0) | (ids > np.iinfo(np.int32).max)][:1]
    if len(outside):  # numpy takes longer to print an array than all the rest here
        raise ParameterError(name, f"token id {outside} lies outside every vocabulary")
    return ids.astype(np.int32)
