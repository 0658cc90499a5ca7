"""The extraction kernels against their float64 reference, over shapes, dtypes and values of logits."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from logprobe.errors import ParameterError
from logprobe.kernels import extract, threads
from logprobe.kernels.extraction import reference
from logprobe.records.rows import KERNEL_EXTRAS, DeviceRows
from logprobe.records.values import top_indices

VOCABS = [1, 2, 100, 1023, 1024, 1025, 8193, 50272]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ABSOLUTE, RELATIVE = (
    2e-6,
    1.2e-7,
)  # nats; relative: half a unit in the last place of the float32 that is returned

ALL = dict.fromkeys(KERNEL_EXTRAS, True)


def normal(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator) * 3


def heavy_ties(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return torch.randint(-2, 3, shape, generator=generator).float()


def masked(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    logits = normal(shape, generator)
    logits[:, 1:] = logits[:, 1:].where(torch.rand(shape, generator=generator)[:, 1:] < 0.01, -torch.inf)
    return logits


def signed_zeros(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return torch.randint(-1, 2, shape, generator=generator).float() * torch.tensor(-0.0).copysign(
        normal(shape, generator)
    ) + torch.tensor(-0.0)


def subnormals(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return torch.randint(-5, 6, shape, generator=generator).float() * 2.0**-149


def huge(shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    return torch.randint(-2, 3, shape, generator=generator).float() * 1e4


FILLINGS = [normal, heavy_ties, masked, signed_zeros, subnormals, huge]


def assert_same(got: DeviceRows, want: DeviceRows) -> None:
    assert np.array_equal(got.is_valid, want.is_valid)
    assert np.array_equal(got.ranks, want.ranks)
    assert np.array_equal(got.num_logprobs, want.num_logprobs)
    close(got.lse, want.lse)
    for row, num in enumerate(want.num_logprobs.tolist()):
        assert np.array_equal(got.token_ids[row, : num + 1], want.token_ids[row, : num + 1])
        close(got.logprobs[row, : num + 1], want.logprobs[row, : num + 1])
    assert got.extras.keys() == want.extras.keys()
    for name, column in want.extras.items():
        close(got.extras[name], column)
    assert (got.given is None) == (want.given is None)
    if got.given is not None and want.given is not None:
        assert np.array_equal(got.given.offsets, want.given.offsets)
        assert np.array_equal(got.given.token_ids, want.given.token_ids)
        assert np.array_equal(got.given.ranks, want.given.ranks)
        close(got.given.logprobs, want.given.logprobs)


def close(got: Any, want: Any) -> None:
    exact = want.astype(np.float64)
    np.testing.assert_allclose(got.astype(np.float64), exact, rtol=RELATIVE, atol=ABSOLUTE, equal_nan=True)


def compare(logits: Any, chosen_ids: Any, k: object, given_ids: object = None) -> None:
    got = extract(logits, chosen_ids, k, given_ids=given_ids, **ALL)
    want = reference.extract(logits, chosen_ids, k, given_ids=given_ids, dtype=np.float64, **ALL)
    assert_same(got, want)


@pytest.mark.parametrize("fill", FILLINGS, ids=lambda fill: fill.__name__)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", VOCABS)
def test_every_number_equals_the_float64_twin(
    vocab_size: int, dtype: torch.dtype, fill: Callable[[tuple[int, int], torch.Generator], Tensor]
) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = fill((5, vocab_size), generator).to(dtype)
    chosen_ids = torch.randint(vocab_size, (5,), generator=generator)
    chosen_ids[0] = logits[0].argmax()
    given_ids = [torch.randint(vocab_size, (n,), generator=generator) for n in (0, 1, 7, 60, 400)]
    given_ids[3] = torch.cat([given_ids[3], logits[3].float().topk(min(60, vocab_size)).indices])
    # Any k of the vocabulary's size sorts a whole row, so small vocabularies suffice.
    whole = (vocab_size, vocab_size + 1) if vocab_size < 10_000 else ()
    for k in (0, 1, 20, 1000, *whole, -1):
        compare(logits, chosen_ids, k, given_ids)


@pytest.mark.parametrize("batch", [1, 5, 16])
def test_each_row_may_have_its_own_k(batch: int) -> None:
    generator = torch.Generator().manual_seed(batch)
    logits = normal((batch, 5000), generator)
    k = torch.tensor([0, -1, 20, 1, 1000, 6000, 39, 40, 41, 250, 251, 0, 0, 3, 2, 1])[:batch]
    compare(logits, torch.randint(5000, (batch,), generator=generator), k)


def test_a_vocabulary_of_262144_stays_within_tolerance() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.cat(
        [normal((1, 262144), generator), torch.randn(1, 262144, generator=generator) * 0.1 + 30]
    )
    compare(logits, torch.tensor([5, 262143]), torch.tensor([20, -1]), [[1, 2, 3], np.arange(200)])


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_any_small_row_equals_the_twin(data: st.DataObject) -> None:
    finite = st.floats(-300, 300, width=16) | st.just(-torch.inf) | st.sampled_from([0.0, -0.0, 1.0])
    values = data.draw(st.lists(finite, min_size=1, max_size=70))
    if max(values) == -torch.inf:
        values[0] = 0.0
    logits = torch.tensor([values * data.draw(st.integers(1, 40))])
    ids = st.integers(0, logits.shape[1] - 1)
    compare(logits, torch.tensor([data.draw(ids)]), data.draw(st.integers(-1, 100)), data.draw(st.lists(ids)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_views_need_no_copy_by_the_caller(dtype: torch.dtype) -> None:
    base = normal((8, 3000), torch.Generator().manual_seed(1)).to(dtype)
    for view in (base[::2], base[:, 7:2000], base[:, ::3], base.T[5:9], base[:1].expand(4, -1)):
        compare(view, torch.arange(len(view)), 20)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_arrays_may_have_any_strides(dtype: Any) -> None:
    base = np.random.default_rng(1).normal(0, 3, (8, 3000)).astype(dtype)
    row = np.broadcast_to(base[:1], (4, 3000))
    for view in (base[::-2], base[:, ::-1], base[:, 7:2000:3], base.T[5:9], row, base[:, :1]):
        compare(view, np.arange(len(view)) % view.shape[1], 20)


@pytest.mark.parametrize(
    "logits", [np.zeros((1, 2)), np.zeros((1, 2), ">f4"), np.zeros((1, 2), np.int32), [[0.0]]]
)
def test_arrays_of_other_dtypes_are_refused(logits: Any) -> None:
    with pytest.raises(ParameterError, match="logits"):
        extract(logits, [0], 1)


def test_ranks_count_the_strictly_greater_only() -> None:
    got = extract(torch.tensor([[1.0, 3.0, 3.0, 2.0, 1.0]]), [4], -1, given_ids=[1, 2, 3, 0, 3])
    assert got.ranks.tolist() == [4]
    assert got.token_ids.tolist() == [[4, 1, 2, 3, 0, 4]]
    assert got.given is not None
    assert got.given.ranks.tolist() == [1, 1, 3, 4, 3]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 500, 1023, 1024, 2999])
def test_a_row_with_nan_or_infinity_is_flagged_alone(dtype: torch.dtype, bad: float, place: int) -> None:
    logits = normal((3, 3000), torch.Generator().manual_seed(2)).to(dtype)
    logits[1, place] = bad
    compare(logits, torch.tensor([1, 2, 3]), 20, [0, 5, 5])
    got = extract(logits, [1, 2, 3], 20, given_ids=[0, 5])
    assert got.is_valid.tolist() == [True, False, True]
    assert np.isnan(got.logprobs[1]).all()
    assert got.ranks[1] == 0
    assert got.token_ids[1].tolist() == [2] + [0] * 20


@pytest.mark.parametrize("bits", [0x7F800001, -0x7FFFFF, 0x7FFFFFFF, -1])
def test_a_nan_of_any_payload_is_found_even_among_minus_infinities(bits: int) -> None:
    logits = torch.full((2, 2100), -torch.inf)
    logits[0, 3] = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    logits[1, 3] = 1.0
    got = extract(logits, [3, 3], 2)
    assert got.is_valid.tolist() == [False, True]


def test_a_row_of_nothing_but_minus_infinity_is_flagged() -> None:
    logits = torch.full((2, 50), -torch.inf)
    logits[1, 7] = -5.0
    compare(logits, torch.tensor([0, 7]), 50)
    got = extract(logits, [0, 7], 3, entropy=True)
    assert got.is_valid.tolist() == [False, True]
    assert got.logprobs[1, 0] == 0.0
    assert got.entropy is not None
    assert got.entropy[1].item() == pytest.approx(0.0, abs=1e-30)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_results_are_the_same_bits_for_every_batch_and_thread_count(num_threads: int) -> None:
    logits = normal((16, 9001), torch.Generator().manual_seed(3))
    chosen_ids = torch.arange(16)
    alone = [extract(logits[row : row + 1], chosen_ids[row : row + 1], 30, **ALL) for row in range(16)]
    before = threads.num_threads()
    threads.set_num_threads(num_threads)
    try:
        got = extract(logits, chosen_ids, 30, **ALL)
    finally:
        threads.set_num_threads(before)
    assert np.array_equal(got.logprobs, np.concatenate([one.logprobs for one in alone]))
    assert np.array_equal(got.lse, np.concatenate([one.lse for one in alone]))
    for name, column in got.extras.items():
        assert np.array_equal(column, np.concatenate([one.extras[name] for one in alone]))


def test_varentropy_and_margin_change_no_bit_of_the_entropy() -> None:
    logits = normal((16, 9001), torch.Generator().manual_seed(4))
    few, all_of_them = extract(logits, [0] * 16, 1, entropy=True), extract(logits, [0] * 16, 1, **ALL)
    assert np.array_equal(few.lse, all_of_them.lse)
    assert np.array_equal(few.extras["entropy"], all_of_them.extras["entropy"])


@pytest.mark.parametrize(
    ("row", "margin", "varentropy"),
    [
        ([1.0, 4.0, 4.0, 0.0], 0.0, None),
        ([1.0, 4.0, 3.5, 0.0], 0.5, None),
        ([0.0, -torch.inf, -torch.inf], torch.inf, 0.0),
        ([2.0] * 2049, 0.0, 0.0),
        ([2.0], torch.inf, 0.0),
        ([torch.log(torch.tensor(3.0)).item(), 0.0], 1.0986123, 3 / 16 * 1.0986123**2),
        ([2.0, torch.nan], torch.nan, torch.nan),
    ],
)
@pytest.mark.parametrize("k", [0, 2, -1])
def test_margin_and_varentropy_of_rows_worked_by_hand(
    row: list[float], margin: float, varentropy: float | None, k: int
) -> None:
    got = extract(torch.tensor([row]), [0], k, varentropy=True, margin=True).extras
    assert got["margin"].item() == pytest.approx(margin, nan_ok=True)
    if varentropy is not None:
        assert got["varentropy"].item() == pytest.approx(varentropy, abs=1e-12, rel=1e-6, nan_ok=True)


def test_a_narrow_row_leaves_the_columns_of_its_wide_neighbour_alone() -> None:
    got = extract(torch.zeros(2, 50), [0, 0], [2, 50])
    assert got.token_ids.shape == (2, 51)
    assert got.num_logprobs.tolist() == [2, 50]
    assert got.token_ids[1].tolist() == [0, *range(50)]


def test_one_list_of_given_ids_serves_all_rows_and_none_is_empty() -> None:
    logits = normal((3, 90), torch.Generator().manual_seed(4))
    shared = extract(logits, [0, 0, 0], 0, given_ids=np.array([4, 4, 9]))
    rows = extract(logits, [0, 0, 0], 0, given_ids=[[4, 4, 9]] * 3)
    assert_same(shared, rows)
    some = extract(logits, [0, 0, 0], 0, given_ids=[None, [5], None])
    assert some.given is not None
    assert some.given.offsets.tolist() == [0, 0, 1, 1]
    nothing = extract(logits, [0, 0, 0], 0, given_ids=[])
    assert nothing.given is not None
    assert nothing.given.offsets.tolist() == [0, 0, 0, 0]


def test_no_rows_give_no_rows() -> None:
    got = extract(torch.empty(0, 7), [], 3, given_ids=[])
    assert got.token_ids.shape == (0, 1)


@pytest.mark.parametrize(
    ("parameter", "logits", "chosen_ids", "k", "given_ids"),
    [
        ("logits", torch.zeros(5), [0], 1, None),
        ("logits", torch.zeros(2, 0), [0, 0], 1, None),
        ("logits", torch.zeros(2, 5).long(), [0, 0], 1, None),
        ("logits", torch.zeros(2, 5).double(), [0, 0], 1, None),
        ("logits", np.zeros((2, 5)), [0, 0], 1, None),
        ("chosen_ids", torch.zeros(2, 5), [0], 1, None),
        ("chosen_ids", torch.zeros(2, 5), [0, 5], 1, None),
        ("chosen_ids", torch.zeros(2, 5), [0, -1], 1, None),
        ("chosen_ids", torch.zeros(2, 5), [0.0, 1.0], 1, None),
        ("k", torch.zeros(2, 5), [0, 0], -2, None),
        ("k", torch.zeros(2, 5), [0, 0], [1, 2, 3], None),
        ("k", torch.zeros(2, 5), [0, 0], 1.5, None),
        ("given_ids", torch.zeros(2, 5), [0, 0], 1, [5]),
        ("given_ids", torch.zeros(2, 5), [0, 0], 1, [[1], [2], [3]]),
        ("given_ids", torch.zeros(2, 5), [0, 0], 1, [[1], [-1]]),
        ("given_ids", torch.zeros(2, 5), [0, 0], 1, [[[1]], None]),
        ("given_ids", torch.zeros(2, 5), [0, 0], 1, [["a"], None]),
    ],
)
def test_wrong_arguments_are_named(
    parameter: str, logits: Tensor, chosen_ids: object, k: object, given_ids: object
) -> None:
    with pytest.raises(ParameterError) as error:
        extract(logits, chosen_ids, k, given_ids=given_ids)
    assert error.value.parameter == parameter


@pytest.mark.parametrize("name", ["entropi", "log_kept_mass"])
def test_a_column_that_no_kernel_gives_is_refused_by_name(name: str) -> None:
    with pytest.raises(ParameterError) as error:
        extract(torch.zeros(2, 5), [0, 0], 1, **{name: True})
    assert error.value.parameter == name


@pytest.mark.parametrize("fill", [normal, heavy_ties, masked, signed_zeros, subnormals])
@pytest.mark.parametrize("k", [0, 1, 20, 1000, 5000])
def test_the_hosts_choice_of_the_k_largest_is_the_kernels(
    fill: Callable[[tuple[int, int], torch.Generator], Tensor], k: int
) -> None:
    rows = fill((3, 3000), torch.Generator().manual_seed(k))
    top = extract(rows, [0] * 3, k).token_ids[:, 1:]
    for row, ids in zip(rows.numpy(), top.tolist(), strict=True):
        assert top_indices(row, k).tolist() == ids


def test_ties_are_put_in_the_order_of_the_ids_that_are_given() -> None:
    values, token_ids = np.array([1.0, 2.0, 2.0, 0.0, 2.0]), np.array([3, 9, 4, 1, 7])
    assert top_indices(values, 2, token_ids).tolist() == [2, 4]


@pytest.mark.parametrize("spread", [1, 3, 6])
def test_the_normaliser_is_off_by_nothing_that_adds_up_over_a_text(spread: int) -> None:
    logits = torch.randn((256, 49_152), generator=torch.Generator().manual_seed(spread)) * spread
    errors = extract(logits, np.zeros(256, np.int32), 0).logprobs[:, 0].astype(np.float64)
    errors -= (logits[:, 0].double() - logits.double().logsumexp(-1)).numpy()
    assert abs(errors.mean()) < 3e-7  # torch's float32 log_softmax has 2e-6 at a spread of 6
