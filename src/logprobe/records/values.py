"""One token's numbers as small values, made only when somebody asks for one.

Before it: the arrays of a request (`FlatLogprobs`). After it: user code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = npt.NDArray[np.int32]
"""Token ids, or slots of the key/value pool."""


class TokenTable(Protocol):
    """Token id → text and exact bytes."""

    def token_text(self, token_id: int) -> str:
        """Text of one token."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The token's own bytes."""
        ...


@dataclass(slots=True)
class Logprob:
    """One candidate at one position: log-probability (nats), 1-based rank, text.

    A dataclass, so that `asdict`, `replace` and `is_dataclass` know it; not a frozen one, which takes over
    twice as long to make (docs/decisions.md).
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobsOnePosition: TypeAlias = dict[int, Logprob]
"""Token id → its numbers at one position; the chosen token comes first, then the top-k by rank."""


def top_indices(
    values: npt.NDArray[Any], k: int, token_ids: npt.NDArray[Any] | None = None
) -> npt.NDArray[np.intp]:
    """Places of the k largest values (n,), descending, ties by ascending id; k >= n gives all.

    The host's twin of the kernels' choice: values are no NaN, and without `token_ids` (n,) places are ids.
    """
    k = min(k, len(values))
    if k == 0:
        return np.empty(0, np.intp)
    # All as large as the k-th largest: a tie may stand on either side of the cut.
    least = np.partition(values, len(values) - k)[len(values) - k]
    candidates = np.flatnonzero(values >= least)
    ties = candidates if token_ids is None else token_ids[candidates]
    return candidates[np.lexsort((ties, -values[candidates]))][:k]
