"""The sampler with rows changed by processors: they are sampled from, and other rows are unaffected."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from logprobe.sampling import Sampler, SamplingParams

WIDTH = 60


def rows_of(num_rows: int, seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 3, (num_rows, WIDTH)).astype(np.float32))


@pytest.mark.parametrize("num_changed", [1, 3, 6])
@pytest.mark.parametrize("seed", range(5))
def test_changed_rows_are_drawn_from_and_reported_as_processed(num_changed: int, seed: int) -> None:
    raw, changed = rows_of(6, seed), rows_of(num_changed, 100 + seed)
    changed[0, :40] = -torch.inf
    rng = np.random.default_rng(seed)
    params = [
        SamplingParams(
            temperature=float(rng.choice([0.0, 0.6, 1.3])),
            top_k=int(rng.choice([0, 5])),
            top_p=float(rng.choice([1.0, 0.8])),
            logprobs=int(rng.choice([0, 4, -1])),
            logprobs_mode="both",
        )
        for _ in range(6)
    ]
    uniforms = rng.random(6)
    kept = raw.clone()
    got = Sampler().sample(raw, params, uniforms, changed)
    assert torch.equal(raw, kept)
    assert got.logprobs is not None
    assert got.processed_logprobs is not None
    for row in range(6):
        own = changed[row : row + 1] if row < num_changed else raw[row : row + 1]
        want = Sampler().sample(own, params[row : row + 1], uniforms[row : row + 1])
        assert want.processed_logprobs is not None
        assert got.sampled_token_ids[row] == want.sampled_token_ids[0]
        assert got.is_valid[row]
        width = int(want.num_logprobs[0]) + 1
        ours, theirs = got.processed_logprobs.logprobs[row], want.processed_logprobs.logprobs[0]
        assert np.array_equal(ours[:width], theirs[:width])
        expected = raw[row, got.sampled_token_ids[row]] - raw[row].double().logsumexp(0)
        assert float(got.logprobs.logprobs[row, 0]) == pytest.approx(float(expected), abs=1e-5)
