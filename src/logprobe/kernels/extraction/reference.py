"""Extraction in NumPy float64, row by row: the reference for the kernels.

It is also the fallback for CPUs on which the native library does not run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from logprobe.kernels.arrays import as_array
from logprobe.kernels.extraction.requests import allocate, check_requests, check_rows

if TYPE_CHECKING:
    import numpy.typing as npt
    from numpy.typing import NDArray

    from logprobe.kernels.arrays import Array
    from logprobe.kernels.extraction.requests import GivenLike, IdsLike, RowRequests
    from logprobe.kernels.placement import Rows
    from logprobe.records.rows import DeviceRows, GivenLogprobs


def extract(
    logits: Rows,
    chosen_ids: IdsLike,
    k: int | IdsLike,
    *,
    given_ids: GivenLike = None,
    dtype: npt.DTypeLike = np.float32,
    **extras: bool,
) -> DeviceRows:
    """Do the same as `logprobe.kernels.extract` for logits on the CPU, but return results in `dtype`."""
    requests = check_requests(check_rows(logits), chosen_ids, k, given_ids=given_ids, **extras)
    output = allocate(requests, dtype=dtype)
    fill(as_array(logits), requests, output)
    return output


def fill(logits: Array, requests: RowRequests, output: DeviceRows) -> None:
    """Compute what `requests` ask for from (B, V) logits, and write it to `output`."""
    with np.errstate(invalid="ignore", over="ignore"):  # invalid rows, and results beyond `output`'s dtype
        for row, chosen_id in enumerate(requests.chosen_ids.tolist()):
            _fill_row(logits[row].astype(np.float64), chosen_id, output.rows(row, row + 1))


def _fill_row(values: NDArray[np.float64], chosen_id: int, rows: DeviceRows) -> None:
    output: Any = rows
    highest = values.max()  # NaN if any value is
    is_valid = bool(np.isfinite(highest))
    lse = highest + np.log(np.exp(values - highest).sum()) if is_valid else np.nan
    logprobs = values - lse
    num = int(output.num_logprobs[0])
    order = np.argsort(-values, kind="stable")
    output.token_ids[0, 0] = chosen_id
    output.token_ids[0, 1 : num + 1] = order[:num] * is_valid
    output.logprobs[0, : num + 1] = logprobs[output.token_ids[0, : num + 1]]
    output.ranks[0] = is_valid * (1 + (values > values[chosen_id]).sum())
    output.lse[0] = lse
    output.is_valid[0] = is_valid
    probabilities = np.exp(logprobs)
    apart = np.where(np.isneginf(logprobs), 0.0, logprobs)
    mean = (probabilities * apart).sum()
    if output.entropy is not None:
        output.entropy[0] = -mean
    if "varentropy" in output.extras:
        output.extras["varentropy"][0] = (probabilities * (apart - mean) ** 2).sum()
    if "margin" in output.extras:
        margin = values[order[0]] - values[order[1]] if len(order) > 1 else np.inf
        output.extras["margin"][0] = margin if is_valid else np.nan
    if output.given is not None:
        _fill_given(values, logprobs, output.given, is_valid=is_valid)


def _fill_given(
    values: NDArray[np.float64], logprobs: NDArray[np.float64], given: GivenLogprobs, *, is_valid: bool
) -> None:
    for entry in range(int(given.offsets[0]), int(given.offsets[1])):
        token_id = int(given.token_ids[entry])
        given.logprobs[entry] = logprobs[token_id]
        given.ranks[entry] = is_valid * (1 + (values > values[token_id]).sum())
