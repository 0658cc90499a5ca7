"""The names that a row can have, against the sampler that reports them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from logprobe.analysis.distributions import (
    Shaping,
    distributions,
    fitted_temperature,
    tempered,
)
from logprobe.errors import ParameterError
from logprobe.sampling import SamplingParams
from logprobe.sampling.sampler import Sampler

SHAPES = [
    {"temperature": 0.7},
    {"top_k": 4},
    {"temperature": 0.6, "top_p": 0.8},
    {"temperature": 1.4, "min_p": 0.05},
    {"temperature": 0.9, "top_k": 9, "top_p": 0.7, "min_p": 0.1},
    {"temperature": 0.0, "top_p": 0.5},
]


def logits_of(seed: int, num_rows: int = 6, size: int = 60) -> np.ndarray:
    rows = np.random.default_rng(seed).normal(scale=2.5, size=(num_rows, size)).astype(np.float32)
    rows[0, 7] = rows[0, 3] = rows[0].max()  # a tie at the top
    return rows


@pytest.mark.parametrize("asked", SHAPES)
def test_the_last_name_is_what_the_sampler_draws_from(asked: dict[str, float]) -> None:
    logits = logits_of(0)
    params = SamplingParams(**asked, logprobs=-1, logprobs_mode="both")  # type: ignore[arg-type]
    drawn = Sampler().sample(torch.from_numpy(logits), [params] * len(logits), np.full(len(logits), 0.3))
    raw = tempered(logits, 1)
    named = distributions(raw, Shaping(**asked))  # type: ignore[arg-type]
    processed = drawn.processed_logprobs
    assert processed is not None
    for row in range(len(logits)):
        ids, values = processed.token_ids[row, 1:], processed.logprobs[row, 1:]
        assert [*named.values()][-1][row, ids] == pytest.approx(values, abs=2e-6)


def test_only_what_can_differ_has_a_name() -> None:
    raw = tempered(logits_of(1), 1)
    assert list(distributions(raw, Shaping())) == ["raw"]
    assert list(distributions(raw, Shaping(temperature=0))) == ["raw"]
    assert list(distributions(raw, Shaping(temperature=0.5))) == ["raw", "temperature"]
    assert list(distributions(raw, Shaping(top_k=3))) == ["raw", "kept", "renormalised"]
    names = list(distributions(raw, Shaping(temperature=2, top_p=0.5), {"penalised": raw - 1}))
    assert names[4:] == ["penalised", *(f"penalised+{name}" for name in names[1:4])]


def test_what_is_kept_has_the_numbers_of_the_temperature_and_renormalised_a_mass_of_one() -> None:
    named = distributions(tempered(logits_of(2), 1), Shaping(temperature=0.8, top_k=5))
    is_kept = named["kept"] > -np.inf
    assert is_kept.sum(axis=1).tolist() == [5] * 6
    assert np.array_equal(named["kept"][is_kept], named["temperature"][is_kept])
    assert np.exp(named["renormalised"]).sum(axis=1) == pytest.approx(1)
    assert np.exp(named["raw"]).sum(axis=1) == pytest.approx(1)


def test_changed_logits_need_no_mass_of_one() -> None:
    raw = tempered(logits_of(3), 1)
    biased = raw.copy()
    biased[:, 5] += 3
    named = distributions(raw, Shaping(), {"penalised": biased})
    assert np.exp(named["penalised"]).sum(axis=1) == pytest.approx(1)
    assert named["penalised"][:, 5] - named["penalised"][:, 6] == pytest.approx(3 + raw[:, 5] - raw[:, 6])


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0, 1.9])
def test_a_temperature_is_found_by_the_numbers_it_gives(temperature: float) -> None:
    raw = tempered(logits_of(4), 1)
    ids = np.argsort(-raw, axis=1)[:, :3]
    numbers = np.take_along_axis(tempered(raw, temperature), ids, 1)
    numbers[1, 2] = -np.inf
    best, error = fitted_temperature(raw, ids, numbers)
    assert best == pytest.approx(temperature, rel=1e-4)
    assert error < 1e-4


def test_numbers_of_no_temperature_stay_far_off() -> None:
    raw = tempered(logits_of(5), 1)
    ids = np.argsort(-raw, axis=1)[:, :3]
    noise = np.random.default_rng(6).normal(scale=0.3, size=ids.shape)
    _, error = fitted_temperature(raw, ids, np.take_along_axis(raw, ids, 1) + noise)
    assert error > 0.05
    with pytest.raises(ParameterError, match="no finite number"):
        fitted_temperature(raw, ids, np.full(ids.shape, -np.inf))


@pytest.mark.parametrize("asked", [{"temperature": -1}, {"top_p": 0}, {"min_p": 2}, {"top_k": -2}])
def test_what_cannot_be_asked_is_named(asked: dict[str, float]) -> None:
    with pytest.raises(ParameterError, match=next(iter(asked))):
        Shaping(**asked)  # type: ignore[arg-type]
