"""Find masks of one request that conflict: together they leave no token to sample.

Each mask alone may leave tokens. Functions may be called from any thread while the engine runs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from logprobe.errors import ParameterError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from numpy.typing import NDArray

    from logprobe.processors.batch import BatchRow
    from logprobe.processors.interface import MaskLogitsProcessor

    Masks = Sequence[tuple[MaskLogitsProcessor, BatchRow]]

MAX_PROBES: Final = 32  # limit on the rows tried per request; then the search stops
MAX_BRANCHES: Final = 16  # with more possible tokens than this, masks are assumed not to conflict


def possible_tokens(masks: Masks, vocab_size: int) -> NDArray[np.int64]:
    """Return the ids of the tokens that no mask forbids, (num_possible,) int64, ascending."""
    possible = np.ones(vocab_size, dtype=np.bool_)
    for processor, row in masks:
        processor.forbid(row, possible)
    return np.flatnonzero(possible)


def can_end(masks: Masks, params: Any, eos_token_ids: Collection[int], vocab_size: int) -> bool:
    """Return False if no text allowed by the masks reaches an end token or `max_tokens`.

    The search is depth-first. Return True if the search would need more than `MAX_PROBES` rows.
    """
    ends = {*eos_token_ids, *params.stop_token_ids}
    pending: list[list[int]] = [[]]
    for _ in range(MAX_PROBES):
        if not pending:
            return False
        output = pending.pop()
        if len(output) == params.max_tokens:
            return True
        rows = [(processor, replace(row, output_token_ids=output)) for processor, row in masks]
        try:
            token_ids = possible_tokens(rows, vocab_size).tolist()
        except ParameterError:  # the grammar parser hit a limit; sampling may never reach this text
            return True
        is_open = len(token_ids) > MAX_BRANCHES or not ends.isdisjoint(token_ids)
        if is_open or (token_ids and params.stop):
            return True
        pending += [[*output, token_id] for token_id in token_ids]
    return bool(pending)


def smallest_conflict(masks: Masks, is_conflict: Callable[[Masks], bool]) -> Masks:
    """Return a minimal subset of the masks for which `is_conflict` is still True."""
    for mask in masks:
        others = [other for other in masks if other is not mask]
        if others and is_conflict(others):
            masks = others
    return masks
