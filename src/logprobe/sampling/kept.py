"""The tokens that masks and truncation keep, and the total raw probability of these tokens.

If only masks and truncation changed a row, a kept token's processed log-probability plus `log_kept_mass` is
its raw log-probability at the same temperature.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from logprobe.kernels.extraction.api import extract
from logprobe.kernels.placement import like
from logprobe.records.rows import KeptLists, host_array
from logprobe.records.store.columns import narrowest_id_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from logprobe.kernels.placement import Rows

NO_IDS = np.empty(0, np.uint16)


def log_kept_mass(
    raw: Rows, processed: Rows, temperatures: NDArray[np.float32], is_touched: NDArray[np.bool_]
) -> NDArray[np.float32]:
    """Return, per row, the log of the total raw probability of the tokens that were kept, (B,) in nats.

    Args:
        raw: (B, V) float32 logits of the model.
        processed: (B, V) float32 logits that were sampled from; -inf for tokens that were removed.
        temperatures: (B,) temperatures at which the raw probabilities are taken; 0 counts as 1.
        is_touched: (B,) bool; False for rows in which no token can have been removed (log mass 0).
    """
    log_mass = np.zeros(len(raw), np.float32)
    touched = np.flatnonzero(is_touched)
    if not len(touched):
        return log_mass
    rows = like(touched, raw)
    scales = like(np.where(temperatures > 0, temperatures, 1).astype(np.float32)[touched], raw)
    scaled: Any = raw[rows]
    with np.errstate(invalid="ignore", over="ignore"):  # of invalid rows, and of quotients below -3.4e38
        for index, scale in enumerate(scales):
            values = scaled[index]
            values -= values.max()  # first, so that a small temperature does not overflow
            values /= scale
    whole = _log_normaliser(scaled)
    scaled[processed[rows] == -np.inf] = -np.inf
    kept = _log_normaliser(scaled)
    log_mass[touched] = np.minimum(kept - whole, 0)
    return log_mass


def kept_ids(processed: Rows, is_asked: NDArray[np.bool_]) -> KeptLists:
    """Return the ids of the tokens that were kept in each row; empty for rows where `is_asked` is False.

    Args:
        processed: (B, V) logits that were sampled from; -inf for tokens that were removed.
        is_asked: (B,) bool.
    """
    dtype = narrowest_id_dtype(processed.shape[1] - 1)
    runs = [
        np.flatnonzero(host_array(row > -np.inf)).astype(dtype) if asked else NO_IDS
        for row, asked in zip(processed, is_asked.tolist(), strict=True)
    ]
    return KeptLists.of(runs)


def _log_normaliser(logits: Rows) -> NDArray[np.float64]:
    # Not a float32 logsumexp, whose error is 1e-5 on large vocabularies.
    return host_array(extract(logits, [0] * len(logits), 0).lse).astype(np.float64)
