from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest

from logprobe.records import Logprob

if TYPE_CHECKING:
    from collections.abc import Callable

Array = npt.NDArray[Any]
Step = tuple[Array, Array, Array]


def draw_step(
    rng: np.random.Generator, n: int, k: int, vocab_size: int, *, num_levels: int | None = None
) -> tuple[Array, Array, Array]:
    """Return ids and logprobs (n, k + 1), chosen first, and ranks (n,); few `num_levels` make ties."""
    logits = rng.normal(size=(n, vocab_size)) * 3
    if num_levels:
        logits = np.round(logits * num_levels / 6)
    logits = logits.astype(np.float32)
    logprobs = (logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))).astype(
        np.float32
    )
    logprobs = np.minimum(logprobs, 0)
    order = np.argsort(-logits, axis=1, kind="stable")
    k = min(k, vocab_size)
    likely = order[np.arange(n), rng.integers(0, max(k, 1), n)]
    chosen = np.where(rng.random(n) < 0.8, likely, rng.integers(0, vocab_size, n))
    ids = np.concatenate([chosen[:, None], order[:, :k]], axis=1).astype(np.int32)
    ranks = 1 + (logits > logits[np.arange(n), chosen][:, None]).sum(axis=1)
    return ids, np.take_along_axis(logprobs, ids.astype(np.int64), axis=1), ranks.astype(np.int32)


def dicts_of(ids: Array, logprobs: Array, ranks: Array) -> list[dict[int, Logprob] | None]:
    """Return what `append_rows` with the same arrays must read as."""
    positions: list[dict[int, Logprob] | None] = []
    for row in range(len(ids)):
        position: dict[int, Logprob] = {}
        for column, token_id in enumerate(ids[row].tolist()):
            rank = int(ranks[row]) if column == 0 else column
            position.setdefault(token_id, Logprob(float(logprobs[row, column]), rank))
        positions.append(position)
    return positions


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20_240_607)


@pytest.fixture
def step(rng: np.random.Generator) -> Callable[..., Step]:
    """Return `step(n, k, vocab_size, num_levels=None)`, which makes a step's arrays."""
    return partial(draw_step, rng)


@pytest.fixture
def as_dicts() -> Callable[..., list[dict[int, Logprob] | None]]:
    """Return the plain reference of `append_rows`."""
    return dicts_of
