"""One token's numbers as small values, made only when somebody asks for one.

Before it: the arrays of a request (`FlatLogprobs`). After it: user code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

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


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class IdLists:
    """Token ids position by position, any number each."""

    offsets: npt.NDArray[np.int64]  # (P + 1,): position p owns token_ids [offsets[p], offsets[p + 1])
    token_ids: npt.NDArray[np.int64]  # (M,)

    @classmethod
    def of(cls, lists: Sequence[npt.NDArray[np.int64]]) -> IdLists:
        """One array of ids a position."""
        return cls(
            np.cumsum([0, *map(len, lists)], dtype=np.int64), np.concatenate([np.empty(0, np.int64), *lists])
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, position: int) -> npt.NDArray[np.int64]:
        place = range(len(self))[position]
        return self.token_ids[self.offsets[place] : self.offsets[place + 1]]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, IdLists):
            return NotImplemented
        is_alike = np.array_equal(self.offsets, other.offsets)
        return is_alike and np.array_equal(self.token_ids, other.token_ids)

    __hash__ = None  # type: ignore[assignment]  # arrays have none

    def __repr__(self) -> str:
        return f"<IdLists: {len(self.token_ids)} ids at {len(self)} positions>"

    @property
    def widest(self) -> int:
        """The most ids of one position."""
        return int(np.diff(self.offsets).max(initial=0))

    def after(self, num_positions: int) -> IdLists:
        """The same behind so many positions without ids."""
        return IdLists(np.concatenate([np.zeros(num_positions, np.int64), self.offsets]), self.token_ids)


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
