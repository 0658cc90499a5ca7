"""Extraction from tensors on a device without a kernel of its own: on the host, and copied back."""

from __future__ import annotations

import numpy as np
import torch

from logprobe.kernels import extract
from logprobe.kernels.extraction import device
from logprobe.kernels.extraction.api import extract_checked
from logprobe.kernels.extraction.requests import check_requests
from logprobe.records.rows import KERNEL_EXTRAS

CPU = torch.device("cpu")


def test_chunks_of_rows_keep_the_results_of_other_chunks() -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(1))
    given_ids = [[1], [], [2, 3, 4], [5, 5], [39]]
    asked = {"given_ids": given_ids} | dict.fromkeys(KERNEL_EXTRAS, True)
    requests = check_requests((5, 40), [0, 1, 2, 3, 4], 3, **asked)  # type: ignore[arg-type]
    for own in (requests, device.requests_on(requests, CPU)):
        got = device.allocate(own, CPU)
        for start in (0, 2, 4):
            stop = min(start + 2, 5)
            found = extract_checked(logits[start:stop], device.on_host(own.rows(start, stop)))
            device.copy(found, got.rows(start, stop))
        want = extract(logits.numpy(), [0, 1, 2, 3, 4], 3, **asked)  # type: ignore[arg-type]
        assert isinstance(got.logprobs, torch.Tensor)
        for name in ("token_ids", "logprobs", "ranks", "lse", "is_valid"):
            np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
        for name in KERNEL_EXTRAS:
            np.testing.assert_array_equal(got.extras[name], want.extras[name])
        assert got.given is not None
        assert want.given is not None
        np.testing.assert_array_equal(got.given.logprobs, want.given.logprobs)
        np.testing.assert_array_equal(got.given.ranks, want.given.ranks)
