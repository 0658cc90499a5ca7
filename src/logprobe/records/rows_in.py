"""What callers give, checked and turned into arrays or rows.

Before it: a step's arrays, or the columns and dicts of a drop-in user. After it: `Rows`.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from logprobe.errors import ParameterError
from logprobe.records.columns import narrowed
from logprobe.records.ragged_rows import NO_RANK, Entries, RowLists

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy.typing as npt

    from logprobe.records.columns import Array
    from logprobe.records.values import Logprob


class StepRows(NamedTuple):
    """Rows of a step: column 0 is the chosen token, then the k best."""

    token_ids: Array  # (n, k + 1) integers >= 0
    logprobs: Array  # (n, k + 1) float32 or float64, nats
    ranks: Array  # (n,) integers, of the chosen token

    def entries(self) -> Entries:
        """The same rows as entries, a chosen token that is among the k best kept once."""
        n, width = self.token_ids.shape
        is_shown = np.ones((n, width), np.bool_)
        np.not_equal(self.token_ids[:, 1:], self.token_ids[:, :1], out=is_shown[:, 1:])
        offsets = np.zeros(n + 1, np.int64)
        np.cumsum(np.count_nonzero(is_shown, axis=1), out=offsets[1:])
        ranks = np.broadcast_to(np.arange(width, dtype=np.int64), (n, width)).copy()
        ranks[:, 0] = self.ranks
        return Entries(
            offsets=offsets,
            token_ids=self.token_ids[is_shown],
            logprobs=self.logprobs[is_shown],
            ranks=ranks[is_shown],
        )


def step_rows(token_ids: npt.ArrayLike, logprobs: npt.ArrayLike, ranks: npt.ArrayLike) -> StepRows:
    """A step's arrays, their shapes and types checked; `checked` looks at the values.

    Raises:
        ParameterError: shapes that do not agree, ids or ranks that are no integers.
    """
    rows = StepRows(np.asarray(token_ids), np.asarray(logprobs), np.asarray(ranks))
    shape = rows.token_ids.shape
    if len(shape) != 2 or shape[1] == 0 or rows.logprobs.shape != shape or rows.ranks.shape != shape[:1]:
        raise ParameterError(
            "token_ids",
            f"token_ids {shape}, logprobs {rows.logprobs.shape} and ranks {rows.ranks.shape} "
            "must be (n, k + 1), (n, k + 1) and (n,)",
        )
    for name, values in (("token_ids", rows.token_ids), ("ranks", rows.ranks)):
        if values.dtype.kind not in "iu" and values.size:
            raise ParameterError(name, f"{values.dtype} values where integers belong")
    return rows


def checked(rows: StepRows) -> StepRows:
    """The same rows, logprobs as float32 where that is exact.

    Raises:
        ParameterError: negative ids or ranks, +inf.
    """
    _check_not_negative(token_ids=rows.token_ids, ranks=rows.ranks)
    return rows._replace(logprobs=float_column(rows.logprobs))


def _check_not_negative(**columns: Array) -> None:
    for name, values in columns.items():
        if values.size and values.min() < 0:
            raise ParameterError(name, f"{int(values.min())} is negative; drop padding before appending")


def float_column(logprobs: Array) -> Array:
    """Float32 where every value is one exactly, else float64.

    Raises:
        ParameterError: a value is +inf.
    """
    if (logprobs == np.inf).any():
        raise ParameterError("logprobs", "a value is +inf, which no log-probability is; check the logits")
    return narrowed(logprobs)


def row_from_columns(
    token_ids: Iterable[int],
    logprobs: Iterable[float],
    ranks: Iterable[int | None],
    decoded_tokens: Iterable[str | None],
) -> RowLists:
    """One position from columns; `token_ids` sets the length, further values of the others are left alone.

    Raises:
        ParameterError: a column yields too few values.
    """
    ids = [int(token_id) for token_id in token_ids]
    columns: list[list[Any]] = []
    for name, values in (("logprobs", logprobs), ("ranks", ranks), ("decoded_tokens", decoded_tokens)):
        taken = list(islice(values, len(ids)))
        if len(taken) < len(ids):
            raise ParameterError(name, f"{len(taken)} values for {len(ids)} token ids; give one for each")
        columns.append(taken)
    texts = columns[2] if any(text is not None for text in columns[2]) else None
    return RowLists(ids, columns[0], columns[1], texts)


def row_from_position(position: Mapping[int, Logprob]) -> RowLists:
    """One position from a dict."""
    values = position.values()
    return row_from_columns(
        position,
        [value.logprob for value in values],
        [value.rank for value in values],
        [value.decoded_token for value in values],
    )


def row_entries(row: RowLists) -> Entries:
    """One row as entries.

    Raises:
        ParameterError: negative ids or ranks, +inf.
    """
    ids = np.array(row.token_ids, np.int64)
    ranks = np.array([NO_RANK if rank is None else rank for rank in row.ranks], np.int64)
    _check_not_negative(token_ids=ids, ranks=np.array([r for r in row.ranks if r is not None], np.int64))
    return Entries(
        offsets=np.array([0, len(ids)], np.int64),
        token_ids=ids,
        logprobs=float_column(np.array(row.logprobs, np.float64)),
        ranks=ranks,
        texts=None if row.texts is None else list(row.texts),
    )


def as_step_rows(row: RowLists, entries: Entries, *, repeats_chosen: bool, k: int | None) -> StepRows | None:
    """The row as chosen + k best, if its ranks say that it is one; None otherwise.

    `k` settles the one case in which ranks leave open whether the chosen token is the k-th best or the next.
    """
    ids, logprobs, ranks = entries.token_ids, entries.logprobs, list(row.ranks)
    if not ranks or ranks[0] is None or row.texts is not None:
        return None
    width = len(ranks)
    gap = next((place for place, rank in enumerate(ranks[1:], 1) if rank != place), width)
    if repeats_chosen or (gap == width and k != width):
        return StepRows(ids[None], logprobs[None], entries.ranks[:1]) if gap == width else None
    if ranks[gap:] != list(range(gap + 1, width + 1)):
        return None
    return StepRows(
        np.insert(ids, gap, ids[0])[None], np.insert(logprobs, gap, logprobs[0])[None], entries.ranks[:1]
    )


def given_columns(given: Sequence[npt.ArrayLike]) -> Entries:
    """Entries of ids that the caller named: offsets (n + 1,), ids, logprobs and ranks (N,).

    Raises:
        ParameterError: shapes that do not agree, negative ids or ranks, +inf.
    """
    offsets, ids, logprobs, ranks = (np.asarray(column) for column in given)
    if not ids.shape == logprobs.shape == ranks.shape == (int(offsets[-1] - offsets[0]),):
        raise ParameterError("given", f"offsets end at {offsets[-1]}, but {ids.shape} ids came with them")
    _check_not_negative(token_ids=ids, ranks=ranks)
    return Entries(offsets=offsets, token_ids=ids, logprobs=float_column(logprobs), ranks=ranks)
