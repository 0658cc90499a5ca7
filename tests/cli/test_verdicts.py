"""An audit's lines."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from audit_samples import FAULT, PASSING
from logprobe.analysis.auditing.report import Steadiness
from logprobe.cli import verdicts


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.0, "0"), (2.31, "2.3100"), (3.14e-6, "3.1e-06"), (-0.5, "-0.5000"), (math.inf, "inf")],
)
def test_nats_have_as_many_digits_as_people_compare(value: float, expected: str) -> None:
    assert verdicts.nats(value) == expected


def test_joined_distributions_have_joined_words() -> None:
    assert verdicts.distribution_words("temperature+renormalised") == (
        "after temperature, what truncation kept, renormalized"
    )


def test_evidence_says_where_and_both_numbers() -> None:
    line = verdicts.evidence_words(FAULT.evidence[0])
    assert line.startswith(
        "completion, temperature 0, completion row 0, ' Paris': theirs -0.1234, ours -0.4321; "
    )


def test_a_circumstance_says_how_far_and_from_where() -> None:
    lines = [verdicts.steady_words(row) for row in PASSING.steadiness]
    assert lines == [
        "equal bits",
        "up to 2.0e-06 from row 3 on",
        "equal bits",
        "up to 2.0e-06 from row 64 on",
    ]
    within = Steadiness(circumstance="prompt of 64 tokens", is_equal=True, worst=5e-5)
    assert verdicts.steady_words(within) == "up to 5.0e-05"
    assert verdicts.steadiness_words(PASSING) == (
        "steady in 2 of 4 circumstances; beside 8 others: up to 2.0e-06 from row 3 on"
    )


def test_errors_of_all_asks_are_one_line() -> None:
    (first, second) = PASSING.errors
    both = replace(PASSING, errors=(first, replace(second, mean=7e-6, count=24)))
    assert verdicts.errors_words(both) == "32 numbers: worst 3.0e-06 (echo), mean 5.5e-06"
