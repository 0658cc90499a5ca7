from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from logprobe import LLM, SamplingParams
from logprobe.config import EngineConfig
from logprobe.errors import ParameterError
from logprobe.processors import BatchState, CaptureLogitsProcessor, GlobalLogprobsCapture
from logprobe.processors.arguments import CaptureArgs

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

ON = CaptureArgs(capture=True)
LIMIT_S = 60


def test_rows_of_tagged_requests_are_kept_by_request_and_position(
    make: Callable[..., Any], row: Callable[..., Any], run: Callable[..., Any], logits: Callable[..., Any]
) -> None:
    processor = make(CaptureLogitsProcessor)
    output: list[int] = []
    rows = [row("a", ON, output=output), row("b", CaptureArgs()), row("c", CaptureArgs(capture="mine"))]
    for step in range(2):
        before = logits(3) + step
        assert torch.equal(run(processor, rows, before), before), "logits pass through"
        expected = torch.log_softmax(before.double(), -1)
        np.testing.assert_allclose(processor.get_logprobs(), expected[0], atol=1e-6)
        np.testing.assert_allclose(processor.get_logprobs(1), expected[2], atol=1e-6)
        np.testing.assert_allclose(processor.get_all_logprobs(), expected[[0, 2]], atol=1e-6)
        output.append(step)
    assert processor.names() == ["a", "mine"]
    assert list(processor.get_rows("a")) == [0, 1]
    assert list(processor.get_rows("mine")) == [0], "a position that is run again is overwritten"
    assert processor.get_rows("b") == {}
    assert processor.get_logprobs(2) is processor.get_logprobs(-3) is None
    assert processor.get_logprobs(-1) is processor.get_logprobs(1)
    assert processor.get_logprobs().dtype == np.float32
    assert not processor.get_logprobs().flags.writeable
    assert processor.is_argmax_invariant()
    processor.clear()
    assert processor.get_logprobs() is None
    assert processor.get_all_logprobs() is None
    assert processor.names() == []


def test_an_update_of_none_says_that_the_rows_are_the_same(
    make: Callable[..., Any], row: Callable[..., Any], logits: Callable[..., Any]
) -> None:
    processor = make(CaptureLogitsProcessor)
    processor.update_state(batch_update=None)
    processor.apply(logits(1))
    assert processor.get_all_logprobs() is None
    processor.update_state(batch_update=BatchState([row("a", ON)]))
    processor.update_state(batch_update=None)
    processor.apply(logits(1))
    assert processor.names() == ["a"]


def test_a_kept_row_does_not_hold_a_whole_batch(
    make: Callable[..., Any], row: Callable[..., Any], run: Callable[..., Any]
) -> None:
    processor = make(CaptureLogitsProcessor)
    run(processor, [row(str(index), ON) for index in range(8)])
    kept = processor.get_logprobs(3)
    base = kept if kept.base is None else kept.base
    assert base.nbytes == kept.nbytes


def test_the_store_is_bounded_and_loses_the_oldest_request_first(
    row: Callable[..., Any], run: Callable[..., Any]
) -> None:
    processor = CaptureLogitsProcessor(EngineConfig(), max_bytes=3 * 10 * 4)
    for index in range(5):
        run(processor, [row(f"r{index}", ON)])
    assert processor.names() == ["r2", "r3", "r4"]
    with pytest.raises(ParameterError, match="max_bytes"):
        CaptureLogitsProcessor(EngineConfig(), max_bytes=0)


def test_rows_read_from_other_threads_are_never_torn(row: Callable[..., Any]) -> None:
    processor = CaptureLogitsProcessor(EngineConfig())
    is_done, has_read = threading.Event(), threading.Event()
    sums: list[float] = []

    def read() -> None:
        while not is_done.is_set():
            rows = processor.get_all_logprobs()
            if rows is not None:
                sums.extend(np.exp(rows.astype(np.float64)).sum(1))
                has_read.set()

    reader = threading.Thread(target=read)
    reader.start()
    generator = torch.Generator().manual_seed(0)
    for position in range(300):
        processor.update_state(BatchState([row("a", ON, output=[0] * position), row("b", ON)]))
        processor.apply(torch.randn(2, 5000, generator=generator) * 10)
        assert has_read.wait(LIMIT_S)  # from here on reads are concurrent with steps
    is_done.set()
    reader.join()
    np.testing.assert_allclose(sums, 1, atol=1e-5)


def test_a_capture_of_all_keeps_every_row_of_the_latest_step(logits: Callable[..., Any]) -> None:
    capture = GlobalLogprobsCapture()
    assert capture.get_logprobs() is None
    assert capture.get_all_logprobs() is None
    capture.update_state(batch_update=None)
    for num_rows in (5, 3):
        before = logits(num_rows) * num_rows
        given = before.clone()
        assert capture.apply(given) is given
        assert torch.equal(given, before), "logits pass through"
        kept = capture.get_all_logprobs()
        assert kept is not None
        assert kept.dtype == torch.float32
        np.testing.assert_allclose(kept, torch.log_softmax(before.double(), -1), atol=1e-6)
        for index in range(num_rows):
            np.testing.assert_array_equal(capture.get_logprobs(index), kept[index])
    assert capture.get_logprobs(3) is capture.get_logprobs(-4) is None
    np.testing.assert_array_equal(capture.get_logprobs(-1), kept[2])
    assert capture.is_argmax_invariant()
    capture.clear()
    assert capture.get_all_logprobs() is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_rows_have_the_dtype_of_the_logits(logits: Callable[..., Any], dtype: Any) -> None:
    capture = GlobalLogprobsCapture()
    given = logits(2).to(dtype)
    capture.apply(given)
    kept = capture.get_all_logprobs()
    assert kept is not None
    assert kept.dtype == dtype
    wanted = torch.log_softmax(given.double(), -1)
    np.testing.assert_allclose(kept.double(), wanted, rtol=torch.finfo(dtype).eps, atol=0)


def test_rows_of_wide_vocabularies_are_right_to_float32s_last_places() -> None:
    logits = 3 * torch.randn(3, 262_144, generator=torch.Generator().manual_seed(5))
    wanted = torch.log_softmax(logits.double(), -1)
    capture = GlobalLogprobsCapture()
    capture.apply(logits)
    kept = capture.get_all_logprobs()
    assert kept is not None
    np.testing.assert_allclose(kept, wanted, atol=3e-6, rtol=0)  # torch's own tolerance: 1e-5


def test_what_a_caller_does_to_its_rows_is_its_own(logits: Callable[..., Any]) -> None:
    capture = GlobalLogprobsCapture()
    capture.apply(logits(2))
    before = capture.get_all_logprobs()
    for row in (capture.get_logprobs(), capture.get_all_logprobs()):
        assert row is not None
        row.zero_()
    assert torch.equal(capture.get_all_logprobs(), before)


def test_a_step_above_the_bound_keeps_its_first_rows_and_says_so_once(
    logits: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    capture = GlobalLogprobsCapture(max_bytes=3 * 10 * 4)
    for _ in range(2):
        capture.apply(logits(5))
        assert len(capture.get_all_logprobs()) == 3
        assert capture.get_logprobs(3) is None
    assert [one for one in caplog.messages if "3 of the 5 rows" in one] == caplog.messages
    assert len(caplog.messages) == 1
    with pytest.raises(ParameterError, match="max_bytes"):
        GlobalLogprobsCapture(max_bytes=0)


def test_a_step_is_replaced_as_a_whole_under_readers(logits: Callable[..., Any]) -> None:
    capture = GlobalLogprobsCapture()
    is_done, has_read = threading.Event(), threading.Event()
    seen: list[set[float]] = []

    def read() -> None:
        while not is_done.is_set():
            rows = capture.get_all_logprobs()
            if rows is not None:
                seen.append(set(rows[:, 0].tolist()))
                has_read.set()

    reader = threading.Thread(target=read)
    reader.start()
    for step in range(300):
        step_logits = torch.zeros(64, 500)
        step_logits[:, 0] = step / 100
        capture.apply(step_logits)
        assert has_read.wait(LIMIT_S)
    is_done.set()
    reader.join()
    capture.apply(logits(1))
    assert all(len(values) == 1 for values in seen), "rows of two steps were mixed"


class UsersCapture(GlobalLogprobsCapture):
    """A user's subclass, as written for genlm-backend's class."""

    def __init__(self) -> None:
        super().__init__()
        self.num_steps = 0

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        self.num_steps += 1
        return super().apply(logits)

    def update_state(self, batch_update: Any) -> None:
        pass


@pytest.mark.parametrize("kind", [UsersCapture, GlobalLogprobsCapture, "GlobalLogprobsCapture"])
def test_a_capture_of_all_registers_as_it_is_and_sees_every_request(
    tiny_model_folder: Path, kind: Any
) -> None:
    params = SamplingParams(max_tokens=1, temperature=0, logprobs=-1)
    with LLM(str(tiny_model_folder), kv_cache_memory_bytes=1 << 20, logits_processors=[kind]) as llm:
        outputs = llm.generate([[5, 6], [7, 8, 9]], params)
        assert llm.processors is not None
        [capture] = llm.processors.registered.values()
        assert isinstance(capture, GlobalLogprobsCapture)
        kept = capture.get_all_logprobs()
    assert kept is not None
    wanted = [
        [row[i].logprob for i in range(kept.shape[1])] for out in outputs for row in out.outputs[0].logprobs
    ]
    np.testing.assert_allclose(kept, wanted, atol=1e-5)
    assert getattr(capture, "num_steps", 1) == 1
