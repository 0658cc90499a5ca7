"""A log-probability processor's containers and functions, called as in its document."""

import inspect
from typing import Any

import numpy as np
import pytest
import torch

from logprobe.compat.logprobs_processor import (
    AsyncCPUTransfer,
    LogprobsLists,
    LogprobsTensors,
    ModelRunnerOutput,
    SamplerOutput,
    StreamingLogprobsCollector,
    TokenLogprob,
    TopLogprobs,
    batch_logprobs_to_cpu_rust,
    extract_top_k_logprobs_rust,
)
from logprobe.kernels import extract_top_k_logprobs

ROW = np.log(np.array([0.1, 0.5, 0.15, 0.25], np.float32))
CALLS = [
    (LogprobsLists, ["num_sequences"]),
    (LogprobsLists.append, ["seq_idx", "logprobs"]),
    (LogprobsLists.get_sequence, ["seq_idx"]),
    (LogprobsLists.get_all, []),
    (LogprobsLists.total_tokens, []),
    (LogprobsTensors.create_empty, ["batch_size", "max_seq_len", "vocab_size", "top_k", "sparse"]),
    (LogprobsTensors.set_position, ["batch_idx", "position", "logprobs", "token_id"]),
    (LogprobsTensors.to_lists, ["tokenizer"]),
    (TopLogprobs.from_array, ["position", "logprobs", "token_ids", "tokens", "selected_idx", "k"]),
    (AsyncCPUTransfer, ["num_buffers", "max_workers"]),
    (AsyncCPUTransfer.submit_transfer, ["tensor", "transfer_id"]),
    (AsyncCPUTransfer.get_result, ["transfer_id", "timeout"]),
    (AsyncCPUTransfer.shutdown, []),
    (SamplerOutput.get_token_ids, ["batch_idx"]),
    (ModelRunnerOutput.create, ["sampled_token_ids", "req_ids", "logprobs"]),
    (ModelRunnerOutput.get_output_for_request, ["req_id"]),
    (StreamingLogprobsCollector, ["buffer_size"]),
    (StreamingLogprobsCollector.register_callback, ["req_id", "callback"]),
    (StreamingLogprobsCollector.unregister, ["req_id"]),
    (StreamingLogprobsCollector.add, ["req_id", "logprobs"]),
    (StreamingLogprobsCollector.flush, ["req_id"]),
    (StreamingLogprobsCollector.flush_all, []),
    (extract_top_k_logprobs_rust, ["logprobs", "k"]),
    (batch_logprobs_to_cpu_rust, ["logprobs", "token_ids"]),
]


@pytest.mark.parametrize(("call", "names"), CALLS, ids=lambda one: getattr(one, "__qualname__", ""))
def test_arguments_stand_in_the_documents_order(call: Any, names: list[str]) -> None:
    own = [name for name in inspect.signature(call).parameters if name != "self"]
    assert own[: len(names)] == names


def test_containers_are_made_by_position() -> None:
    best = [TokenLogprob(7, "cat", -0.5), TokenLogprob(8, "dog", -1.5)]
    top = TopLogprobs(0, 7, "cat", -0.5, best)
    assert (top.top_k, sorted([best[1], best[0]])) == (best, best)
    output = SamplerOutput(np.array([7, 9]), None, None, 1, 0.7, 0.9, 40, np.array([0, 1]))
    assert (output.batch_size, output.temperature, output.top_p, output.top_k) == (2, 0.7, 0.9, 40)
    step = ModelRunnerOutput(output, ["a", "b"], {"a": 0, "b": 1}, None, 10, 20, 30)
    assert (step.forward_time_ns, step.sample_time_ns, step.peak_memory_bytes) == (10, 20, 30)
    token_ids, logprobs = step.get_output_for_request("b") or ((), ())
    assert (list(token_ids), logprobs) == ([9], None)
    assert step.get_output_for_request("c") is None


def test_lists_serve_as_arrays() -> None:
    assert SamplerOutput([7, 9]).batch_size == 2
    assert SamplerOutput([[7, 9]]).get_token_ids(0).tolist() == [7, 9]
    top = TopLogprobs.from_array(3, ROW.tolist(), [0, 1, 2, 3], ["a", "b", "c"], 3, 2)
    assert [one.token for one in top.top_k] == ["b", "<3>"]
    tensors = LogprobsTensors.create_empty(1, 2, 4)
    tensors.set_position(0, 0, ROW.tolist(), 2)
    assert tensors.to_lists().get_sequence(0)[0].logprob == ROW[2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_rows_of_any_float_are_taken(dtype: torch.dtype) -> None:
    row = torch.from_numpy(ROW).to(dtype)
    tensors = LogprobsTensors.create_empty(1, 1, 4, top_k=2)
    tensors.set_position(0, 0, row, 1)
    [top] = tensors.to_lists().get_sequence(0)
    assert [one.logprob for one in top.top_k] == row.float()[[1, 3]].tolist()
    assert top.top_k == TopLogprobs.from_array(0, row, torch.arange(4), None, 1, 2).top_k
    values, ids = extract_top_k_logprobs_rust(row, 2)
    assert (values.tolist(), ids.tolist()) == (row[[1, 3]].tolist(), [1, 3])


def test_a_position_without_a_rank_keeps_its_place() -> None:
    lists = LogprobsLists(2)
    lists.append(1, TopLogprobs(0, 7, "cat", -0.5, [TokenLogprob(7, "cat", -0.5)]))
    assert (len(lists), lists.total_tokens()) == (2, 1)
    assert lists.get_all()[1][0].rank == 0
    [position] = lists.slice_request(1)
    assert position is not None
    assert (position[7].rank, position[7].decoded_token) == (1, "cat")


@pytest.mark.parametrize("sparse", [False, True])
def test_what_is_set_comes_back(sparse: Any) -> None:
    tensors = LogprobsTensors.create_empty(2, 3, 4, 2, sparse)
    tensors.set_position(0, 0, ROW, 3)
    tensors.set_position(0, 1, ROW, 0)
    assert (tensors.batch_size, tensors.seq_lens, tensors.top_k) == (2, [2, 0], 2)
    first, second = tensors.to_lists().get_sequence(0)
    assert (first.token_id, second.token_id) == (
        3,
        0,
    )  # includes the chosen token if it is not among the best
    assert [one.token_id for one in second.top_k] == [1, 3]


def test_the_names_of_the_accelerated_functions_have_the_documents_order() -> None:
    rows = np.stack([ROW, ROW[::-1]])
    top_logprobs, top_indices = extract_top_k_logprobs_rust(rows, 2)
    assert top_indices.tolist() == [[1, 3], [2, 0]]
    np.testing.assert_array_equal(top_logprobs, np.take_along_axis(rows, top_indices, 1))
    ids, logprobs = extract_top_k_logprobs(rows, 2)  # this library's order
    np.testing.assert_array_equal(ids, top_indices)
    np.testing.assert_array_equal(logprobs, top_logprobs)
    token_ids = torch.tensor([[0, 1, 2, 3]] * 2)
    sent = batch_logprobs_to_cpu_rust(torch.from_numpy(rows.copy()), token_ids)
    np.testing.assert_array_equal(sent[0], rows)
    np.testing.assert_array_equal(sent[1], token_ids)
    assert batch_logprobs_to_cpu_rust(torch.ones(2, 3).bfloat16(), torch.zeros(2, dtype=torch.int64))[
        0
    ].shape == (2, 3)


def test_two_buffers_take_tensors_and_arrays() -> None:
    transfer = AsyncCPUTransfer(2, 2)
    assert transfer.submit_transfer(ROW, 0).result().tolist() == ROW.tolist()
    transfer.submit_transfer(torch.from_numpy(ROW), 1)
    array = transfer.get_result(0, 5.0)
    assert type(array) is np.ndarray
    np.testing.assert_array_equal(array, ROW)
    np.testing.assert_array_equal(transfer.get_result(1), ROW)
    with pytest.raises(KeyError):
        transfer.get_result(1)
    transfer.shutdown()


def test_a_step_goes_through_a_transfer_and_to_its_consumers() -> None:
    tensors = LogprobsTensors.create_empty(1, 3, 4, sparse=True)
    for position in range(3):
        tensors.set_position(0, position, ROW, position)
    with AsyncCPUTransfer() as transfer:
        transfer.submit_transfer(tensors.logprobs, 0)
        assert transfer.get_result(0).shape == (3, 5)
    step = ModelRunnerOutput.create(np.array([2]), ["a"], tensors)
    got = step.get_output_for_request("a")
    assert got is not None
    assert got[1] == tensors.to_lists().get_sequence(0)[-1]
    batches: list[list[TopLogprobs]] = []
    collector: StreamingLogprobsCollector[TopLogprobs] = StreamingLogprobsCollector(2)
    collector.register_callback("a", batches.append)
    for one in tensors.to_lists().get_sequence(0):
        collector.add("a", one)
    assert [len(batch) for batch in batches] == [2]
    collector.flush("a")
    collector.flush_all()
    collector.unregister("a")
    assert [one.position for batch in batches for one in batch] == [0, 1, 2]
