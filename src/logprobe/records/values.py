"""One token's numbers as small values, made only when somebody asks for one.

Before it: the arrays of a request (`FlatLogprobs`) or of a step. After it: user code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from logprobe.errors import ParameterError

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


class TokenLogprob(msgspec.Struct, frozen=True, gc=False):
    """A token and its log-probability (nats); sorting puts the most likely first."""

    token_id: int
    token: str
    logprob: float

    def __lt__(self, other: TokenLogprob) -> bool:
        return self.logprob > other.logprob


class TopLogprobs(msgspec.Struct, frozen=True):
    """The chosen token of one position, its 1-based rank, and the k best tokens, best first (nats)."""

    position: int
    token_id: int
    token: str
    logprob: float
    rank: int
    top_k: list[TokenLogprob] = []

    @classmethod
    def from_array(
        cls,
        position: int,
        logprobs: npt.ArrayLike,
        token_ids: npt.ArrayLike,
        tokens: Sequence[str | None] | None,
        selected_idx: int,
        k: int = 5,
    ) -> TopLogprobs:
        """Rank one row of candidates: logprobs (n,) nats, token_ids (n,), tokens up to n texts.

        Ties come by ascending token id; `k >= n` gives all; a missing text shows as `<id>`. The rank is
        1 + the number of strictly greater candidates.

        Raises:
            ParameterError: shapes that differ, NaN or +inf, k or selected_idx out of range.
        """
        values, ids = np.asarray(logprobs), np.asarray(token_ids)
        _check_candidates(values, ids, selected_idx, k)
        best = top_indices(values, k, ids)
        texts = tokens or ()

        def text(index: int) -> str:
            given = texts[index] if index < len(texts) else None
            return f"<{int(ids[index])}>" if given is None else given

        return cls(
            position=position,
            token_id=int(ids[selected_idx]),
            token=text(selected_idx),
            logprob=float(values[selected_idx]),
            rank=1 + int(np.count_nonzero(values > values[selected_idx])),
            top_k=[
                TokenLogprob(int(ids[index]), text(index), float(values[index])) for index in best.tolist()
            ],
        )


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


def _check_candidates(values: npt.NDArray[Any], ids: npt.NDArray[Any], selected_idx: int, k: int) -> None:
    if values.ndim != 1 or ids.shape != values.shape:
        raise ParameterError(
            "token_ids", f"logprobs {values.shape} and token_ids {ids.shape} must be 1-D, one id a value"
        )
    if not 0 <= selected_idx < len(values):
        raise ParameterError("selected_idx", f"{selected_idx} lies outside the {len(values)} candidates")
    if k < 0:
        raise ParameterError("k", f"{k} is negative; 0 keeps the chosen token alone")
    if np.isnan(values).any() or np.isposinf(values).any():
        raise ParameterError("logprobs", "a candidate is NaN or +inf; mask or drop the row first")
