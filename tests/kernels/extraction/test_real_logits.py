"""Extraction on a real model's logits, whose spread and ties random rows do not have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from logprobe.errors import ModelError
from logprobe.kernels import extract
from logprobe.kernels.extraction import reference
from logprobe.models import load_model, load_tokenizer, resolve
from logprobe.records.rows import KERNEL_EXTRAS

pytestmark = pytest.mark.real_model
NUM_ROWS = 64
KS = [0, 5, 20, 1000, -1]
TOLERANCE = 2e-6  # nats, of the double-precision computation ...
ROUNDING = 2.0**-23  # ... and relative, of the float32 results
WIDE = 262_144
ALL = dict.fromkeys(KERNEL_EXTRAS, True)
TEXT = Path(__file__).parents[3] / "examples" / "lighthouse.txt"


@pytest.fixture(scope="module")
def scored() -> tuple[torch.Tensor, torch.Tensor]:
    """Return (NUM_ROWS, vocabulary) float32 logits by transformers, and the token that follows each row."""
    try:
        files = resolve("smollm2")
    except ModelError as error:
        pytest.skip(f"smollm2 cannot be had: {error}")
    token_ids = torch.tensor(load_tokenizer(files).encode(TEXT.read_text(encoding="utf-8"))[: NUM_ROWS + 1])
    model = load_model(files, dtype=torch.float32, attn_implementation="sdpa")
    with torch.inference_mode():
        logits = model(token_ids[None, :-1]).logits[0]
    assert len(logits) == NUM_ROWS
    return logits, token_ids[1:]


def assert_same(logits: torch.Tensor, chosen_ids: torch.Tensor, k: int) -> None:
    given = chosen_ids[:7]
    got = extract(logits, chosen_ids, k, given_ids=given, **ALL)
    want = reference.extract(logits, chosen_ids, k, given_ids=given, **ALL, dtype=np.float64)
    assert got.is_valid.all()
    assert np.array_equal(got.token_ids, want.token_ids)
    assert np.array_equal(got.ranks, want.ranks)
    assert got.given is not None
    assert want.given is not None
    assert np.array_equal(got.given.ranks, want.given.ranks)
    for name, mine, exact in (
        ("logprobs", got.logprobs, want.logprobs),
        ("lse", got.lse, want.lse),
        *((name, got.extras[name], want.extras[name]) for name in KERNEL_EXTRAS),
        ("given", got.given.logprobs, want.given.logprobs),
    ):
        assert mine is not None
        assert exact is not None
        # Squared distances (nats**2) give weight to far tokens, where the exponential is least exact.
        rounding = 1e-6 if name == "varentropy" else ROUNDING
        np.testing.assert_allclose(mine.astype(np.float64), exact, rtol=rounding, atol=TOLERANCE)


@pytest.mark.parametrize("k", KS)
def test_rows_of_a_real_model_equal_the_float64_twin(
    scored: tuple[torch.Tensor, torch.Tensor], k: int
) -> None:
    assert_same(*scored, k)


@pytest.mark.parametrize("k", KS)
def test_rows_of_262144_real_logits_equal_the_float64_twin(
    scored: tuple[torch.Tensor, torch.Tensor], k: int
) -> None:
    logits, chosen_ids = scored
    # Six rows concatenated: the same token's logits in several contexts, with ties across the copies.
    wide = logits[:24].reshape(4, -1)[:, :WIDE]
    assert wide.shape == (4, WIDE)
    tied = torch.cat([logits[:1], logits[:1], logits[1:5].reshape(1, -1)], dim=1)[:, :WIDE]
    assert_same(torch.cat([wide, tied]), chosen_ids[:5] + WIDE // 2, k)
