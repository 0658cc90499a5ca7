"""Convert a teacher's rows to the columns that each trainer reads.

In each format every position has exactly k entries, so nested lists are built from whole arrays.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from logprobe._arrow import pa
from logprobe.records.forms.versions import parquet_metadata

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from logprobe.analysis.distillation.rows import TeacherRow
    from logprobe.analysis.distillation.settings import TrainingFormat

IGNORED: Final = -100  # label that the loss ignores
MASKED: Final = -1e9  # logprob that axolotl's collator pads with
COMPRESSION_FILE: Final = "compression_config.yaml"

Columns = dict[str, pa.Array]


def table_of(rows: Sequence[TeacherRow], kind: TrainingFormat, vocabulary_size: int) -> pa.Table:
    """Return rows as a table in the format `kind`.

    The first columns are each row's origin, number of target positions, and probability outside the top k.
    """
    columns: Columns = {"row": pa.array([row.row for row in rows], pa.int64())}
    if any(row.turn is not None for row in rows):
        columns["turn"] = pa.array([row.turn for row in rows], pa.int32())
    lost = [row.lost_masses for row in rows]
    columns["num_positions"] = pa.array([len(masses) for masses in lost], pa.int64())
    columns["lost_mass"] = pa.array([float(masses.mean()) for masses in lost], pa.float64())
    columns["max_lost_mass"] = pa.array([float(masses.max()) for masses in lost], pa.float64())
    return pa.table(columns | _WRITERS[kind](rows, vocabulary_size))


def schema_of(kind: TrainingFormat, vocabulary_size: int, *, has_turns: bool) -> pa.Schema:
    """Return the schema of the tables that `table_of` returns for this format."""
    columns: dict[str, pa.DataType] = {"row": pa.int64()} | ({"turn": pa.int32()} if has_turns else {})
    columns |= {"num_positions": pa.int64(), "lost_mass": pa.float64(), "max_lost_mass": pa.float64()}
    columns |= {name: array.type for name, array in _WRITERS[kind]([], vocabulary_size).items()}
    return pa.schema(list(columns.items()), parquet_metadata("distillation"))


def compression_config(vocabulary_size: int, top: int) -> str:
    """Return DistillKit's `logprob_compressor` configuration as YAML; all `top` logprobs are exact."""
    config = {
        "d": vocabulary_size,
        "k": top,
        "exact_k": top,
        "exact_dtype": "float32",
        "polynomial_terms": None,
        "term_dtype": "float32",
        "residual_bins": [],
        "delta_encoding": False,
        "error_diffusion": False,
        "normalize_t": False,
    }
    return json.dumps(config, indent=2) + "\n"  # JSON is YAML


def _parquet(rows: Sequence[TeacherRow], vocabulary_size: int) -> Columns:
    """Return columns with the token ids, the target positions, and the top k at each target position."""
    del vocabulary_size
    masses = [row.lost_masses for row in rows]
    return {
        "input_ids": _lists([row.token_ids for row in rows], np.int32),
        "positions": _lists([np.flatnonzero(row.is_target) for row in rows], np.int32),
        "target_token_ids": _nested([row.top_ids[row.is_target] for row in rows], np.int32),
        "target_logprobs": _nested([row.top_logprobs[row.is_target] for row in rows], np.float32),
        "lost_masses": _lists(masses, np.float32),
    }


def _axolotl(rows: Sequence[TeacherRow], vocabulary_size: int) -> Columns:
    """Return the columns that axolotl's KD trainer and collator read, with k logprobs at each token.

    The loss compares the student's distribution after token t with the k logprobs at t, which are normalized
    so that their probabilities sum to 1.
    """
    del vocabulary_size
    counts = [row.is_target[:, None] for row in rows]
    normalised = [
        row.top_logprobs - np.log(np.exp(row.top_logprobs).sum(axis=1, keepdims=True)) for row in rows
    ]
    logprobs = [np.where(count, values, MASKED) for count, values in zip(counts, normalised, strict=True)]
    ids = [np.where(count, row.top_ids, 0) for count, row in zip(counts, rows, strict=True)]
    masks = [np.broadcast_to(count, row.top_ids.shape) for count, row in zip(counts, rows, strict=True)]
    return {
        "input_ids": _lists([row.token_ids for row in rows], np.int32),
        "attention_mask": _lists([np.ones(len(row.token_ids)) for row in rows], np.int8),
        "labels": _labels(rows),
        "target_token_ids": _nested(ids, np.int32),
        "target_logprobs": _nested(logprobs, np.float32),
        "target_mask": _nested(masks, np.int8),
    }


def _distillkit(rows: Sequence[TeacherRow], vocabulary_size: int) -> Columns:
    """Return the columns that DistillKit's `LogprobCompressor` reads with `compression_config`."""
    num_bits = math.ceil(math.log2(vocabulary_size))
    # DistillKit multiplies the loss at unused positions by 0. At these positions, the top k get half of the
    # probability: if they had all of it, the loss would be NaN, even after the multiplication.
    used = [(row.is_target | row.is_learnt)[:, None] for row in rows]
    even = [np.float32(-math.log(2 * row.top_ids.shape[1])) for row in rows]
    logprobs = [
        np.where(use, row.top_logprobs, share) for use, row, share in zip(used, rows, even, strict=True)
    ]
    ids = [
        np.where(use, row.top_ids, np.arange(row.top_ids.shape[1]))
        for use, row in zip(used, rows, strict=True)
    ]
    return {
        "input_ids": _lists([row.token_ids for row in rows], np.uint64),
        "labels": _labels(rows),
        "compressed_logprobs": _nested(
            [np.ascontiguousarray(values, "<f4").view(np.uint8) for values in logprobs], np.uint8
        ),
        "bytepacked_indices": _nested([_packed(values, num_bits) for values in ids], np.uint8),
    }


def _packed(ids: npt.NDArray[Any], num_bits: int) -> npt.NDArray[np.uint8]:
    """Pack each row's ids into bits, most significant bit first, padded to whole bytes."""
    places = np.arange(num_bits - 1, -1, -1)
    bits = (ids[:, :, None] >> places & 1).astype(np.uint8)
    return np.packbits(bits.reshape(len(ids), -1), axis=1)


def _labels(rows: Sequence[TeacherRow]) -> pa.Array:
    return _lists([np.where(row.is_learnt, row.token_ids, IGNORED) for row in rows], np.int32)


def _lists(runs: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> pa.Array:
    """Build an array with one list per row."""
    values = np.concatenate(runs).astype(dtype) if runs else np.empty(0, dtype)
    return pa.ListArray.from_arrays(_offsets([len(run) for run in runs]), pa.array(values))


def _nested(matrices: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> pa.Array:
    """Build an array with one list of lists per matrix: an inner list for each row of the matrix."""
    values = [matrix.astype(dtype).ravel() for matrix in matrices]
    widths = [np.full(len(matrix), matrix.shape[1]) for matrix in matrices]
    inner = pa.ListArray.from_arrays(
        _offsets(np.concatenate(widths) if widths else []),
        pa.array(np.concatenate(values) if values else np.empty(0, dtype)),
    )
    return pa.ListArray.from_arrays(_offsets([len(matrix) for matrix in matrices]), inner)


def _offsets(lengths: npt.ArrayLike) -> pa.Array:
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.asarray(lengths, np.int64))])
    return pa.array(ends.astype(np.int32))


_WRITERS: Final[dict[str, Callable[[Sequence[TeacherRow], int], Columns]]] = {
    "parquet": _parquet,
    "axolotl": _axolotl,
    "distillkit": _distillkit,
}
