"""Truncate full-vocabulary rows to the top tokens that cover a given probability mass."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from logprobe.errors import ParameterError
from logprobe.records.flat import FlatLogprobs
from logprobe.records.store.entries import Entries
from logprobe.records.values import top_indices

if TYPE_CHECKING:
    import numpy.typing as npt

    from logprobe.records.store.columns import Array


def cut_to_mass(logprobs: npt.ArrayLike, chosen_ids: npt.ArrayLike, mass: float) -> FlatLogprobs:
    """Keep the chosen token and, per row, the fewest top tokens whose total probability is at least `mass`.

    `logprobs` has shape (n, V), in nats, and `chosen_ids` has shape (n,). Tokens with equal log-probabilities
    are ordered by ascending id. In the result, `other_logprob` is the log of the probability that was
    removed.

    Raises:
        ParameterError: `mass` is outside (0, 1], the shapes do not match, an id is not in [0, V), or a value
            is NaN or +inf.
    """
    rows, chosen = np.asarray(logprobs), np.asarray(chosen_ids)
    if not 0 < mass <= 1:
        raise ParameterError("mass", f"must be in (0, 1], got {mass}")
    if rows.ndim != 2 or chosen.shape != rows.shape[:1]:
        raise ParameterError(
            "chosen_ids", f"has shape {chosen.shape} for logprobs of shape {rows.shape}; give one id per row"
        )
    is_id = np.issubdtype(chosen.dtype, np.integer) or chosen.size == 0
    if not (is_id and np.all((chosen >= 0) & (chosen < rows.shape[1]))):
        raise ParameterError("chosen_ids", f"must be integers in [0, {rows.shape[1]}), the size of a row")
    if np.isnan(rows).any() or np.isposinf(rows).any():
        raise ParameterError("logprobs", "a value is NaN or +inf; remove its row first")
    record = FlatLogprobs()
    for row, token_id in zip(rows, chosen.tolist(), strict=True):
        record.append_entries(_cut_row(row, token_id, mass))
    return record


def _cut_row(row: Array, token_id: int, mass: float) -> Entries:
    order = top_indices(row, len(row))
    total = np.cumsum(np.exp(row[order], dtype=np.float64))
    kept = order[: min(int(np.searchsorted(total, mass)) + 1, len(order))]
    ids = np.concatenate([[token_id], kept[kept != token_id]])
    places = np.flatnonzero(kept != token_id) + 1
    rank = 1 + int(np.count_nonzero(row > row[token_id]))
    return Entries(
        offsets=np.array([0, len(ids)], np.int64),
        token_ids=ids,
        logprobs=row[ids],
        ranks=np.concatenate([[rank], places]),
    )
