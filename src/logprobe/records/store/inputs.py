"""Validation of data that callers append: columns of Python values, dicts, caller-specified ids."""

from __future__ import annotations

from array import array
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from logprobe.errors import ParameterError
from logprobe.records.store.columns import check_not_infinite, check_not_negative
from logprobe.records.store.entries import NO_RANK, Entries, RowLists

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy.typing as npt

    from logprobe.records.store.columns import Array
    from logprobe.records.values import Logprob


def row_from_columns(
    token_ids: Iterable[int],
    logprobs: Iterable[float],
    ranks: Iterable[int | None],
    decoded_tokens: Iterable[str | None],
) -> RowLists:
    """Build one position from columns; `token_ids` sets the length, further values are not read.

    Raises:
        ParameterError: a column yields too few values.
    """
    return RowLists(*lists_of(token_ids, logprobs, ranks, decoded_tokens))


def lists_of(
    token_ids: Iterable[int],
    logprobs: Iterable[float],
    ranks: Iterable[int | None],
    decoded_tokens: Iterable[str | None],
) -> tuple[list[int], list[float], list[int | None], list[str | None] | None]:
    """Do the same as `row_from_columns`; a list of the right length is not copied."""
    ids = token_ids if type(token_ids) is list else [*token_ids]
    n = len(ids)
    values = logprobs if type(logprobs) is list and len(logprobs) == n else [*islice(logprobs, n)]
    of_rank, texts = [*islice(ranks, n)], [*islice(decoded_tokens, n)]
    if not len(values) == len(of_rank) == len(texts) == n:
        lengths = {"logprobs": len(values), "ranks": len(of_rank), "decoded_tokens": len(texts)}
        name = next(name for name, length in lengths.items() if length < n)
        raise ParameterError(name, f"has {lengths[name]} values for {n} token ids; give one per id")
    return ids, values, of_rank, None if texts.count(None) == n else texts


def row_from_position(position: Mapping[int, Logprob]) -> RowLists:
    """Build one position from a dict."""
    values = position.values()
    return row_from_columns(
        position,
        [value.logprob for value in values],
        [value.rank for value in values],
        [value.decoded_token for value in values],
    )


def row_entries(row: RowLists) -> Entries:
    """Convert a row to entries.

    Raises:
        ParameterError: a value has the wrong type or is out of range, an id or rank is negative, or a
            log-probability is +inf.
    """
    ids = _typed("token_ids", "q", row.token_ids)
    logprobs = _typed("logprobs", "d", row.logprobs)
    ranks = _typed("ranks", "q", [rank for rank in row.ranks if rank is not None])
    check_not_negative(token_ids=ids, ranks=ranks)
    check_not_infinite(logprobs)
    return Entries(
        offsets=np.array([0, len(ids)], np.int64),
        token_ids=ids,
        logprobs=logprobs,
        ranks=_typed("ranks", "q", [NO_RANK if rank is None else rank for rank in row.ranks]),
        texts=row.texts,
    )


def _typed(name: str, typecode: str, values: list[Any]) -> Array:
    """Convert to int64 or float64 by way of `array.array`, which, unlike NumPy, rejects 1.5 as an integer."""
    try:
        return np.array(array(typecode, values))
    except (TypeError, OverflowError) as error:
        raise ParameterError(name, f"a value has the wrong type or is out of range: {error}") from error


def spans_of(entries: Entries, starts: npt.ArrayLike, ends: npt.ArrayLike) -> Entries:
    """Build positions from one long row: position i gets its entries [starts[i], ends[i]).

    Raises:
        ParameterError: `starts` and `ends` have different lengths, or a position lies outside the row.
    """
    first, last = np.asarray(starts, np.int64), np.asarray(ends, np.int64)
    total = len(entries.token_ids)
    if first.ndim != 1 or first.shape != last.shape:
        raise ParameterError(
            "end_indices",
            f"has shape {last.shape}, but start_indices has {first.shape}; give one end per start",
        )
    if ((first < 0) | (last < first) | (last > total)).any():
        raise ParameterError("end_indices", f"a position lies outside the {total} entries")
    return entries.spans(first, last - first)


def step_row(row: RowLists, k: int) -> tuple[list[int], list[float], int, list[str | None] | None] | None:
    """Convert a position with distinct tokens to a row of `Steps`: ids, logprobs, the chosen rank, and texts.

    Such a row holds the chosen token, followed by the k most likely tokens, of which the chosen token may be
    one. Return None if the position's ranks do not fit this form. If they fit both cases (the chosen token is
    the last of the k most likely tokens, or comes after them), `k` decides.
    """
    ids, logprobs, ranks, texts = row
    if not ranks or ranks[0] is None:
        return None
    width = len(ranks)
    gap = next((place for place, rank in enumerate(ranks[1:], 1) if rank != place), width)
    if gap == width and (k != width or ranks[0] != width):
        return ids, logprobs, ranks[0], texts
    if ranks[0] != gap or ranks[gap:] != list(range(gap + 1, width + 1)):
        return None
    return (
        [*ids[:gap], ids[0], *ids[gap:]],
        [*logprobs[:gap], logprobs[0], *logprobs[gap:]],
        ranks[0],
        texts and [*texts[:gap], texts[0], *texts[gap:]],
    )


def given_columns(given: Sequence[npt.ArrayLike]) -> Entries:
    """Convert caller-specified ids, given as offsets (n + 1,), ids, logprobs and ranks (N,).

    Raises:
        ParameterError: the shapes do not match, an id or rank is negative, or a log-probability is +inf.
    """
    offsets, ids, logprobs, ranks = (np.asarray(column) for column in given)
    num_ids = int(offsets[-1] - offsets[0])
    if not ids.shape == logprobs.shape == ranks.shape == (num_ids,):
        shapes = f"{ids.shape}, {logprobs.shape} and {ranks.shape}"
        raise ParameterError(
            "given", f"the offsets cover {num_ids} ids, but ids, logprobs and ranks have shapes {shapes}"
        )
    check_not_negative(token_ids=ids, ranks=ranks)
    check_not_infinite(logprobs)
    return Entries(offsets=offsets, token_ids=ids, logprobs=logprobs, ranks=ranks)
