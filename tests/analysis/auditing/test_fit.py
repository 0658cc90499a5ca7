"""Which distribution numbers are of, and which cause explains those that are of none, on rows made here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from logprobe.analysis.auditing.fit import (
    Fitted,
    allowance_of,
    distance,
    errors_of,
    fit,
    judge,
    rounding_of,
)
from logprobe.analysis.auditing.forms import Ask
from logprobe.analysis.auditing.report import Findings
from logprobe.analysis.auditing.rows import Group
from logprobe.analysis.distributions import tempered

if TYPE_CHECKING:
    from collections.abc import Callable

    from logprobe.analysis.measures import Floats

SIZE, NUM_ROWS, NUM_TOP = 80, 24, 5
TOKENS: Any = SimpleNamespace(show=str)
MAX_NATS = 1e-3


def group_of(
    told: Callable[[Floats], Floats],
    params: dict[str, Any] | None = None,
    *,
    where: str = "completion",
    num_top: int = NUM_TOP,
    seed: int = 0,
) -> Group:
    """Rows of a model, and what a server tells of them that changes rows by `told`."""
    rng = np.random.default_rng(seed)
    rows = tempered(rng.normal(scale=2.5, size=(NUM_ROWS, SIZE)), 1).astype(np.float32)
    ids = tuple(int(one) for one in rng.integers(SIZE, size=NUM_ROWS))
    numbers = told(rows.astype(np.float64))
    best = np.argsort(-numbers, axis=1)[:, :num_top]
    token_ids = np.concatenate([np.array(ids)[:, None], best], axis=1)
    t = np.repeat(np.arange(NUM_ROWS), 1 + num_top)
    ask = Ask(form="echo" if where == "prompt" else "completions", prompt="p", params=params or {})
    return Group(
        ask,
        rows,
        ids,
        t=t,
        token_ids=token_ids.ravel(),
        theirs=numbers[t, token_ids.ravel()],
        is_chosen=np.arange(len(t)) % (1 + num_top) == 0,
    )


def judged(group: Group, max_nats: float = MAX_NATS) -> tuple[Fitted, dict[str, Any]]:
    fitted = fit([group], TOKENS)
    assert fitted is not None
    findings = Findings()
    judge(fitted, findings, max_nats)
    return fitted, {one.kind: one for one in findings.listed()}


def cut(rows: Floats, k: int) -> Floats:
    return np.where(rows >= np.sort(rows, axis=1)[:, -k][:, None], rows, -np.inf)


@pytest.mark.parametrize(
    ("params", "told", "name"),
    [
        ({"temperature": 0.5}, lambda rows: rows, "raw"),
        ({"temperature": 0.5}, lambda rows: tempered(rows, 0.5), "temperature"),
        ({"top_k": 4}, lambda rows: cut(rows, 4), "kept"),
        ({"top_k": 4}, lambda rows: tempered(cut(rows, 4), 1), "renormalised"),
        (
            {"temperature": 0.5, "top_k": 4},
            lambda rows: tempered(cut(rows, 4), 0.5),
            "temperature+renormalised",
        ),
    ],
)
def test_a_distribution_that_was_asked_is_named_and_nothing_is_wrong(
    params: dict[str, Any], told: Callable[[Floats], Floats], name: str
) -> None:
    fitted, found = judged(group_of(told, params))
    assert fitted.name == name
    assert found == {}
    assert fitted.errors.max() < 1e-6


def test_penalties_and_biases_are_told_apart() -> None:
    params = {"frequency_penalty": 0.5, "presence_penalty": 0.25, "logit_bias": {"3": 4.0}}

    def penalised(rows: Floats) -> Floats:
        logits, ids = rows.copy(), group_of(lambda rows: rows).ids
        for t in range(NUM_ROWS):
            for token_id in set(ids[:t]):
                logits[t, token_id] -= 0.25 + 0.5 * ids[:t].count(token_id)
        return logits

    def biased(rows: Floats) -> Floats:
        logits = rows.copy()
        logits[:, 3] += 4
        return logits

    assert judged(group_of(lambda rows: tempered(penalised(rows), 1), params))[0].name == "penalised"
    assert judged(group_of(lambda rows: tempered(biased(rows), 1), params))[0].name == "masked"
    both = judged(group_of(lambda rows: tempered(biased(penalised(rows)), 1), params))
    assert both[0].name == "masked+penalised"
    assert both[1] == {}


def over_reported(rows: Floats) -> Floats:
    best = np.sort(rows, axis=1)[:, -NUM_TOP:]
    return rows - np.log(np.exp(best).sum(axis=1))[:, None]


@pytest.mark.parametrize(
    ("told", "kind", "correction"),
    [
        (lambda rows: tempered(rows, 0.7), "temperature-unasked", "0.7"),
        (lambda rows: tempered(rows, 1.4), "temperature-unasked", "1.4"),
        (over_reported, "renormalised-unasked", "log_kept_mass"),
        (lambda rows: rows / np.log(2), "log-base", "1.4427"),
        (lambda rows: rows / np.log(10), "log-base", "0.4343"),
        (np.exp, "probabilities", "logarithm"),
    ],
)
@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_a_cause_is_named_through_the_noise_of_a_low_precision(
    told: Callable[[Floats], Floats], kind: str, correction: str, noise: float
) -> None:
    spread = np.random.default_rng(1).normal(scale=noise, size=(NUM_ROWS, SIZE))
    _, found = judged(group_of(lambda rows: told(rows) * np.exp(spread * 0.1)), 1e-3 if not noise else 0.05)
    assert kind in found
    assert correction in (found[kind].correction or "")
    assert "does-not-fit" not in found


def test_a_temperature_is_told_without_alternatives() -> None:
    _, found = judged(group_of(lambda rows: tempered(rows, 0.7), num_top=0))
    assert [*found] == ["temperature-unasked"]
    assert "0.7" in found["temperature-unasked"].title


@pytest.mark.parametrize("by", [1, -1])
def test_numbers_of_the_neighbour_are_shifted(by: int) -> None:
    group = group_of(lambda rows: rows, where="prompt", num_top=0)
    group.theirs = np.roll(group.theirs, -by)
    _, found = judged(group)
    assert [*found] == ["shifted"]


def test_noise_alone_has_no_cause() -> None:
    spread = np.random.default_rng(2).normal(scale=0.1, size=(NUM_ROWS, SIZE))
    fitted, found = judged(group_of(lambda rows: rows + spread))
    assert [*found] == ["does-not-fit"]
    assert fitted.name == "raw"
    assert judged(group_of(lambda rows: rows + spread), max_nats=1.0)[1] == {}


def test_zeros_and_floors_are_filled_in() -> None:
    for number in (0.0, -9999.0, -20.0):
        group = group_of(lambda rows: rows)
        group.theirs[group.is_chosen & (group.t % 2 == 0)] = number
        _, found = judged(group)
        assert [*found] == ["filled-in"]
        assert found["filled-in"].count == NUM_ROWS // 2


@pytest.mark.parametrize(
    ("rounded", "name"),
    [
        (lambda numbers: np.round(numbers, 2), "2 decimals"),
        (
            lambda numbers: (numbers.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32),
            "bfloat16",
        ),
        (lambda numbers: numbers.astype(np.float16), "float16"),
        (lambda numbers: numbers.astype(np.float32), None),
        (lambda numbers: numbers, None),
    ],
)
def test_a_grid_is_seen_and_allowed_for(rounded: Callable[[Floats], Any], name: str | None) -> None:
    numbers = -np.random.default_rng(3).exponential(size=200) * 4
    told = rounded(numbers).astype(np.float64)
    assert rounding_of(told) == name
    if name is not None:
        assert np.all(np.abs(told - numbers) <= allowance_of(name, told))


def test_the_impossible_is_near_the_impossible_alone() -> None:
    theirs, ours = np.array([-9999.0, -np.inf, -9999.0, -1.0]), np.array([-np.inf, -np.inf, -5.0, -np.inf])
    assert distance(theirs, ours).tolist() == [0, 0, 5, 3]


def test_errors_are_those_of_all_numbers() -> None:
    group = group_of(lambda rows: rows)
    high, low = group.theirs[1:3]
    group.theirs[1:3] = low, high
    fitted = fit([group], TOKENS)
    assert fitted is not None
    errors = errors_of(fitted)
    assert (errors.distribution, errors.count) == ("raw", NUM_ROWS * (1 + NUM_TOP))
    assert errors.worst == pytest.approx(high - low)
    assert errors.mean == pytest.approx(2 * (high - low) / errors.count)


def test_noise_in_half_of_the_rows_is_of_no_cause() -> None:
    def noisy(rows: Floats) -> Floats:
        shift = np.random.default_rng(4).uniform(-1, 1, rows.shape)
        shift[13:] = 0
        return np.minimum(rows + np.sign(shift) * 0.025 + shift * 0.025, -1e-6)

    fitted, found = judged(group_of(noisy, num_top=4))
    assert fitted.name == "raw"
    assert {*found} == {"does-not-fit"}
