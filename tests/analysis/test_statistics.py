"""llama.cpp's statistics, against its own formulas."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest

from logprobe.analysis.statistics import figures

if TYPE_CHECKING:
    from collections.abc import Callable


def mean_and_uncertainty(total: float, squares: float, count: int) -> tuple[float, float]:
    """Compute like `kl_divergence` in llama.cpp's tools/perplexity/perplexity.cpp."""
    mean = total / count
    return mean, math.sqrt((squares / count - mean * mean) / (count - 1))


def percentile(values: list[float], fraction: float) -> float:
    """Compute a percentile like llama.cpp."""
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    whole = int(place)
    rest = place - whole
    return (1 - rest) * ordered[whole] + rest * ordered[min(whole + 1, len(ordered) - 1)]


@pytest.fixture
def numbers() -> tuple[list[float], list[float], list[float], list[bool]]:
    draw = np.random.default_rng(3)
    base = -draw.exponential(2, 500)
    other = base + draw.normal(-0.02, 0.2, 500)
    return (
        base.tolist(),
        np.minimum(other, 0).tolist(),
        draw.exponential(0.02, 500).tolist(),
        list(draw.random(500) < 0.93),
    )


def test_each_figure_is_llama_cpps(
    numbers: tuple[list[float], list[float], list[float], list[bool]],
) -> None:
    base, other, kl, same = numbers
    count = len(base)
    found = figures(np.array(base), np.array(other), np.array(kl), np.array(same))
    nll, nll_base = [-x for x in other], [-x for x in base]
    q, dq = mean_and_uncertainty(sum(nll), sum(x * x for x in nll), count)
    p, dp = mean_and_uncertainty(sum(nll_base), sum(x * x for x in nll_base), count)
    products = sum(x * y for x, y in zip(nll, nll_base, strict=True))
    covariance = (products / count - q * p) / (count - 1)
    ratio_error = math.sqrt(dq * dq + dp * dp - 2 * covariance)
    expected: dict[str, tuple[float, float | None]] = {
        "Mean PPL(Q)": (math.exp(q), math.exp(q) * dq),
        "Mean PPL(base)": (math.exp(p), math.exp(p) * dp),
        "Cor(ln(PPL(Q)), ln(PPL(base)))": (100 * covariance / (dq * dp), None),
        "Mean ln(PPL(Q)/PPL(base))": (q - p, ratio_error),
        "Mean PPL(Q)/PPL(base)": (math.exp(q - p), math.exp(q - p) * ratio_error),
    }
    unc, unc_base = math.exp(q) * dq, math.exp(p) * dp
    cov = math.exp(q) * math.exp(p) * covariance
    expected["Mean PPL(Q)-PPL(base)"] = (
        math.exp(q) - math.exp(p),
        math.sqrt(unc * unc + unc_base * unc_base - 2 * cov),
    )
    expected["Mean KLD"] = mean_and_uncertainty(sum(kl), sum(x * x for x in kl), count)
    expected["Maximum KLD"] = (max(kl), None)
    expected |= {
        f"{100 * share:.1f}% KLD": (percentile(kl, share), None)
        for share in (0.999, 0.99, 0.95, 0.9, 0.1, 0.05, 0.01, 0.001)
    }
    expected |= {"Median KLD": (percentile(kl, 0.5), None), "Minimum KLD": (min(kl), None)}
    change = [math.exp(x) - math.exp(y) for x, y in zip(other, base, strict=True)]
    mean, error = mean_and_uncertainty(sum(change), sum(x * x for x in change), count)
    expected["Mean Δp"] = (100 * mean, 100 * error)
    expected |= {"Maximum Δp": (100 * max(change), None), "Minimum Δp": (100 * min(change), None)}
    expected |= {
        f"{100 * share:.1f}% Δp": (100 * percentile(change, share), None)
        for share in (0.999, 0.99, 0.95, 0.9, 0.75, 0.25, 0.1, 0.05, 0.01, 0.001)
    }
    expected["Median Δp"] = (100 * percentile(change, 0.5), None)
    square, square_error = mean_and_uncertainty(sum(x**2 for x in change), sum(x**4 for x in change), count)
    rms = math.sqrt(square)
    expected["RMS Δp"] = (100 * rms, 100 * 0.5 / rms * square_error)
    share = sum(same) / count
    expected["Same top p"] = (100 * share, 100 * math.sqrt(share * (1 - share) / (count - 1)))
    assert found.keys() == expected.keys()
    for name, (value, uncertainty) in expected.items():
        assert found[name].value == pytest.approx(value, rel=1e-9), name
        assert found[name].error == (None if uncertainty is None else pytest.approx(uncertainty, rel=1e-6)), (
            name
        )
        is_share = "Δp" in name or name in {"Same top p", "Cor(ln(PPL(Q)), ln(PPL(base)))"}
        assert found[name].unit == ("%" if is_share else None)


@pytest.mark.parametrize("make", [lambda: np.zeros(1), lambda: np.full(3, -np.inf)])
def test_one_position_and_impossible_tokens_have_figures(make: Callable[[], np.ndarray]) -> None:
    values = make()
    found = figures(values, values, np.zeros(len(values)), np.ones(len(values), bool))
    assert found["Mean KLD"].value == 0
    assert found["RMS Δp"].value == 0
    assert found["Same top p"].value == 100
    assert found["Mean KLD"].error == (None if len(values) == 1 else 0)
