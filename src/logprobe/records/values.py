"""Values of a single token or position, created on access from a record's arrays."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from logprobe.errors import require

if TYPE_CHECKING:
    from collections.abc import Sequence

IntArray: TypeAlias = npt.NDArray[np.int32]
"""Token ids, or slot indices of the KV cache."""


class TokenTable(Protocol):
    """Map from token id to text and exact bytes."""

    def token_text(self, token_id: int) -> str:
        """Return the text of one token."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the exact bytes of one token."""
        ...


class EqualByValue:
    """Base of dataclasses with arrays: instances are equal if all fields are, with NaN equal to NaN.

    The dataclass is declared with `eq=False`, because `==` of arrays is not one truth value.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        names = [one.name for one in fields(self)]  # type: ignore[arg-type]  # each subclass is a dataclass
        return all(_are_equal(getattr(self, name), getattr(other, name)) for name in names)

    __hash__ = None  # type: ignore[assignment]  # arrays are not hashable


def _are_equal(one: object, other: object) -> bool:
    if not isinstance(one, np.ndarray) or not isinstance(other, np.ndarray):
        return bool(one == other)
    return np.array_equal(one, other, equal_nan=one.dtype.kind == "f")


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class IdLists:
    """Ragged lists of token ids, one list per position."""

    offsets: npt.NDArray[np.int64]  # (P + 1,): position p owns token_ids [offsets[p], offsets[p + 1])
    token_ids: npt.NDArray[np.int64]  # (M,)

    @classmethod
    def of(cls, lists: Sequence[npt.NDArray[np.int64]]) -> IdLists:
        """Concatenate one array of ids per position."""
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

    __hash__ = None  # type: ignore[assignment]  # arrays are not hashable

    def __repr__(self) -> str:
        return f"<IdLists: {len(self.token_ids)} ids at {len(self)} positions>"

    @property
    def widest(self) -> int:
        """Largest number of ids at any position."""
        return int(np.diff(self.offsets).max(initial=0))

    def after(self, num_positions: int) -> IdLists:
        """Return the lists preceded by `num_positions` positions without ids."""
        return IdLists(np.concatenate([np.zeros(num_positions, np.int64), self.offsets]), self.token_ids)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ExpertRoutes:
    """Experts of each token in each layer of a mixture of experts."""

    experts: npt.NDArray[np.uint16]  # (positions, layers * experts per token)
    num_layers: int  # layers with experts

    @classmethod
    def of(cls, name: str, value: Any) -> ExpertRoutes:
        """Convert an integer array (positions, layers, experts per token).

        Raises:
            ParameterError: `value` is not such an array, or an expert is negative, above 65,535, or twice in
                a layer of a token; the error's parameter is `name`.
        """
        if isinstance(value, cls):
            return value
        try:
            array = np.asarray(value)
        except (TypeError, ValueError):
            array = np.empty(0)
        is_whole = array.ndim == 3 and np.issubdtype(array.dtype, np.integer) and array.size > 0
        remedy = "must be an integer array (positions, layers with experts, experts per token)"
        require(is_whole, name, f"{remedy}, got {array.dtype} {array.shape}")
        is_expert = array.min() >= 0 and array.max() <= np.iinfo(np.uint16).max
        require(is_expert, name, f"must have experts in [0, 65535], got {array.min()} to {array.max()}")
        ordered = np.sort(array, axis=-1)
        is_once = (ordered[..., 1:] != ordered[..., :-1]).all()
        require(is_once, name, "must not repeat an expert within one layer of a token")
        return cls(array.reshape(len(array), -1).astype(np.uint16), array.shape[1])

    def __len__(self) -> int:
        return len(self.experts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ExpertRoutes):
            return NotImplemented
        return self.num_layers == other.num_layers and np.array_equal(self.experts, other.experts)

    __hash__ = None  # type: ignore[assignment]  # arrays are not hashable

    def __repr__(self) -> str:
        return f"<ExpertRoutes: {len(self)} positions, {self.num_layers} layers>"

    @property
    def array(self) -> npt.NDArray[np.uint16]:
        """(positions, layers, experts per token)."""
        return self.experts.reshape(len(self.experts), self.num_layers, -1)


@dataclass(slots=True)
class Logprob:
    """One candidate token at one position: its log-probability (nats), 1-based rank and text.

    It is a dataclass so that `asdict`, `replace` and `is_dataclass` work. It is not frozen, because
    creating a frozen dataclass takes over twice as long (docs/dev/decisions.md).
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


LogprobsOnePosition: TypeAlias = dict[int, Logprob]
"""Token id → `Logprob` at one position; the chosen token comes first, then the top-k by rank."""


def top_indices(
    values: npt.NDArray[Any], k: int, token_ids: npt.NDArray[Any] | None = None
) -> npt.NDArray[np.intp]:
    """Return the indices of the k largest of n values in descending order, or of all values if k >= n.

    Ties are ordered by ascending token id, as in the kernels. `token_ids` (n,) gives the ids; by default a
    value's id is its index. Values must not be NaN.
    """
    k = min(k, len(values))
    if k == 0:
        return np.empty(0, np.intp)
    # Keep every value >= the k-th largest: ties may lie on both sides of the cut.
    least = np.partition(values, len(values) - k)[len(values) - k]
    candidates = np.flatnonzero(values >= least)
    ties = candidates if token_ids is None else token_ids[candidates]
    return candidates[np.lexsort((ties, -values[candidates]))][:k]
