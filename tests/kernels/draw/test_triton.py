"""The sampling kernel on a GPU against its reference; without a GPU in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton has no build for this platform")

from logprobe.kernels.draw import triton as on_gpu
from logprobe.kernels.draw.params import Drawn, DrawParams
from logprobe.kernels.draw.reference import draw_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_ROWS = 24


def params_of(temperatures: Any, uniforms: Any) -> DrawParams:
    whole = np.ones(NUM_ROWS, np.float32)
    return DrawParams(
        np.float32(temperatures) * whole,
        0 * whole,
        whole,
        0 * whole,
        np.float64(uniforms) * whole.astype(float),
    )


def rows(vocab_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = 3 * torch.randn(NUM_ROWS, vocab_size, generator=generator)
    logits[1] = logits[1].round()  # ties
    logits[2, 1:] = -torch.inf
    logits[3, 0] = torch.nan
    logits[4] = -torch.inf
    logits[5, -1] = torch.inf
    logits[6, ::2] = -torch.inf
    logits[7] = 0.0
    logits[8, -1] = -torch.inf
    return logits


def same(got: Drawn, want: Drawn) -> None:
    assert got.is_valid.tolist() == want.is_valid.tolist()
    assert got.token_ids[want.is_valid].tolist() == want.token_ids[want.is_valid].tolist()
    assert got.cut_logits.tolist() == want.cut_logits.tolist()
    assert got.cut_ids.tolist() == want.cut_ids.tolist()


@pytest.mark.parametrize("vocab_size", [1, 70, 2048, 4500])
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 5.0])
def test_draws_are_those_of_the_twin(vocab_size: int, temperature: float) -> None:
    logits, uniforms = rows(vocab_size), np.random.default_rng(0).random(NUM_ROWS)
    uniforms[9] = 0.0
    params = params_of(temperature, uniforms)
    same(on_gpu.draw_rows(logits.to(DEVICE), params), draw_reference(logits, params))


def test_the_largest_uniform_number_draws_a_token_that_has_weight() -> None:
    logits = rows(4500)
    drawn = on_gpu.draw_rows(logits.to(DEVICE), params_of(1.0, np.nextafter(1.0, 0.0)))
    chosen = logits[torch.arange(NUM_ROWS), torch.from_numpy(drawn.token_ids).long()]
    assert (chosen[drawn.is_valid] > -torch.inf).all()


def test_a_row_is_drawn_alike_alone_and_from_a_view() -> None:
    logits, params = rows(3000).to(DEVICE), params_of(1.0, 0.37)
    whole = on_gpu.draw_rows(logits, params)
    for row in (0, 7, 23):
        alone = on_gpu.draw_rows(logits[row : row + 1], params.rows(slice(row, row + 1)))
        assert alone.token_ids[0] == whole.token_ids[row]
    wide = torch.zeros(NUM_ROWS, 3500, device=DEVICE)
    wide[:, :3000] = logits
    assert on_gpu.draw_rows(wide[:, :3000], params).token_ids.tolist() == whole.token_ids.tolist()


@pytest.mark.gpu
def test_truncated_rows_are_drawn_on_the_host() -> None:
    from logprobe.kernels.draw.api import draw

    logits, whole = rows(3000), np.ones(NUM_ROWS, np.float32)
    top_ps = np.where(np.arange(NUM_ROWS) % 3 == 0, np.float32(0.7), np.float32(1))
    params = DrawParams(whole, 0 * whole, top_ps, 0 * whole, np.random.default_rng(1).random(NUM_ROWS))
    got, want = draw(logits.cuda(), params), draw(logits, params)
    assert got.token_ids[want.is_valid].tolist() == want.token_ids[want.is_valid].tolist()
    assert got.cut_ids[want.is_valid].tolist() == want.cut_ids[want.is_valid].tolist()
