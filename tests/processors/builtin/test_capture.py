from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from logprobe.config import EngineConfig
from logprobe.errors import ParameterError
from logprobe.processors import BatchState, CaptureLogitsProcessor
from logprobe.processors.arguments import CaptureArgs

if TYPE_CHECKING:
    from collections.abc import Callable

ON = CaptureArgs(capture=True)


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
    assert processor.get_logprobs(2) is None
    assert processor.get_logprobs().dtype == np.float32
    assert not processor.get_logprobs().flags.writeable
    assert not processor.is_argmax_invariant()
    processor.clear()
    assert processor.get_logprobs() is None
    assert processor.get_all_logprobs() is None
    assert processor.names() == []


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
    is_done = threading.Event()
    sums: list[float] = []

    def read() -> None:
        while not is_done.is_set():
            rows = processor.get_all_logprobs()
            if rows is not None:
                sums.extend(np.exp(rows.astype(np.float64)).sum(1))

    reader = threading.Thread(target=read)
    reader.start()
    generator = torch.Generator().manual_seed(0)
    for position in range(300):
        processor.update_state(BatchState([row("a", ON, output=[0] * position), row("b", ON)]))
        processor.apply(torch.randn(2, 5000, generator=generator) * 10)
    is_done.set()
    reader.join()
    assert sums
    np.testing.assert_allclose(sums, 1, atol=1e-5)
