"""Row keys: one integer that says where a row's chosen token stands, written into free sign bits.

Bit 0 says whether the token lies outside the k best. The rest is its rank there, or for place p among the k
best p(p + 1)/2 + rank - 1, which is one number for each of the ranks 1..p+1 that ties allow.

Before it: places and ranks. After it: the columns of `TopRows`.
"""

from __future__ import annotations

from functools import lru_cache
from math import isqrt
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from logprobe.records.store.columns import Array

MIN_SIGN_BITS, MAX_SIGN_BITS = 20, 41
MAX_KEY_BITS = 62


class RowKey(NamedTuple):
    """Where the chosen token of one row stands."""

    is_outside: bool
    place: int  # index among the k best; k where it is outside
    rank: int


def encode_key(place: int | None, rank: int) -> int | None:
    """Key of one row; `place` None means outside. None where rank and place contradict each other."""
    if rank < 0 or (place is not None and not 1 <= rank <= place + 1):
        return None
    return rank << 1 | 1 if place is None else (place * (place + 1) // 2 + rank - 1) << 1


def encode_keys(places: Array, is_inside: Array, ranks: Array) -> Array | None:
    """Keys (n,) int64, negative for a rank too small, or None where a rank is too large for its place."""
    wide = ranks.astype(np.int64)
    if np.count_nonzero(is_inside & (wide > places + 1)):
        return None
    inside = places * (places + 1) // 2 + (wide - 1)
    return np.where(is_inside, inside << 1, wide << 1 | 1)


def decode_key(key: int, k: int) -> RowKey:
    """What one key says."""
    value = key >> 1
    if key & 1:
        return RowKey(True, k, value)
    place = (isqrt(8 * value + 1) - 1) // 2
    return RowKey(False, place, value - place * (place + 1) // 2 + 1)


def decode_keys(keys: Array, k: int) -> tuple[Array, Array, Array]:
    """`is_outside` (n,) bool, places (n,) with k for outside, ranks (n,)."""
    is_outside, values = (keys & 1).astype(np.bool_), keys >> 1
    places = ((np.sqrt(8.0 * values + 1) - 1) / 2).astype(np.int64)
    places -= places * (places + 1) // 2 > values
    ranks = np.where(is_outside, values, values - places * (places + 1) // 2 + 1)
    return is_outside, np.where(is_outside, k, places), ranks


def num_sign_bits(k: int) -> int:
    """How many sign bits of a row of k values carry the key; 0 where they are too few."""
    return 0 if k < MIN_SIGN_BITS else min(k, MAX_SIGN_BITS)


def write_signs(magnitudes: Array, keys: Array) -> None:
    """Set the sign bits of magnitudes (n, k) float32 to the keys (n,)."""
    num_bits = num_sign_bits(magnitudes.shape[1])
    rows = keys.astype("<i8", copy=False)[:, None].view(np.uint8)
    bits = np.unpackbits(rows, axis=1, count=num_bits, bitorder="little")
    magnitudes.view(np.uint32)[:, :num_bits] |= np.left_shift(bits, 31, dtype=np.uint32)


def read_signs(magnitudes: Array) -> Array:
    """Keys (n,) int64 from the sign bits of magnitudes (n, k) float32."""
    num_bits = num_sign_bits(magnitudes.shape[1])
    keys: Array = np.signbit(magnitudes[:, :num_bits]) @ (1 << np.arange(num_bits, dtype=np.int64))
    return keys


def read_sign(magnitudes: Array) -> int:
    """`read_signs` of one row (k,)."""
    is_set = np.signbit(magnitudes[: num_sign_bits(len(magnitudes))])
    return int.from_bytes(np.packbits(is_set, bitorder="little").tobytes(), "little")


@lru_cache(maxsize=4096)
def signs_of(key: int, k: int) -> Array:
    """Ones (k,) float32 whose signs spell the key: negative where the bit is set."""
    bits = key >> np.arange(num_sign_bits(k), dtype=np.int64) & 1
    signs = np.ones(k, np.float32)
    signs[: len(bits)] -= 2 * bits
    return signs
