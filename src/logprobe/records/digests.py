"""Digests of next-token distributions: 16 bytes per step, which a holder of the weights can verify.

A digest samples one row of raw log-probabilities at `NUM_IDS` token ids that depend on the prompt and the
position. Each value is rounded to `STEP` nats and stored in 16 bits. On another processor, whose results
differ in the last bits, the same weights therefore give nearly the same digest; other weights do not. The
digest is masked with a hash of the position and of the weight versions, so that it can only be read with the
versions that the reply states.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import numpy as np

from logprobe.records.rows import GivenLists

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.records.info import LogprobsInfo
    from logprobe.records.store.columns import Array

NUM_IDS: Final = 8
STEP: Final = 2.0**-10  # nats
MAX_CODE: Final = (1 << 16) - 1  # log-probabilities of about -64 nats or less, including -inf
KEY_TOKENS: Final = 16  # number of tokens at the prompt's end that determine the ids
NUM_BYTES: Final = 2 * NUM_IDS


def digest_ids(prompt: Array, position: int, vocab_size: int) -> tuple[int, ...]:
    """Return the ids at which the digest of a generated position samples its row.

    Args:
        prompt: token ids of the prompt, (P,).
        position: index of the generated token.
        vocab_size: number of ids to choose from.
    """
    key = np.asarray(prompt[-KEY_TOKENS:], "<i4").tobytes()
    data = blake2b(key + position.to_bytes(8, "little"), digest_size=4 * NUM_IDS).digest()
    return tuple((np.frombuffer(data, "<u4") % vocab_size).tolist())


def split_given(given: GivenLists) -> tuple[GivenLists, Array]:
    """Separate the ids that a request specified from a digest's ids, the last `NUM_IDS` of each row.

    Returns:
        The entries of the specified ids, and the log-probabilities of the digests' ids, (T, NUM_IDS) in nats.
    """
    places = given.offsets[1:, None] + np.arange(-NUM_IDS, 0)
    is_specified = np.ones(len(given.token_ids), np.bool_)
    is_specified[places] = False
    columns = (given.token_ids, given.logprobs, given.ranks)
    offsets = given.offsets - NUM_IDS * np.arange(len(given.offsets))
    return GivenLists.of(offsets, *(column[is_specified] for column in columns)), given.logprobs[places]


def digests_of(logprobs: Array, start: int, info: LogprobsInfo) -> list[bytes]:
    """Return the digests of T positions from `start` on, given log-probabilities (T, NUM_IDS) in nats."""
    codes = codes_of(logprobs)
    return [_masked(row.tobytes(), position, info) for position, row in enumerate(codes, start)]


def codes_of(logprobs: Array) -> Array:
    """Round log-probabilities in nats to codes, uint16 of the same shape."""
    codes: Array = np.clip(np.rint(-logprobs.astype(np.float64) / STEP), 0, MAX_CODE).astype("<u2")
    return codes


def read_digests(digests: Sequence[bytes], info: LogprobsInfo) -> Array:
    """Return the codes in the digests of the first T positions, (T, NUM_IDS) uint16."""
    data = b"".join(_masked(digest, position, info) for position, digest in enumerate(digests))
    return np.frombuffer(data, "<u2").reshape(-1, NUM_IDS)


def _masked(data: bytes, position: int, info: LogprobsInfo) -> bytes:
    versions = f"{info.weight_version or ''}\0{info.lora_version or ''}".encode()
    mask = blake2b(versions + position.to_bytes(8, "little"), digest_size=NUM_BYTES).digest()
    return bytes(a ^ b for a, b in zip(data, mask, strict=True))
