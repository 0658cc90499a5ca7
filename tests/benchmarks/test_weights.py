"""Contestants and targets of bench_weights.py that depend on the processor."""

from types import SimpleNamespace

import bench_weights
import pytest
import torch
from bench_weights import PEAK, forms, speed
from harness import Options

BF16X3 = {"logprobe, bf16x3", "bfloat16 panels, bf16x3"}


@pytest.mark.parametrize("has_tiles", [False, True])
def test_bf16x3_is_timed_and_held_to_the_peak_only_on_processors_with_tiles(
    has_tiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The kernels emulate the tiles where there are none, whatever the benchmark believes.
    monkeypatch.setattr(bench_weights, "library", lambda: SimpleNamespace(has_tiles=has_tiles))
    monkeypatch.setattr(bench_weights, "multiply_adds_per_s", lambda: 1e9)
    layer = torch.nn.Linear(96, 64, bias=False, dtype=torch.bfloat16).float()
    options = Options(is_smoke=True, is_json=True, rounds=1, model="", rivals=())
    with torch.inference_mode():
        figure = speed(forms(torch.nn.Sequential(layer), {}), 32, options)
    assert figure.samples.keys() & BF16X3 == (BF16X3 if has_tiles else set())
    assert bool(figure.notes) != has_tiles
    [peak_ms] = figure.samples[PEAK]
    at_most = {target.against: target.at_most for target in figure.targets if target.at_most is not None}
    assert at_most == (dict.fromkeys(BF16X3, pytest.approx(peak_ms / 2.2)) if has_tiles else {})


def test_floats_that_stay_with_multiply_adds_have_no_contestant() -> None:
    made = forms(torch.nn.Sequential(torch.nn.Linear(96, 64, bias=False)), {})
    assert made.keys() & BF16X3 == {"bfloat16 panels, bf16x3"}
