"""The compiled sampling kernel against its reference and against the definition of each truncation."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from logprobe.kernels.draw.api import draw, truncated_
from logprobe.kernels.draw.params import Drawn, DrawParams
from logprobe.kernels.draw.reference import draw_reference

LAST_UNIFORM = float(np.nextafter(1.0, 0.0))
EPSILON = 1e-5  # the two implementations sum and exponentiate in different precision


def draw_params(num_rows: int, **columns: Any) -> DrawParams:
    fields = {"temperatures": 1.0, "top_ks": 0.0, "top_ps": 1.0, "min_ps": 0.0, "uniforms": 0.5} | columns
    arrays = {
        name: np.broadcast_to(
            np.asarray(value, np.float64 if name == "uniforms" else np.float32), num_rows
        ).copy()
        for name, value in fields.items()
    }
    return DrawParams(**arrays)


def kept_ids(values: np.ndarray, drawn: Drawn, row: int) -> list[int]:
    """Return the ids with nonzero weight that a truncation keeps."""
    cut, cut_id = drawn.cut_logits[row], drawn.cut_ids[row]
    is_kept = (values > cut) | ((values == cut) & (np.arange(len(values)) <= cut_id))
    return np.flatnonzero(is_kept & (values > -np.inf)).tolist()


@st.composite
def cases(draw_from: Any) -> tuple[torch.Tensor, DrawParams]:
    num_rows = draw_from(st.integers(1, 4))
    width = draw_from(st.sampled_from([1, 2, 5, 40, 1023, 1024, 1025, 3000]))
    rng = np.random.default_rng(draw_from(st.integers(0, 2**32)))
    logits = rng.normal(0, draw_from(st.sampled_from([0.1, 2, 20])), (num_rows, width))
    if draw_from(st.booleans()):
        logits = np.round(logits * 2) / 2  # ties
    logits[rng.random(logits.shape) < draw_from(st.sampled_from([0, 0, 0.5, 0.99]))] = -np.inf
    logits[:, rng.integers(width)] = 1.0  # at least one token remains

    def column(*values: float) -> list[float]:
        return draw_from(st.lists(st.sampled_from(values), min_size=num_rows, max_size=num_rows))

    params = draw_params(
        num_rows,
        temperatures=column(0, 1e-6, 0.3, 1, 1.7, 1e6),
        top_ks=column(0, 0, 1, 3, 50, width, width + 7),
        top_ps=column(1, 1, 1e-6, 0.3, 0.9, 0.9999),
        min_ps=column(0, 0, 1e-4, 0.2, 1),
        uniforms=column(0, 0.1, 0.5, 0.77, LAST_UNIFORM),
    )
    return torch.from_numpy(logits.astype(np.float32)), params


def shifted(params: DrawParams) -> list[DrawParams]:
    """Return the settings shifted by a rounding error in each direction."""
    factors = (1, 1 - EPSILON, 1 + EPSILON)
    return [
        replace(
            params, top_ps=(params.top_ps * p).astype(np.float32), min_ps=(params.min_ps * m).astype("f4")
        )
        for p, m in itertools.product(factors, factors)
    ]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(case=cases())
def test_the_compiled_draw_keeps_and_picks_what_its_plain_twin_does(
    case: tuple[torch.Tensor, DrawParams],
) -> None:
    logits, params = case
    got = draw(logits, params)
    wants = [draw_reference(logits, near) for near in shifted(params)]
    for row, values in enumerate(logits.numpy()):
        assert got.is_valid[row]
        kept = kept_ids(values, got, row)
        assert kept in [kept_ids(values, want, row) for want in wants]
        token_id = int(got.token_ids[row])
        temperature = float(params.temperatures[row])
        if temperature == 0:
            assert token_id == values.argmax()
            continue
        assert token_id in kept
        weights = np.exp((values[kept].astype(np.float64) - values.max()) / temperature)
        sums = weights.cumsum() / weights.sum()
        place = kept.index(token_id)
        before = 0.0 if place == 0 else sums[place - 1]
        assert before - EPSILON <= params.uniforms[row] <= sums[place] + EPSILON


def test_a_token_without_weight_is_never_drawn_at_the_ends_of_the_unit_interval() -> None:
    logits = torch.full((2, 5000), -torch.inf)
    logits[:, 2000:3000] = torch.linspace(-3, 3, 1000)
    got = draw(logits, draw_params(2, uniforms=[0.0, LAST_UNIFORM]))
    assert got.token_ids.tolist() == [2000, 2999]


@pytest.mark.parametrize("seed", range(20))
def test_the_last_uniform_number_draws_a_token_that_is_kept(seed: int) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(0, 3, (50, 4000)).astype(np.float32))
    logits[:, 1500:] = -torch.inf  # whole blocks without weight follow the last token
    got = draw(logits, draw_params(50, uniforms=LAST_UNIFORM))
    assert ((got.token_ids >= 0) & (got.token_ids < 1500)).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 700, 2999])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_is_named_and_leaves_the_others_alone(
    value: float, place: int, temperature: float
) -> None:
    logits = torch.from_numpy(np.random.default_rng(0).normal(0, 2, (3, 3000)).astype(np.float32))
    params = draw_params(3, temperatures=temperature, top_ks=5, uniforms=[0.2, 0.4, 0.6])
    alone = draw(logits, params)
    logits[1, place] = value
    for twin in (draw, draw_reference):
        got = twin(logits, params)
        assert got.is_valid.tolist() == [True, False, True]
        assert got.token_ids[[0, 2]].tolist() == alone.token_ids[[0, 2]].tolist()


def test_a_row_of_nothing_but_minus_infinity_is_not_valid() -> None:
    logits = torch.full((1, 9), -torch.inf)
    assert not draw(logits, draw_params(1)).is_valid[0]
    assert not draw_reference(logits, draw_params(1)).is_valid[0]


def test_rows_may_be_strided() -> None:
    wide = torch.from_numpy(np.random.default_rng(0).normal(0, 2, (4, 600)).astype(np.float32))
    params = draw_params(4, uniforms=[0.1, 0.3, 0.6, 0.9])
    want = draw(wide[:, :500].contiguous(), params)
    assert draw(wide[:, :500], params).token_ids.tolist() == want.token_ids.tolist()


@pytest.mark.parametrize(
    "truncation", [{}, {"top_ks": 7}, {"top_ps": 0.8}, {"min_ps": 0.05}, {"top_ks": 12, "top_ps": 0.9}]
)
@pytest.mark.parametrize("temperature", [0.7, 1.6])
def test_many_draws_are_distributed_as_the_truncated_softmax(
    truncation: dict[str, float], temperature: float
) -> None:
    rng = np.random.default_rng(7)
    count = 20_000
    row = rng.normal(0, 1.5, 40).astype(np.float32)
    logits = torch.from_numpy(np.tile(row, (count, 1)))
    params = draw_params(count, temperatures=temperature, uniforms=rng.random(count), **truncation)
    got = draw(logits, params)
    kept = kept_ids(
        row, draw_reference(logits[:1], draw_params(1, temperatures=temperature, **truncation)), 0
    )
    weights = np.exp(row[kept].astype(np.float64) / temperature)
    expected = count * weights / weights.sum()
    observed = np.bincount(got.token_ids, minlength=40)
    assert observed.sum() == observed[kept].sum()
    chi_square = float(((observed[kept] - expected) ** 2 / expected).sum())
    freedom = len(kept) - 1
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom) + 5  # five standard deviations


@pytest.mark.parametrize("temperature", [1e-38, 1e-30, 3.4e38])
def test_extreme_temperatures_give_finite_numbers(temperature: float) -> None:
    logits = torch.tensor([[1.0, 30.0, -20.0, -torch.inf, 29.0]])
    params = draw_params(1, temperatures=temperature, uniforms=0.6, min_ps=0.1, top_ps=0.99)
    drawn = draw(logits, params)
    processed = truncated_(logits.clone(), drawn, [0], params.temperatures).double().softmax(-1)
    want = [0, 1, 0, 0, 0] if temperature < 1 else [0.25, 0.25, 0.25, 0, 0.25]
    np.testing.assert_allclose(processed[0].numpy(), want, atol=1e-6)
    assert want[drawn.token_ids[0]] > 0


@settings(max_examples=100, deadline=None, derandomize=True)
@given(case=cases())
def test_processed_logits_are_the_distribution_drawn_from(case: tuple[torch.Tensor, DrawParams]) -> None:
    logits, params = case
    drawn = draw(logits, params)
    rows = list(range(len(logits)))
    processed = truncated_(logits.clone(), drawn, rows, params.temperatures)
    logprobs = processed.double().log_softmax(-1).numpy()
    for row, values in enumerate(logits.numpy()):
        kept = kept_ids(values, drawn, row)
        temperature = float(params.temperatures[row]) or 1.0
        want = np.full(len(values), -np.inf)
        scores = (values[kept].astype(np.float64) - values.max()) / temperature
        want[kept] = scores - np.log(np.exp(scores).sum())
        assert np.exp(logprobs[row]).sum() == pytest.approx(1)
        assert np.isfinite(logprobs[row, drawn.token_ids[row]])
        with np.errstate(invalid="ignore"):
            is_close = np.isclose(logprobs[row], want, atol=1e-4, rtol=1e-5)
        assert (is_close | (logprobs[row] == want)).all()
