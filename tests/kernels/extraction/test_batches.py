from typing import Any

import numpy as np
import pytest
import torch

from logprobe.errors import ParameterError
from logprobe.kernels import (
    batch_logprobs_to_host,
    extract_top_k_logprobs,
)


@pytest.mark.parametrize("k", [0, 1, 20, 500, 600, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_top_k_equals_a_stable_sort(k: int, dtype: torch.dtype) -> None:
    logprobs = torch.randn(4, 500, generator=torch.Generator().manual_seed(0)).log_softmax(1).to(dtype)
    want = logprobs.sort(dim=1, descending=True, stable=True)
    ids, values = extract_top_k_logprobs(logprobs, k)
    num = 500 if k < 0 else min(k, 500)
    assert ids.dtype == torch.int32
    assert torch.equal(ids, want.indices[:, :num].int())
    assert torch.equal(values, want.values[:, :num])


def test_top_k_of_a_row_with_nan_is_nan_and_its_neighbour_is_not() -> None:
    logprobs = torch.tensor([[0.0, torch.nan, -1.0], [-3.0, -1.0, -2.0]])
    ids, values = extract_top_k_logprobs(logprobs, 2)
    assert ids.tolist() == [[0, 0], [1, 2]]
    assert values[0].isnan().all()
    assert values[1].tolist() == [-1.0, -2.0]


def test_named_ids_come_to_the_host_with_their_logprobs() -> None:
    logprobs = torch.tensor([[0.0, -1.5, -1.0], [-3.0, -torch.inf, -2.0]], dtype=torch.float16)
    ids, values = batch_logprobs_to_host(logprobs, torch.tensor([[1, 1], [2, 1]]))
    assert (ids.dtype, values.dtype) == (np.int32, np.float32)
    assert ids.tolist() == [[1, 1], [2, 1]]
    assert values.tolist() == [[-1.5, -1.5], [-2.0, -np.inf]]


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
def test_rows_of_either_kind_give_the_same(kind: Any, dtype: Any) -> None:
    values = np.log(np.random.default_rng(3).dirichlet(np.ones(50), 4)).astype(dtype)
    order = np.argsort(-values, axis=1, kind="stable")[:, :5]
    rows = kind(values)
    ids, best = extract_top_k_logprobs(rows, 5)
    assert type(ids) is type(best) is type(rows)
    assert best.dtype == rows.dtype
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_array_equal(best, np.take_along_axis(values, order, axis=1))
    row_ids, row_best = extract_top_k_logprobs(rows[1], 5)
    np.testing.assert_array_equal(row_ids, order[1])
    np.testing.assert_array_equal(row_best, best[1])
    named, there = batch_logprobs_to_host(rows, order)
    assert there.dtype == (np.float64 if dtype is np.float64 else np.float32)
    np.testing.assert_array_equal(there, np.take_along_axis(values, order, axis=1))
    assert batch_logprobs_to_host(rows[1], [7, 9])[1].tolist() == values[1, [7, 9]].tolist()
    assert batch_logprobs_to_host(rows, [1, 2, 3, 4])[1].tolist() == values[range(4), [1, 2, 3, 4]].tolist()
    assert named.dtype == np.int32


def test_float64_tells_apart_what_float32_cannot() -> None:
    rows = np.array([[-1.0, -1.0 + 1e-12, -np.inf], [np.nan, 0.0, 1.0], [np.inf, 0.0, 1.0], [-np.inf] * 3])
    ids, values = extract_top_k_logprobs(rows, 2)
    assert ids.tolist() == [[1, 0], [0, 0], [0, 0], [0, 0]]
    assert values[0].tolist() == [-1.0 + 1e-12, -1.0]
    assert np.isnan(values[1:]).all()


@pytest.mark.parametrize("token_ids", [[0, 1, 2], [[0]], [[0], [3]], [[0], [-1]], [[0.5], [1.0]]])
def test_ids_that_do_not_fit_are_named(token_ids: object) -> None:
    with pytest.raises(ParameterError, match="token_ids"):
        batch_logprobs_to_host(torch.zeros(2, 3), token_ids)


def test_logprobs_that_do_not_fit_are_named() -> None:
    for call in (
        lambda rows: extract_top_k_logprobs(rows, 1),
        lambda rows: batch_logprobs_to_host(rows, [[0]]),
    ):
        with pytest.raises(ParameterError, match="logprobs"):
            call(torch.zeros(1, 2, 3))
