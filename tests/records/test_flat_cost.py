"""What a record costs in memory and objects, and readers beside its one writer."""

from __future__ import annotations

import gc
import threading
from itertools import repeat
from typing import Any

import numpy as np
import pytest

from logprobe.records import FlatLogprobs


@pytest.mark.parametrize(("vocab_size", "limit"), [(65_536, 6.0), (151_936, 8.0)])
@pytest.mark.parametrize("add", ["rows", "row", "fast", "dict"])
def test_regular_rows_cost_the_entries_alone(
    rng: np.random.Generator, as_dicts: Any, vocab_size: int, limit: float, add: Any
) -> None:
    n, k = 2000, 20
    top = np.argsort(rng.random((n, 400)), axis=1)[:, :k] * (vocab_size // 400) + (vocab_size - 1) % 400
    top[0, 0] = vocab_size - 1
    logprobs = -np.sort(rng.exponential(3, (n, k)).astype(np.float32), axis=1)
    places = rng.integers(0, k, n)
    is_inside = rng.random(n) < 0.7
    rows = np.arange(n)
    ids = np.column_stack([np.where(is_inside, top[rows, places], rows % 19 + 1), top]).astype(np.int32)
    chosen = np.where(is_inside, logprobs[rows, places], np.float32(-20))
    ranks = np.where(is_inside, places + 1, rng.integers(k + 1, vocab_size, n))
    values = np.column_stack([chosen, logprobs])
    flat = FlatLogprobs()
    if add == "rows":
        flat.append_rows(ids, values, ranks)
    for row in range(n if add != "rows" else 0):
        if add == "row":
            flat.append_rows(ids[row : row + 1], values[row : row + 1], ranks[row : row + 1])
        elif add == "fast":
            flat.append_fast(
                ids[row].tolist(), values[row].tolist(), [ranks[row], *range(1, k + 1)], repeat(None)
            )
        else:
            flat.append(as_dicts(ids[row : row + 1], values[row : row + 1], ranks[row : row + 1])[0])
    assert flat.nbytes / flat.num_entries <= limit
    assert flat == as_dicts(ids, values, ranks) or add == "fast"


def test_the_number_of_objects_under_garbage_collection_does_not_grow_with_positions(step: Any) -> None:
    flat, arrays = FlatLogprobs([None]), step(50, 20, 100)
    flat.append_rows(*arrays)
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(100):
        flat.append_rows(*arrays)
    gc.collect()
    assert len(gc.get_objects()) - before <= 2
    assert len(flat) == 5051


def test_a_reader_sees_a_prefix_and_no_torn_row(step: Any, as_dicts: Any) -> None:
    arrays = step(400, 20, 100)
    plain = as_dicts(*arrays)
    flat, done, wrong = FlatLogprobs(), threading.Event(), []

    def read() -> None:
        while not done.is_set():
            seen = list(flat)
            if seen != plain[: len(seen)]:
                wrong.append(len(seen))
            ids = list(flat.token_ids)
            if ids != all_ids[: len(ids)]:
                wrong.append(-len(ids))

    whole = FlatLogprobs()
    whole.append_rows(*arrays)
    all_ids = list(whole.token_ids)
    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for row in range(400):
        flat.append_rows(*(column[row : row + 1] for column in arrays))
    done.set()
    for reader in readers:
        reader.join()
    assert wrong == []
    assert flat == plain
