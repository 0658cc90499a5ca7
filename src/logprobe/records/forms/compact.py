"""Smaller records at a stated price: 16-bit and 8-bit log-probabilities, and whole rows cut to a mass.

Before it: a record's columns, or whole rows (n, V). After it: `wire`, or a narrower record.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from logprobe.errors import ParameterError
from logprobe.records.flat import FlatLogprobs
from logprobe.records.store.ragged_rows import Entries
from logprobe.records.store.row_keys import num_sign_bits, read_signs, write_signs
from logprobe.records.values import top_indices

if TYPE_CHECKING:
    import numpy.typing as npt

    from logprobe.records.store.columns import Array

Precision: TypeAlias = Literal["float32", "float16", "uint8"]

LOSSY_COLUMNS = ("magnitudes", "outside_logprobs", "logprobs", "given.logprobs")
GROUP = 256  # scalars that share one scale
NUM_STEPS = 254  # 8-bit codes 0..254 span a group's finite values; 255 is -inf
INFINITE = 255


def quantise(columns: dict[str, Array], precision: Precision) -> tuple[dict[str, Array], float]:
    """Columns with smaller log-probabilities, and the largest error of a finite one, nats.

    float16 rounds each value. uint8 spans the finite values of each row of k, or of each 256 scalars, in 254
    equal steps.

    Raises:
        ParameterError: an unknown precision; NaN or positive values, which have no smaller form.
    """
    if precision not in {"float32", "float16", "uint8"}:
        raise ParameterError("precision", f"{precision!r} is not one of 'float32', 'float16', 'uint8'")
    if precision == "float32":
        return columns, 0.0
    smaller, max_abs_error = dict(columns), 0.0
    for name in LOSSY_COLUMNS:
        if name in columns:
            coded = _encode(name, columns[name], precision)
            magnitudes, decoded = np.abs(columns[name]), _decode(name, coded)
            finite = np.isfinite(magnitudes)
            errors = np.abs(decoded[finite] - magnitudes[finite].astype(np.float64))
            max_abs_error = max(max_abs_error, float(errors.max(initial=0)))
            smaller |= coded
    return smaller, max_abs_error


def restore(columns: dict[str, Array]) -> dict[str, Array]:
    """Undo `quantise`: float32 columns, keys back in their sign bits."""
    restored = {name: column for name, column in columns.items() if not name.endswith(".scale")}
    for name in LOSSY_COLUMNS:
        if name not in columns or columns[name].dtype in (np.float32, np.float64):
            continue
        magnitudes = _decode(name, columns)
        if name != "magnitudes":
            restored[name] = np.float32(0) - magnitudes
            continue
        if num_sign_bits(magnitudes.shape[1]):
            write_signs(magnitudes, restored.pop("keys"))
        restored[name] = magnitudes
    return restored


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


def _encode(name: str, column: Array, precision: Precision) -> dict[str, Array]:
    """The smaller column and what else is needed to read it."""
    magnitudes = np.abs(column)
    if np.isnan(column).any() or (name != "magnitudes" and (column > 0).any()):
        raise ParameterError("precision", "NaN and positive values have no smaller form; use 'float32'")
    coded = {}
    if name == "magnitudes" and num_sign_bits(column.shape[1]):
        coded["keys"] = read_signs(column)
    if precision == "float16":
        largest = np.finfo(np.float16).max  # what is finite stays so
        halves = np.where(np.isinf(magnitudes), np.inf, np.minimum(magnitudes, largest))
        return coded | {name: halves.astype(np.float16)}
    groups = _groups(magnitudes)
    is_finite = np.isfinite(groups)
    low = np.where(is_finite, groups, np.inf).min(axis=1, initial=np.inf)
    low[np.isinf(low)] = 0
    step = (np.where(is_finite, groups, low[:, None]).max(axis=1, initial=0) - low) / NUM_STEPS
    step[step <= 0] = 1
    codes = np.rint((np.where(is_finite, groups, low[:, None]) - low[:, None]) / step[:, None])
    codes = np.where(is_finite, codes, INFINITE).astype(np.uint8).ravel()[: magnitudes.size]
    scale = np.stack([low, step], axis=1).astype(np.float32)
    return coded | {name: codes.reshape(magnitudes.shape), f"{name}.scale": scale}


def _decode(name: str, columns: dict[str, Array]) -> Array:
    """Magnitudes, float32."""
    column = columns[name]
    if column.dtype == np.float16:
        return column.astype(np.float32)
    scale = columns[f"{name}.scale"]
    groups = _groups(column)
    values = np.where(groups == INFINITE, np.float32(np.inf), scale[:, :1] + groups * scale[:, 1:])
    decoded: Array = values.ravel()[: column.size].reshape(column.shape).astype(np.float32)
    return decoded


def _groups(column: Array) -> Array:
    """Rows of a matrix, or runs of GROUP scalars, the last filled up with its own last value."""
    if column.ndim == 2:
        return column
    if not len(column):
        return column.reshape(0, GROUP)
    padded: Array = np.pad(column, (0, -len(column) % GROUP), mode="edge")
    return padded.reshape(-1, GROUP)
