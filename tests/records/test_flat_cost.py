"""Memory and objects of a record, and concurrent readers with its one writer."""

from __future__ import annotations

import gc
import threading
from itertools import repeat
from typing import Any

import numpy as np
import pytest

from logprobe.records import FlatLogprobs, Logprob


def with_texts(position: dict[int, Logprob]) -> dict[int, Logprob]:
    return {
        token_id: Logprob(value.logprob, value.rank, str(token_id)) for token_id, value in position.items()
    }


@pytest.mark.parametrize(("vocab_size", "limit"), [(65_536, 6.4), (151_936, 8.6)])
@pytest.mark.parametrize("add", ["rows", "row", "fast", "fast with texts", "dict", "dict with texts"])
def test_regular_rows_cost_little_more_than_their_entries(
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
        elif add.startswith("fast"):
            texts = map(str, ids[row].tolist()) if add == "fast with texts" else repeat(None)
            flat.append_fast(ids[row].tolist(), values[row].tolist(), [ranks[row], *range(1, k + 1)], texts)
        else:
            [position] = as_dicts(ids[row : row + 1], values[row : row + 1], ranks[row : row + 1])
            flat.append(with_texts(position) if add == "dict with texts" else position)
    assert flat.nbytes / flat.num_entries <= limit
    if add == "fast":
        assert flat.token_ids == ids.ravel().tolist()
        return
    plain = as_dicts(ids, values, ranks)
    if add == "fast with texts":
        assert flat.decoded_tokens == list(map(str, ids.ravel().tolist()))
        assert [list(position) for position in flat] == [list(position) for position in plain]
    elif add == "dict with texts":
        assert flat == list(map(with_texts, plain))
    else:
        assert flat == plain


def num_objects(record: FlatLogprobs) -> int:
    """Count the GC-tracked objects reachable from a record (other threads create objects as well)."""
    seen: set[int] = set()
    found, new = [], [record]
    while new:
        new = [one for one in new if gc.is_tracked(one) and not isinstance(one, type) and id(one) not in seen]
        seen.update(map(id, new))
        found += new  # keeps them alive, so that their ids stay unique
        new = gc.get_referents(*new)
    return len(seen)


def test_the_number_of_objects_under_garbage_collection_does_not_grow_with_positions(step: Any) -> None:
    flat, arrays = FlatLogprobs([None]), step(50, 20, 100)
    flat.append_rows(*arrays)
    gc.collect()
    before = num_objects(flat)
    for _ in range(100):
        flat.append_rows(*arrays)
    gc.collect()
    assert num_objects(flat) - before <= 8  # one per block of 64 KiB or more
    assert len(flat) == 5051


def test_rows_that_wait_are_no_objects_either() -> None:
    flat = FlatLogprobs([None])
    gc.collect()
    before = num_objects(flat)
    for row in range(3000):
        flat.append_fast([row, row, 1], [-1.0, -1.0, -2.0], [1, 1, 2], ["a", "a", "b"])
    gc.collect()
    assert num_objects(flat) - before <= 30
    assert flat.num_entries == 9000


def test_objects_of_a_record_are_seen() -> None:
    flat = FlatLogprobs([None])
    before = num_objects(flat)
    flat.info = [[] for _ in range(100)]  # type: ignore[assignment]
    assert num_objects(flat) - before >= 100


@pytest.mark.parametrize("add", ["rows", "fast"])
def test_a_reader_sees_a_prefix_and_no_torn_row(step: Any, as_dicts: Any, add: str) -> None:
    arrays = step(400, 20, 100)
    plain = as_dicts(*arrays)
    if add == "fast":
        plain = list(map(with_texts, plain))
    flat, done, wrong = FlatLogprobs(), threading.Event(), []

    def read() -> None:
        while not done.is_set():
            seen = list(flat)
            if seen != shown[: len(seen)]:
                wrong.append(len(seen))
            ids = list(flat.token_ids)
            if ids != all_ids[: len(ids)]:
                wrong.append(-len(ids))

    def fill(record: FlatLogprobs) -> None:
        for row in range(400):
            ids, logprobs, ranks = (column[row : row + 1] for column in arrays)
            if add == "rows":
                record.append_rows(ids, logprobs, ranks)
            else:
                of_rank = [int(ranks[0]), *range(1, 21)]
                record.append_fast(ids[0].tolist(), logprobs[0].tolist(), of_rank, map(str, ids[0].tolist()))

    whole = FlatLogprobs()
    fill(whole)
    all_ids, shown = list(whole.token_ids), list(whole)
    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    fill(flat)
    done.set()
    for reader in readers:
        reader.join()
    assert wrong == []
    assert [list(position) for position in flat] == [list(position) for position in plain]
    assert flat == whole
