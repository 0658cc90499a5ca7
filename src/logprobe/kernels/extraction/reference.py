"""Extraction in plain torch, row by row: the reference for the kernels.

It is also the fallback for devices without a kernel, and for CPUs on which the native library does not run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from logprobe.kernels.extraction.api import allocate, check_requests, check_rows

if TYPE_CHECKING:
    from torch import Tensor

    from logprobe.kernels.extraction.api import GivenLike, IdsLike, RowRequests
    from logprobe.records.rows import DeviceRows, GivenLogprobs


def extract(
    logits: Tensor,
    chosen_ids: IdsLike,
    k: int | IdsLike,
    *,
    given_ids: GivenLike = None,
    dtype: torch.dtype = torch.float32,
    **extras: bool,
) -> DeviceRows:
    """Compute `logprobe.kernels.extract` in `dtype`, and return results in `dtype`."""
    requests = check_requests(check_rows(logits), chosen_ids, k, given_ids=given_ids, **extras)
    output = allocate(requests, logits.device, dtype=dtype)
    fill(logits, requests, output)
    return output


def fill(logits: Tensor, requests: RowRequests, output: DeviceRows) -> None:
    """Compute what `requests` ask for from (B, V) logits, and write it to `output`.

    Computes in the dtype of `output.logprobs`. Logits on another device are copied to the host, and the
    results are copied back.
    """
    if logits.device.type != "cpu":
        host = allocate(requests, torch.device("cpu"), dtype=output.logprobs.dtype)
        fill(logits.cpu(), requests, host)
        _copy(host, output)
        return
    for row, chosen_id in enumerate(requests.chosen_ids.tolist()):
        values = logits[row].detach().to(output.logprobs.dtype)
        _fill_row(values, chosen_id, output.rows(row, row + 1))


def _copy(source: DeviceRows, target: DeviceRows) -> None:
    """Copy the arrays that `fill` writes from `source` to `target`, which may be on another device."""
    for name in ("token_ids", "logprobs", "ranks", "lse", "is_valid"):
        getattr(target, name).copy_(getattr(source, name))
    for name, column in source.extras.items():
        target.extras[name].copy_(column)
    if source.given is not None and target.given is not None:
        target.given.logprobs.copy_(source.given.logprobs)
        target.given.ranks.copy_(source.given.ranks)


def _fill_row(values: Tensor, chosen_id: int, output: DeviceRows) -> None:
    highest = values.max()  # NaN if any value is
    is_valid = bool(highest.isfinite())
    lse = highest + (values - highest).exp().sum().log() if is_valid else highest * torch.nan
    logprobs = values - lse
    num = int(output.num_logprobs[0])
    top_ids = values.sort(descending=True, stable=True).indices[:num]
    output.token_ids[0, 0] = chosen_id
    output.token_ids[0, 1 : num + 1] = top_ids * is_valid
    output.logprobs[0, : num + 1] = logprobs[output.token_ids[0, : num + 1].long()]
    output.ranks[0] = is_valid * (1 + (values > values[chosen_id]).sum())
    output.lse[0] = lse
    output.is_valid[0] = is_valid
    if output.entropy is not None:
        output.entropy[0] = -torch.where(logprobs.isneginf(), 0.0, logprobs.exp() * logprobs).sum()
    if "varentropy" in output.extras:
        apart = logprobs.where(~logprobs.isneginf(), 0.0)
        mean = (logprobs.exp() * apart).sum()
        output.extras["varentropy"][0] = (logprobs.exp() * (apart - mean) ** 2).sum()
    if "margin" in output.extras:
        best = values.sort(descending=True).values
        margin = best[0] - best[1] if len(best) > 1 else torch.inf
        output.extras["margin"][0] = margin if is_valid else torch.nan
    if output.given is not None:
        _fill_given(values, logprobs, output.given, is_valid=is_valid)


def _fill_given(values: Tensor, logprobs: Tensor, given: GivenLogprobs, *, is_valid: bool) -> None:
    for entry in range(int(given.offsets[0]), int(given.offsets[1])):
        token_id = int(given.token_ids[entry])
        given.logprobs[entry] = logprobs[token_id]
        given.ranks[entry] = is_valid * (1 + (values > values[token_id]).sum())
