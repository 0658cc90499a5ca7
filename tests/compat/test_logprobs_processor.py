from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from logprobe.compat.logprobs_processor import (
    LogprobsLists,
    LogprobsTensors,
    ModelRunnerOutput,
    SamplerOutput,
    TokenLogprob,
    TopLogprobs,
)
from logprobe.errors import ParameterError
from logprobe.kernels import extract
from logprobe.records.rows import EXTRAS
from refusals import raises


def row_of(rng: np.random.Generator, vocab_size: int) -> np.ndarray:
    logits = rng.normal(size=vocab_size) * 3
    return (logits - np.log(np.exp(logits).sum())).astype(np.float32)


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(("vocab_size", "k"), [(1000, 5), (5, 5), (3, 5), (1, 5), (40, 0), (40, 1)])
def test_the_chosen_token_and_its_rank_are_kept_in_both_forms(
    rng: np.random.Generator, sparse: Any, vocab_size: int, k: int, device: str | None
) -> None:
    tensors = LogprobsTensors.create_empty(2, 3, vocab_size, top_k=k, sparse=sparse, device=device)
    assert isinstance(tensors.logprobs, np.ndarray if device is None else torch.Tensor)
    assert tensors.is_sparse is sparse
    values = row_of(rng, vocab_size)
    token_id = int(np.argmin(values))
    tensors.set_position(1, 2, values, token_id)
    rows = tensors.to_lists().get_all()
    assert rows[0] == []
    texts = [f"<{token_id}>" for token_id in range(vocab_size)]
    assert rows[1] == [TopLogprobs.from_array(2, values, np.arange(vocab_size), texts, token_id, k)]
    assert rows[1][0].rank == vocab_size
    if not sparse:
        np.testing.assert_array_equal(tensors.dense_logprobs[5], values)


def test_positions_are_set_without_a_view_of_the_device(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor on a device has no `numpy()`, so the code may only use tensor operations."""
    values = row_of(rng, 30)
    tensors = LogprobsTensors.create_empty(1, 2, 30, device=torch.device("cpu"))
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "numpy", lambda _: pytest.fail("numpy() of a device tensor"))
        tensors.set_position(0, 0, values, 7)
    tensors.set_position(0, 1, torch.from_numpy(values), 7)
    first, second = tensors.to_lists().get_sequence(0)
    assert first.top_k == second.top_k
    assert first.logprob == values[7]
    assert LogprobsTensors.create_empty(2, 3, 40, device="meta").logprobs.device.type == "meta"


@pytest.mark.parametrize("ids", [[[1, 2], [3]], [["a"], ["b"]], [[1.5], [2.0]], [None, 1]])
def test_ids_that_are_no_rows_of_integers_are_named(ids: Any) -> None:
    with raises(ParameterError, parameter="sampled_token_ids"):
        ModelRunnerOutput.create(ids, ["one", "two"])


def test_all_texts_are_decoded_in_one_call(rng: np.random.Generator) -> None:
    class Tokenizer:
        num_calls = 0

        def batch_decode(self, rows: list[list[int]]) -> list[str]:
            self.num_calls += 1
            return [f"t{token_id}" for (token_id,) in rows]

    tensors, tokenizer = LogprobsTensors.create_empty(1, 64, 20), Tokenizer()
    for position in range(64):
        tensors.set_position(0, position, row_of(rng, 20), 3)
    assert {row.token for row in tensors.to_lists(tokenizer).get_sequence(0)} == {"t3"}
    assert tokenizer.num_calls == 1


def test_positions_left_out_give_no_rows(rng: np.random.Generator) -> None:
    tensors = LogprobsTensors.create_empty(1, 10, 20, sparse=True)
    for position in (1, 4, 7):
        tensors.set_position(0, position, row_of(rng, 20), position)
    sequence = tensors.to_lists().get_sequence(0)
    assert [(row.position, row.token_id) for row in sequence] == [(1, 1), (4, 4), (7, 7)]


def test_texts_come_from_the_tokenizer(rng: np.random.Generator) -> None:
    class Tokenizer:
        def decode(self, ids: list[int]) -> str:
            return f"t{ids[0]}"

    tensors = LogprobsTensors.create_empty(1, 1, 20, top_k=2)
    tensors.set_position(0, 0, row_of(rng, 20), 9)
    row = tensors.to_lists(Tokenizer()).get_sequence(0)[0]
    assert row.token == "t9"  # noqa: S105 - a piece of text
    assert [entry.token for entry in row.top_k] == [f"t{entry.token_id}" for entry in row.top_k]


def test_a_row_with_nan_is_flagged_and_its_neighbour_is_not(rng: np.random.Generator) -> None:
    tensors = LogprobsTensors.create_empty(2, 1, 8, top_k=3)
    values = row_of(rng, 8)
    tensors.set_position(0, 0, np.where(np.arange(8) == 4, np.nan, values), 1)
    tensors.set_position(1, 0, values, 1)
    assert tensors.is_valid.tolist() == [False, True]
    flagged, sound = (rows[0] for rows in tensors.to_lists().get_all())
    assert (np.isnan(flagged.logprob), flagged.rank, flagged.top_k) == (True, 0, [])
    assert sound.logprob == values[1]


def test_a_row_of_nothing_but_minus_infinity_is_flagged() -> None:
    tensors = LogprobsTensors.create_empty(1, 1, 3)
    tensors.set_position(0, 0, [-np.inf] * 3, 0)
    assert not tensors.is_valid[0]


@pytest.mark.parametrize(
    ("arguments", "parameter"),
    [
        ((2, 0, np.zeros(4), 0), "batch_idx"),
        ((-1, 0, np.zeros(4), 0), "batch_idx"),
        ((0, 3, np.zeros(4), 0), "position"),
        ((0, 0, np.zeros(5), 0), "logprobs"),
        ((0, 0, np.zeros((1, 4)), 0), "logprobs"),
        ((0, 0, np.array([0, np.inf, 0, 0]), 0), "logprobs"),
        ((0, 0, np.zeros(4), 4), "token_id"),
        ((0, 0, np.zeros(4), -1), "token_id"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(arguments: Any, parameter: Any) -> None:
    tensors = LogprobsTensors.create_empty(2, 3, 4)
    with raises(ParameterError, parameter=parameter):
        tensors.set_position(*arguments)
    assert tensors.to_lists().total_tokens() == 0


@pytest.mark.parametrize("sizes", [(-1, 1, 1, 1), (1, -1, 1, 1), (1, 1, 0, 1), (1, 1, 1, -1)])
def test_a_size_that_cannot_be_is_refused(sizes: Any) -> None:
    with pytest.raises(ParameterError):
        LogprobsTensors.create_empty(*sizes)


def test_rows_of_a_kernel_have_the_verbs_too() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0], [0.0, torch.nan, 0.0]])
    tensors = LogprobsTensors.of(extract(logits, [2, 0], 2, entropy=True, given_ids=[0]))
    sound, flagged = (rows[0] for rows in tensors.to_lists().get_all())
    want = logits[0].double().log_softmax(0)
    assert (sound.token_id, sound.rank, [entry.token_id for entry in sound.top_k]) == (2, 2, [1, 2])
    assert sound.logprob == pytest.approx(float(want[2]), abs=1e-6)
    assert (flagged.rank, flagged.top_k) == (0, [])
    lists = tensors.to_lists()
    assert lists.entropy is not None
    assert float(lists.entropy[0]) == pytest.approx(float(-(want.exp() * want).sum()), abs=1e-6)
    assert lists.log_kept_mass is None
    assert lists.given is not None
    assert lists.given.token_ids.tolist() == [0, 0]


def test_room_for_whole_rows_costs_nothing_until_written() -> None:
    tensors = LogprobsTensors.create_empty(8, 512, 50_000)
    assert tensors.dense_logprobs.shape == (4096, 50_000)
    assert tensors.latest(7) is None


def some_top(position: int, token_id: int = 3, k: int = 2) -> TopLogprobs:
    top = [TokenLogprob(index + 1, f"t{index}", -0.1 * (index + 1)) for index in range(k)]
    return TopLogprobs(position, token_id, "t", -0.3, top, 5)


def test_lists_give_back_what_was_appended() -> None:
    lists = LogprobsLists(2)
    rows = [some_top(0), some_top(4, token_id=1), some_top(9, k=0), some_top(3, k=7)]
    for row in rows:
        lists.append(1, row)
    lists.append(4, rows[0])
    assert len(lists) == 5
    assert lists.total_tokens() == 5
    assert lists.get_sequence(1) == rows
    assert lists.get_sequence(0) == lists.get_sequence(99) == lists.get_sequence(-1) == []
    assert lists.get_all() == [[], rows, [], [], [rows[0]]]
    assert lists.latest(1) == rows[-1]
    assert lists.latest(0) is None


def test_a_request_is_cut_out_with_its_own_k() -> None:
    lists = LogprobsLists()
    lists.append(0, some_top(0, token_id=50, k=2))
    lists.append(1, some_top(0, token_id=50, k=6))
    assert [lists.slice_request(row).num_entries for row in range(2)] == [3, 7]
    assert list(lists.slice_request(0)[0]) == [50, 1, 2]
    with raises(ParameterError, parameter="row"):
        lists.slice_request(2)


@pytest.mark.parametrize("call", [lambda: LogprobsLists(-1), lambda: LogprobsLists().append(-1, some_top(0))])
def test_negative_sequences_are_refused(call: Any) -> None:
    with pytest.raises(ParameterError):
        call()


def test_threads_may_append_at_once() -> None:
    lists = LogprobsLists()
    writers = [
        threading.Thread(target=lambda seq=seq: [lists.append(seq % 3, some_top(n)) for n in range(100)])
        for seq in range(6)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert lists.total_tokens() == 600
    assert all(sorted(row.position for row in rows) == sorted([*range(100)] * 2) for rows in lists.get_all())


@pytest.mark.parametrize("as_lists", [False, True])
def test_a_runner_hands_each_request_its_own_row(rng: np.random.Generator, as_lists: Any) -> None:
    tensors = LogprobsTensors.create_empty(3, 2, 30, top_k=2)
    for batch_idx in (0, 2):
        for position in range(2):
            tensors.set_position(batch_idx, position, row_of(rng, 30), batch_idx)
    logprobs = tensors.to_lists() if as_lists else tensors
    output = ModelRunnerOutput.create(np.array([[5], [6], [7]]), ["a", "b", "c"], logprobs)
    ids, latest = output.get_output_for_request("c")
    assert ids.tolist() == [7]
    assert latest == tensors.to_lists().get_sequence(2)[1]
    assert output.get_output_for_request("b")[1] is None
    assert output.get_output_for_request("d") is None
    assert output.req_id_to_index == {"a": 0, "b": 1, "c": 2}


def test_one_request_reads_its_own_row_alone(rng: np.random.Generator) -> None:
    """Other rows may hold anything, even unreadable data."""
    tensors = LogprobsTensors.create_empty(2, 1, 30)
    tensors.set_position(0, 0, row_of(rng, 30), 3)
    tensors.num_logprobs[1] = 10**9
    tensors.is_set[1] = True
    output = ModelRunnerOutput.create(torch.tensor([5, 6]), ["a", "b"], tensors)
    assert output.get_output_for_request("a")[1].token_id == 3
    assert output.sampler_output.batch_size == 2


def test_sampled_ids_may_be_one_or_many_a_row() -> None:
    assert SamplerOutput(sampled_token_ids=np.array([4, 5])).get_token_ids(1).tolist() == [5]
    assert SamplerOutput(sampled_token_ids=np.array([[4, 5]])).get_token_ids(0).tolist() == [4, 5]
    with raises(ParameterError, parameter="batch_idx"):
        SamplerOutput(sampled_token_ids=np.array([4, 5])).get_token_ids(2)


@pytest.mark.parametrize("req_ids", [["a"], ["a", "a"], ["a", "b", "c"]])
def test_rows_and_requests_must_match(req_ids: Any) -> None:
    with raises(ParameterError, parameter="req_ids"):
        ModelRunnerOutput.create([1, 2], req_ids)


def test_a_further_column_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXTRAS, "novelty", np.dtype(np.float32))
    rows = extract(torch.tensor([[0.0, 1.0], [2.0, 0.0]]), [0, 1], 1, entropy=True)
    novelties = np.array([1.0, 2.0], np.float32)
    tensors = LogprobsTensors.of(replace(rows, extras={**rows.extras, "novelty": novelties}))
    assert np.array_equal(tensors.extras["novelty"], novelties)
    assert tensors.to_lists().novelty.tolist() == [1.0, 2.0]
    assert tensors.entropy is not None


def test_sorting_puts_the_most_likely_first() -> None:
    tokens = [TokenLogprob(1, "a", -2.0), TokenLogprob(2, "b", -0.5), TokenLogprob(3, "c", -1.0)]
    assert [token.token_id for token in sorted(tokens)] == [2, 3, 1]
    assert tokens[1] < tokens[0]


def test_the_best_come_in_order_ties_by_id() -> None:
    row = TopLogprobs.from_array(7, [-1.0, -0.5, -1.0, -3.0], [40, 30, 20, 10], ["d", "c", "b", "a"], 0, k=3)
    assert row == TopLogprobs(
        7,
        40,
        "d",
        -1.0,
        [TokenLogprob(30, "c", -0.5), TokenLogprob(20, "b", -1.0), TokenLogprob(40, "d", -1.0)],
        rank=2,
    )


@pytest.mark.parametrize(("k", "expected"), [(0, 0), (1, 1), (3, 3), (4, 3), (100, 3)])
def test_k_means_k_or_all_there_are(k: int, expected: Any) -> None:
    row = TopLogprobs.from_array(0, [-1.0, -2.0, -np.inf], [1, 2, 3], ["a", "b", "c"], 2, k)
    assert len(row.top_k) == expected
    assert row.token_id == 3
    assert row.rank == 3


@pytest.mark.parametrize("tokens", [None, [], ["a"], ["a", None]])
def test_a_missing_text_shows_the_id(tokens: Any) -> None:
    row = TopLogprobs.from_array(0, [-1.0, -2.0], [11, 12], tokens, 1)
    assert row.token == "<12>"  # noqa: S105 - a piece of text


def test_agrees_with_a_full_sort(rng: np.random.Generator) -> None:
    for _ in range(50):
        logprobs = -np.round(rng.exponential(2, 30), 1)
        ids = rng.permutation(1000)[:30]
        row = TopLogprobs.from_array(0, logprobs, ids, None, 3, k=12)
        twin = sorted(zip(-logprobs, ids, strict=True))[:12]
        assert [(-token.logprob, token.token_id) for token in row.top_k] == twin


@pytest.mark.parametrize(
    ("values", "ids", "selected", "k", "parameter"),
    [
        ([-1.0, np.nan], [1, 2], 0, 1, "logprobs"),
        ([-1.0, np.inf], [1, 2], 0, 1, "logprobs"),
        ([-1.0], [1, 2], 0, 1, "token_ids"),
        ([[-1.0]], [[1]], 0, 1, "token_ids"),
        ([-1.0], [1], 1, 1, "selected_idx"),
        ([-1.0], [1], -1, 1, "selected_idx"),
        ([-1.0], [1], 0, -1, "k"),
    ],
)
def test_a_row_that_cannot_be_ranked_is_refused(
    values: Any, ids: list[int], selected: Any, k: int, parameter: Any
) -> None:
    with pytest.raises(ParameterError) as error:
        TopLogprobs.from_array(0, values, ids, None, selected, k)
    assert error.value.parameter == parameter
