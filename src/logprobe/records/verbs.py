"""The verbs that make records: three with which an engine fills one request's, and whole rows cut to a mass.

Before them: one position's numbers as Python columns, or whole rows (n, V). After them: `FlatLogprobs`, or
`list[dict]`.
"""

from __future__ import annotations

from itertools import chain, repeat
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from logprobe.errors import ParameterError
from logprobe.records.flat import FlatLogprobs
from logprobe.records.store.entries import Entries
from logprobe.records.store.inputs import row_from_columns
from logprobe.records.values import Logprob, LogprobsOnePosition, top_indices

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

    from logprobe.records.store.columns import Array

PromptLogprobs: TypeAlias = FlatLogprobs | list[LogprobsOnePosition | None]
SampleLogprobs: TypeAlias = FlatLogprobs | list[LogprobsOnePosition]


def create_prompt_logprobs(flat_logprobs: bool) -> PromptLogprobs:
    """Start a prompt's log-probabilities: its first token has none."""
    return FlatLogprobs([None]) if flat_logprobs else [None]


def create_sample_logprobs(flat_logprobs: bool) -> SampleLogprobs:
    """Start the log-probabilities of generated tokens, none so far."""
    return FlatLogprobs() if flat_logprobs else []


def append_logprobs_for_next_position(
    request_logprobs: PromptLogprobs | SampleLogprobs,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    decoded_tokens: Iterable[str | None],
    rank: int,
    num_logprobs: int,
) -> None:
    """Add one position: the chosen token with `rank`, then ranks 1..num_logprobs; further columns are cut.

    `num_logprobs == -1` means as many as given.

    Raises:
        ParameterError: num_logprobs below -1; with a flat container also what `append_fast` refuses.
    """
    if num_logprobs < -1:
        raise ParameterError("num_logprobs", f"{num_logprobs} is below -1, which means all")
    kept = list(token_ids) if num_logprobs == -1 else list(token_ids)[: num_logprobs + 1]
    ranks = chain((rank,), range(1, len(kept)))
    if isinstance(request_logprobs, FlatLogprobs):
        request_logprobs.append_fast(kept, logprobs, ranks, decoded_tokens)
        return
    row = row_from_columns(kept, logprobs, ranks, decoded_tokens)
    entries = map(Logprob, row.logprobs, row.ranks, row.texts or repeat(None))
    request_logprobs.append(dict(zip(kept, entries, strict=False)))


def cut_to_mass(logprobs: npt.ArrayLike, chosen_ids: npt.ArrayLike, mass: float) -> FlatLogprobs:
    """Whole rows (n, V) nats, cut to the smallest set of best tokens that holds `mass`, plus the chosen (n,).

    Ties come by ascending token id; `other_logprob` of the result is what was cut away.

    Raises:
        ParameterError: a mass outside (0, 1], shapes that do not agree, NaN or +inf.
    """
    rows, chosen = np.asarray(logprobs), np.asarray(chosen_ids)
    if not 0 < mass <= 1:
        raise ParameterError("mass", f"{mass} lies outside (0, 1]")
    if rows.ndim != 2 or chosen.shape != rows.shape[:1]:
        raise ParameterError("chosen_ids", f"{chosen.shape} ids for rows {rows.shape}; give one a row")
    if np.isnan(rows).any() or np.isposinf(rows).any():
        raise ParameterError("logprobs", "a value is NaN or +inf; drop the row first")
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
