"""The soft cap of logits, compared with float64."""

import numpy as np
import pytest

from logprobe.kernels.layers.rows import SOFTCAP_PIECE, softcap_stage

RELATIVE = 4e-7


def logits(num_rows: int, width: int, scale: float) -> np.ndarray:
    values = np.random.default_rng(width).standard_normal((num_rows, width)) * scale
    return values.astype(np.float32)


@pytest.mark.parametrize("width", [1, 17, 300, SOFTCAP_PIECE + 100])
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("scale", [1e-3, 10.0, 1e4])
@pytest.mark.parametrize("cap", [30.0, 0.7])
def test_logits_are_those_of_float64(num_rows: int, width: int, scale: float, cap: float) -> None:
    x = logits(num_rows, width, scale)
    want = cap * np.tanh(x.astype(np.float64) / cap)
    softcap_stage(x, cap).run()
    np.testing.assert_allclose(x, want, rtol=RELATIVE)
    assert (np.abs(x) <= np.float32(cap)).all()


def test_a_number_has_the_same_bits_wherever_it_lies() -> None:
    x = logits(1, SOFTCAP_PIECE + 40, 30.0)
    apart = np.concatenate([x[:, :5], x[:, 5:]], axis=1)
    softcap_stage(x, 30.0).run()
    for start in range(0, apart.shape[1], 7):
        alone = apart[:, start : start + 7].copy()
        softcap_stage(alone, 30.0).run()
        assert np.array_equal(alone, x[:, start : start + 7])


def test_rows_may_lie_in_wider_arrays() -> None:
    wide = logits(4, 50, 30.0)
    before, want = wide.copy(), wide[:, 7:30].copy()
    softcap_stage(want, 30.0).run()
    softcap_stage(wide[:, 7:30], 30.0).run()
    assert np.array_equal(wide[:, 7:30], want)
    assert np.array_equal(wide[:, :7], before[:, :7])
    assert np.array_equal(wide[:, 30:], before[:, 30:])


def test_infinite_logits_reach_the_cap_and_nan_stays() -> None:
    x = np.array([[np.inf, -np.inf, np.nan, 0.0, -0.0] * 5], np.float32)
    softcap_stage(x, 30.0).run()
    want = np.array([[30.0, -30.0, np.nan, 0.0, 0.0] * 5], np.float32)
    np.testing.assert_array_equal(x, want)
