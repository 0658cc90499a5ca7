"""The sampler: each row gets its own parameters, as if it were alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from logprobe.sampling import Sampler, SamplingParams

WIDTH = 60


def logits_of(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 3, (num_rows, WIDTH)).astype(np.float32))


def report(rows: Any, row: int, stage: str) -> dict[str, Any] | None:
    """Return what one row of a step reports at one stage."""
    is_raw = stage == "raw"
    indices = rows.logprobs_rows if is_raw else rows.processed_rows
    numbers = rows.logprobs if is_raw else rows.processed_logprobs
    index = int(indices[row])
    if index < 0:
        return None
    width = int(rows.num_logprobs[row]) + 1
    return {
        "ids": numbers.token_ids[index, :width].tolist(),
        "logprobs": numbers.logprobs[index, :width].tolist(),
        "rank": int(numbers.ranks[index]),
    }


asked = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.4, 1.0, 2.0]),
    top_k=st.sampled_from([0, -1, 1, 7, WIDTH, 10**30]),
    top_p=st.sampled_from([1.0, 0.7, 1e-300]),
    min_p=st.sampled_from([0.0, 0.1, 1e-300]),
    logprobs=st.sampled_from([None, 0, 3, -1, 10_000]),
    logprobs_mode=st.sampled_from(["raw_logprobs", "processed_logprobs", "both"]),
    best_of=st.sampled_from([None, 2]),
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(params=st.lists(asked, min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_a_row_gives_the_same_beside_others_as_alone(params: list[SamplingParams], seed: int) -> None:
    logits = logits_of(len(params), seed)
    uniforms = np.random.default_rng(seed + 1).random(len(params))
    together = Sampler().sample(logits, params, uniforms)
    for row, one in enumerate(params):
        alone = Sampler().sample(logits[row : row + 1], [one], uniforms[row : row + 1])
        assert together.sampled_token_ids[row] == alone.sampled_token_ids[0]
        for stage in ("raw", "processed"):
            assert report(together, row, stage) == report(alone, 0, stage)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(params=asked, seed=st.integers(0, 1000))
def test_both_stages_equal_plain_torch(params: SamplingParams, seed: int) -> None:
    logits = logits_of(1, seed)
    rows = Sampler().sample(logits.clone(), [params], np.array([0.5]))
    token_id = int(rows.sampled_token_ids[0])
    wants_raw = params.picks_best or (
        params.logprobs is not None and params.logprobs_mode != "processed_logprobs"
    )
    raw = report(rows, 0, "raw")
    assert (raw is not None) == wants_raw
    if raw is not None:
        want = logits[0].double().log_softmax(-1)
        assert raw["ids"][0] == token_id
        assert raw["logprobs"] == pytest.approx(want[raw["ids"]].tolist(), abs=1e-5)
        assert raw["rank"] == 1 + int((logits[0] > logits[0, token_id]).sum())
    processed = report(rows, 0, "processed")
    assert (processed is not None) == (params.logprobs is not None and params.logprobs_mode != "raw_logprobs")
    if processed is not None:
        want = plain_processed(logits[0].double(), params)
        assert processed["logprobs"] == pytest.approx(want[processed["ids"]].tolist(), abs=1e-4)
        assert np.isfinite(processed["logprobs"][0])
        if params.logprobs == -1:
            assert np.exp(processed["logprobs"][1:]).sum() == pytest.approx(1, abs=1e-5)


def plain_processed(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Apply the numbered steps of the sampler one after another, each with a separate sort."""
    if params.temperature == 0:
        return logits.log_softmax(-1)
    logits = logits / params.temperature
    order = logits.argsort(descending=True)
    is_kept = torch.ones(WIDTH, dtype=torch.bool)
    if params.top_k > 0:
        is_kept[order[params.top_k :]] = False
    probabilities = logits.masked_fill(~is_kept, -torch.inf).softmax(-1)
    if params.top_p < 1:
        before = probabilities[order].cumsum(0) - probabilities[order]
        is_kept[order[before >= params.top_p]] = False
    is_kept &= probabilities >= params.min_p * probabilities.max()
    return logits.masked_fill(~is_kept, -torch.inf).log_softmax(-1)


def test_sampling_leaves_the_logits_as_they_were() -> None:
    logits = logits_of(3)
    before = logits.clone()
    params = [SamplingParams(logprobs=2, logprobs_mode="both", top_k=3, temperature=0.5)] * 3
    Sampler().sample(logits, params, np.full(3, 0.3))
    assert torch.equal(logits, before)


def test_a_row_that_is_not_finite_leaves_its_neighbours_numbers_alone() -> None:
    logits = logits_of(3)
    params = [SamplingParams(logprobs=2, logprobs_mode="both", top_k=3)] * 3
    uniforms = np.full(3, 0.3)
    want = Sampler().sample(logits, params, uniforms)
    logits[1, 5] = torch.nan
    got = Sampler().sample(logits, params, uniforms)
    assert got.is_valid == [True, False, True]
    for row in (0, 2):
        assert report(got, row, "raw") == report(want, row, "raw")
        assert report(got, row, "processed") == report(want, row, "processed")
