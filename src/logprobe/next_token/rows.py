"""`RowCache`: LRU cache of next-token rows, bounded in bytes; `Prefix`: the key of a row."""

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
"""Type of the rows that callers get: NumPy arrays or tensors."""

Row: TypeAlias = NDArray[np.float32]
"""(V,) log-probabilities, nats, read-only."""


class Prefix(NamedTuple):
    """Cache key of a row: everything that determines its values for one model."""

    lora: str | None
    lora_number: int  # load number of the LoRA adapter at the time of the request; 0 for the base model
    weights_number: int  # load number of the model's weights
    token_bytes: bytes  # the token ids as int32

    @property
    def token_ids(self) -> IntArray:
        """Token ids, (num_tokens,) int32, read-only."""
        return np.frombuffer(self.token_bytes, dtype=np.int32)


@final
class RowCache:
    """Thread-safe LRU cache of rows.

    Args:
        max_bytes: maximum size of rows and prefixes together; 0 keeps no rows.
        max_rows: maximum number of rows; None for no limit.
    """

    def __init__(self, max_bytes: int, max_rows: int | None = None) -> None:
        is_bound = isinstance(max_bytes, int) and not isinstance(max_bytes, bool) and max_bytes >= 0
        known = "must be a number of bytes (0 keeps no rows); an unbounded cache would fill the memory"
        require(is_bound, "cache_bytes", f"{known}, got {max_bytes!r}")
        # `getsizeof` only sees the value, so the value is (row, size of row and prefix).
        self._kept: LRUCache[Prefix, tuple[Row, int]] = LRUCache(max_bytes, getsizeof=itemgetter(1))
        self._max_rows = max_rows
        self._lock = threading.Lock()

    @property
    def max_bytes(self) -> int:
        """Maximum size of the cache in bytes."""
        return int(self._kept.maxsize)

    @property
    def num_bytes(self) -> int:
        """Current size of rows and prefixes in bytes."""
        return int(self._kept.currsize)

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, prefix: Prefix) -> Row | None:
        """Return the row of a prefix and mark it as most recently used; None if it is not cached."""
        with self._lock:
            kept = self._kept.get(prefix)
        return None if kept is None else kept[0]

    def put(self, prefix: Prefix, row: Row) -> None:
        """Add a row, evicting the least recently used rows; a row larger than the cache is not added.

        The row must own its memory.
        """
        num_bytes = row.nbytes + len(prefix.token_bytes)
        if num_bytes <= self.max_bytes:
            with self._lock:
                self._kept[prefix] = (row, num_bytes)
                if self._max_rows is not None and len(self._kept) > self._max_rows:
                    self._kept.popitem()

    def clear(self) -> None:
        """Remove all rows."""
        with self._lock:
            self._kept.clear()


@dataclass(frozen=True, slots=True, eq=False)
class KnownPrefix(Generic[ArrayT]):
    """A prefix and its next-token distribution."""

    token_ids: IntArray  # (num_tokens,) int32
    lora: str | None  # name of the LoRA adapter; None for the base model
    logprobs: ArrayT  # (V,) float32, nats


@dataclass(frozen=True, slots=True, eq=False)
class TopTokens:
    """The k most likely next tokens."""

    token_ids: IntArray  # (k,) int32, by descending log-probability
    logprobs: NDArray[np.float32]  # (k,) nats, descending


def top_tokens(row: Row, k: int) -> TopTokens:
    """Return the `k` most likely tokens in a row, descending; ties are ordered by ascending id."""
    ids = top_indices(row, k).astype(np.int32)
    return TopTokens(ids, row[ids])


@functools.lru_cache(maxsize=64)
def row_params(lora: str | None) -> SamplingParams:
    """Return the parameters for a row request; they are greedy, since the sampled token is not used."""
    return SamplingParams(max_tokens=1, temperature=0, lora=lora)


@final
class SampledIds(list[int]):
    """Sampled token ids, with their log-probabilities if requested."""

    logprobs: FlatLogprobs | None = None  # the chosen token and its alternatives, one position per token

    @classmethod
    def before_stop(cls, token_ids: Sequence[int], finish_reason: str | None, params: SamplingParams) -> Self:
        """Return the sampled ids without a final id from `params.stop_token_ids`; the model's EOS is kept."""
        sample = cls(token_ids)
        if finish_reason == "stop" and sample and sample[-1] in params.stop_token_ids:
            del sample[-1]
        return sample


@final
class Token(bytes):
    """The exact bytes of a token, with its `token_id`; tokens are compared and hashed by id.

    A vocabulary may contain several tokens with the same bytes. A token never equals plain bytes; to compare
    with bytes, use `byte_string`.
    """

    token_id: int

    def __new__(cls, token_id: int, byte_string: bytes) -> Self:
        """Create a token from its id and bytes."""
        token = super().__new__(cls, byte_string)
        token.token_id = token_id
        return token

    @property
    def byte_string(self) -> bytes:
        """The token as plain bytes."""
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
