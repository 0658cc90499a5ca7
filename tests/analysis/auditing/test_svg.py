"""Axes: where numbers lie, and which are marked."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logprobe.analysis.auditing.svg import Axis


def test_a_number_lies_between_the_ends_or_at_one() -> None:
    axis = Axis(label="", low=-10.0, high=10.0)
    assert [axis.share(value) for value in (-20.0, -10.0, 0.0, 5.0, 30.0)] == [0.0, 0.0, 0.5, 0.75, 1.0]
    decades = Axis(label="", low=1e-8, high=1.0, is_log=True)
    assert [decades.share(value) for value in (0.0, 1e-8, 1e-4, 1.0)] == pytest.approx([0.0, 0.0, 0.5, 1.0])


@given(st.floats(-1e4, 1e4), st.floats(1e-3, 1e4))
def test_even_marks_are_few_round_and_inside(low: float, width: float) -> None:
    axis = Axis(label="", low=low, high=low + width)
    values = [value for value, _ in axis.ticks()]
    assert 2 <= len(values) <= 6
    assert all(low - 1e-6 * width <= value <= low + width * (1 + 1e-6) for value in values)
    step = (values[-1] - values[0]) / (len(values) - 1)
    mantissa = step / 10 ** math.floor(math.log10(step) + 1e-9)
    assert any(math.isclose(mantissa, nice, rel_tol=1e-3) for nice in (1, 2, 2.5, 5))


def test_marks_of_logarithms_are_powers_of_ten_with_the_low_end_for_zero() -> None:
    axis = Axis(label="", low=1e-8, high=3.0, is_log=True, zero="equal")
    ticks = axis.ticks()
    assert ticks[-1] == (1e-8, "equal")
    assert [text for _, text in ticks[:-1]] == ["1", "0.01", "1e-4", "1e-6"]


def test_named_places_are_marked_by_their_names() -> None:
    assert Axis(label="", low=-0.5, high=1.5, names=["63", "64"]).ticks() == [(0.0, "63"), (1.0, "64")]
