"""Reports of differences from float64."""

import numpy as np
import pytest
import torch
from precision import RANGE, extracted, figures, in_float64, lines, log_softmax


def test_each_way_of_the_rest_gives_the_chosen_tokens_log_probabilities() -> None:
    logits = torch.randn((4, 1000), generator=torch.Generator().manual_seed(0))
    chosen = torch.tensor([0, 7, 999, 3])
    want = torch.log(torch.softmax(logits.double(), -1))[range(4), chosen].numpy()
    for way in (log_softmax, in_float64, extracted):
        np.testing.assert_allclose(way(logits, chosen).numpy(), want, atol=1e-5)


def test_differences_add_up_and_are_told_a_token() -> None:
    found = figures(np.array([1e-6, 3e-6, -1e-6, 1e-6]), np.array([1, 2, RANGE, RANGE + 1]))
    assert found["sum"] == pytest.approx(4e-6)
    assert (found["mean"], found["worst"]) == pytest.approx((1e-6, 3e-6))
    assert found["worst_by_position"] == pytest.approx([3e-6, 1e-6])
    measured = {"num_scored": 4, "logprob": -12.0, "differences": {"ours": found}}
    table, _, by_position = "\n".join(lines(measured)).partition("\n\n")
    assert "+4.0e-06  +1.0e-06    1.4e-06   3.0e-06" in table
    assert by_position.endswith("3.0e-06  1.0e-06")
