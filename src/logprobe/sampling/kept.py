"""The tokens that masks and truncation keep, and the total raw probability of these tokens.

A token's processed log-probability plus `log_kept_mass` is its raw log-probability at the same temperature.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from logprobe.kernels import extract
from logprobe.records.rows import KeptLists
from logprobe.records.store.columns import narrowest_id_dtype

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

NO_IDS = np.empty(0, np.uint16)


def log_kept_mass(
    raw: Tensor, processed: Tensor, temperatures: NDArray[np.float32], is_touched: NDArray[np.bool_]
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
    rows = torch.from_numpy(touched).to(raw.device)
    scale = torch.from_numpy(np.where(temperatures > 0, temperatures, 1).astype(np.float32))[touched]
    # Subtract the maximum first, so that a small temperature does not overflow.
    scaled = raw[rows]
    scaled = scaled.sub_(scaled.amax(dim=1, keepdim=True)).div_(scale.to(raw.device)[:, None])
    whole = _log_normaliser(scaled)
    kept = _log_normaliser(scaled.masked_fill_(processed[rows] == -torch.inf, -torch.inf))
    log_mass[touched] = np.minimum(kept - whole, 0)
    return log_mass


def kept_ids(processed: Tensor, is_asked: NDArray[np.bool_]) -> KeptLists:
    """Return the ids of the tokens that were kept in each row; empty for rows where `is_asked` is False.

    Args:
        processed: (B, V) logits that were sampled from; -inf for tokens that were removed.
        is_asked: (B,) bool.
    """
    dtype = narrowest_id_dtype(processed.shape[1] - 1)
    runs = [
        (row > -torch.inf).nonzero().view(-1).numpy(force=True).astype(dtype) if asked else NO_IDS
        for row, asked in zip(processed, is_asked.tolist(), strict=True)
    ]
    return KeptLists.of(runs)


def _log_normaliser(logits: Tensor) -> NDArray[np.float64]:
    # Not torch.logsumexp, whose float32 error is 1e-5 on large vocabularies.
    lse = extract(logits, [0] * len(logits), 0).lse
    values: NDArray[np.float64] = lse.numpy(force=True).astype(np.float64)
    return values
