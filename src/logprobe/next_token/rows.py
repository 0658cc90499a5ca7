"""`RowCache`: the rows asked last, within a bound in bytes; `Prefix`: what they are known by."""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeAlias, TypeVar, final

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray

from logprobe.errors import require
from logprobe.records.values import top_indices
from logprobe.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.records import FlatLogprobs
    from logprobe.records.values import IntArray

ArrayT = TypeVar("ArrayT")
"""What callers are given rows as: arrays, or tensors."""

Row: TypeAlias = NDArray[np.float32]
"""(V,) log-probabilities, nats, read-only."""


class Prefix(NamedTuple):
    """All that changes a row of one model; rows are kept by it."""

    lora: str | None
    lora_number: int  # which load of these weights answered when it was asked; 0: the base model alone
    weights_number: int  # which load of the model's own weights did
    token_bytes: bytes  # int32, (num_tokens,)

    @property
    def token_ids(self) -> IntArray:
        """Every id: (num_tokens,) int32, read-only."""
        return np.frombuffer(self.token_bytes, dtype=np.int32)


@final
class RowCache:
    """Least recently used rows go first once rows and prefixes take more than `max_bytes`; 0 keeps none.

    With `max_rows` they also go first once there are more than so many.
    """

    def __init__(self, max_bytes: int, max_rows: int | None = None) -> None:
        is_bound = isinstance(max_bytes, int) and not isinstance(max_bytes, bool) and max_bytes >= 0
        known = "must be a number of bytes (0 keeps no rows); a cache without a bound would fill the memory"
        require(is_bound, "cache_bytes", f"{known}, got {max_bytes!r}")
        # The size of a value is all that it is told, so a value brings its prefix's bytes along.
        self._kept: LRUCache[Prefix, tuple[Row, int]] = LRUCache(max_bytes, getsizeof=itemgetter(1))
        self._max_rows = max_rows
        self._lock = threading.Lock()

    @property
    def max_bytes(self) -> int:
        """The bound."""
        return int(self._kept.maxsize)

    @property
    def num_bytes(self) -> int:
        """What rows and prefixes take now."""
        return int(self._kept.currsize)

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, prefix: Prefix) -> Row | None:
        """The row of a prefix, now the most recently used; None where it is not kept."""
        with self._lock:
            kept = self._kept.get(prefix)
        return None if kept is None else kept[0]

    def put(self, prefix: Prefix, row: Row) -> None:
        """Keep a row of its own memory where the bound has room for it; the oldest go first."""
        num_bytes = row.nbytes + len(prefix.token_bytes)
        if num_bytes <= self.max_bytes:
            with self._lock:
                self._kept[prefix] = (row, num_bytes)
                if self._max_rows is not None and len(self._kept) > self._max_rows:
                    self._kept.popitem()

    def clear(self) -> None:
        """Forget every row."""
        with self._lock:
            self._kept.clear()


@dataclass(frozen=True, slots=True, eq=False)
class KnownPrefix(Generic[ArrayT]):
    """A prefix, the LoRA weights it was read under (None: none), and its next-token distribution."""

    token_ids: IntArray  # (num_tokens,) int32
    lora: str | None
    logprobs: ArrayT  # (V,) float32, nats


@dataclass(frozen=True, slots=True, eq=False)
class TopTokens:
    """The likeliest next tokens."""

    token_ids: IntArray  # (k,) int32, by descending log-probability
    logprobs: NDArray[np.float32]  # (k,) nats, descending


def top_tokens(row: Row, k: int) -> TopTokens:
    """The `k` largest of a row, descending, ties by ascending id."""
    ids = top_indices(row, k).astype(np.int32)
    return TopTokens(ids, row[ids])


@functools.lru_cache(maxsize=64)
def row_params(lora: str | None) -> SamplingParams:
    """What an ask for a row under some weights is; the draw is not used, and this is the cheapest."""
    return SamplingParams(max_tokens=1, temperature=0, lora=lora)


@final
class SampledIds(list[int]):
    """The ids that were drawn, with their record where it was asked for."""

    logprobs: FlatLogprobs | None = None  # a position a token; the chosen one and its alternatives

    @classmethod
    def before_stop(cls, token_ids: Sequence[int], finish_reason: str | None, params: SamplingParams) -> Self:
        """What was drawn, without the stop id that ended it; a model's own end of text stays."""
        sample = cls(token_ids)
        if finish_reason == "stop" and sample and sample[-1] in params.stop_token_ids:
            del sample[-1]
        return sample


@final
class Token(bytes):
    """The exact bytes of a token, with `.token_id`; two tokens are equal where their ids are.

    Vocabularies hold different tokens of the same bytes, so equality, order and hash go by id; compared with
    plain bytes a token is unequal, and `.byte_string` gives them.
    """

    token_id: int

    def __new__(cls, token_id: int, byte_string: bytes) -> Self:
        """Make the token of an id and its bytes."""
        token = super().__new__(cls, byte_string)
        token.token_id = token_id
        return token

    @property
    def byte_string(self) -> bytes:
        """The bytes alone."""
        return bytes(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Token) and self.token_id == other.token_id

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.token_id)

    def __lt__(self, other: bytes) -> bool:
        return self.token_id < other.token_id if isinstance(other, Token) else NotImplemented

    def __le__(self, other: bytes) -> bool:
        return self.token_id <= other.token_id if isinstance(other, Token) else NotImplemented

    def __gt__(self, other: bytes) -> bool:
        return self.token_id > other.token_id if isinstance(other, Token) else NotImplemented

    def __ge__(self, other: bytes) -> bool:
        return self.token_id >= other.token_id if isinstance(other, Token) else NotImplemented

    def __repr__(self) -> str:
        return f"Token({self.token_id}, {bytes(self)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Token, (self.token_id, bytes(self))
