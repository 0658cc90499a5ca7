"""Sampling inside vLLM's workers, on rows that the tests make; vLLM is not needed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from logprobe.config import EngineConfig
from logprobe.errors import EngineError, NonFiniteLogitsError
from logprobe.integrations.vllm.drawing import WorkerDraw
from logprobe.integrations.vllm.orders import ANSWERS, ASKS, WORKS, Ask, Work
from logprobe.processors import ModelFacts
from logprobe.sampling import SamplingParams
from logprobe.transport.messages import Admitted, Request

VOCAB = 270


@pytest.fixture
def worker(tiny_llm: Any) -> WorkerDraw:
    facts = ModelFacts(
        vocab_size=VOCAB,
        eos_token_ids=frozenset({1}),
        text=tiny_llm.text,
    )
    return WorkerDraw(EngineConfig(device="cpu", dtype="float32"), facts, tiny_llm.text, 100)


def work(name: str = "r", *, wants_row: bool = False, **params: Any) -> bytes:
    request = Request(
        request_id=name,
        prompt_token_ids=np.array([5, 6, 7], dtype=np.int32),
        params=SamplingParams(**{"max_tokens": 4, "ignore_eos": True} | params),
        wants_row=wants_row,
    )
    return WORKS.encode(Work(admitted=Admitted(request, {}), index=0, number=0))


def logits(seed: int, num_rows: int = 1) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 3, (num_rows, VOCAB)).astype(np.float32))


def left(row: torch.Tensor) -> int:
    """Return the only token left for vLLM to choose."""
    assert int((row > -torch.inf).sum()) == 1
    return int(row.argmax())


def take(worker: WorkerDraw, **num_seen: int) -> dict[str, Any]:
    return ANSWERS.decode(worker.take(ASKS.encode(Ask(num_seen)))).deltas


def test_rows_of_others_stay_as_they_are(worker: WorkerDraw) -> None:
    rows, before = logits(1, 3), logits(1, 3)
    run = worker.open("a", work(temperature=0.0, logprobs=2))
    worker.draw(rows, {1: (run, 0)})
    assert left(rows[1]) == int(before[1].argmax())
    assert torch.equal(rows[[0, 2]], before[[0, 2]])


def test_a_draw_that_vllm_throws_away_is_drawn_again_from_the_same_number(worker: WorkerDraw) -> None:
    """Rows of a partly computed prompt sample too, but only the last one counts."""
    asked = {"temperature": 1.0, "seed": 3, "logprobs": 0}
    run, twin = worker.open("a", work(**asked)), worker.open("b", work(**asked))
    for seed in (7, 8, 9):
        worker.draw(logits(seed), {0: (run, 0)})
    alone = logits(9)
    worker.draw(alone, {0: (twin, 0)})
    assert take(worker, a=0) == {"a": []}, "nothing counts before vLLM has taken it"
    found = take(worker, a=1, b=1)
    assert found["a"][0].token_ids == found["b"][0].token_ids == [left(alone[0])]
    np.testing.assert_array_equal(found["a"][0].raw.logprobs, found["b"][0].raw.logprobs)


def test_a_draw_counts_once_the_next_token_is_asked_for(worker: WorkerDraw) -> None:
    run = worker.open("a", work(temperature=0.0, logprobs=1))
    tokens = []
    for count in range(4):
        row = logits(20 + count)
        worker.draw(row, {0: (run, count)})
        tokens.append(left(row[0]))
    found = take(worker, a=2)["a"]
    assert [delta.token_ids[0] for delta in found] == tokens[:3], "the front lags behind by one"
    [last] = take(worker, a=4)["a"]
    assert last.token_ids == tokens[3:]
    assert last.finish.reason == "length"


def test_numbers_are_those_of_the_row_that_came(worker: WorkerDraw) -> None:
    run = worker.open("a", work(temperature=0.0, logprobs=3, logprob_token_ids=[4, 9], entropy=True))
    row = logits(5)
    want = torch.log_softmax(row[0].double(), 0).numpy()
    worker.draw(row, {0: (run, 0)})
    [delta] = take(worker, a=1)["a"]
    best = np.argsort(-want)[:3]
    assert delta.raw.token_ids[0, 1:].tolist() == best.tolist()
    np.testing.assert_allclose(delta.raw.logprobs[0, 1:], want[best], atol=1e-5)
    assert delta.raw.given.ranks.tolist() == [1 + int((want > want[one]).sum()) for one in (4, 9)]
    np.testing.assert_allclose(delta.raw.extras["entropy"], -(np.exp(want) * want).sum(), atol=1e-4)


def test_a_whole_row_ends_its_request(worker: WorkerDraw) -> None:
    run = worker.open("a", work(wants_row=True, max_tokens=1))
    row = logits(6)
    want = torch.log_softmax(row[0], 0).numpy()
    worker.draw(row, {0: (run, 0)})
    [delta] = take(worker, a=1)["a"]
    np.testing.assert_allclose(delta.row, want, atol=1e-5)
    assert delta.finish.reason == "length"
    assert take(worker, a=1) == {"a": []}


def test_a_row_of_nan_ends_its_request_and_no_other(worker: WorkerDraw) -> None:
    rows = logits(7, 2)
    rows[0] = torch.nan
    runs = [worker.open(name, work(name, temperature=0.0)) for name in ("a", "b")]
    worker.draw(rows, {row: (run, 0) for row, run in enumerate(runs)})
    found = take(worker, a=1, b=1)
    assert isinstance(found["a"][0].finish.error, NonFiniteLogitsError)
    assert len(found["b"][0].token_ids) == 1
    assert not rows.isnan().any(), "vLLM is left a token in any case"


def test_tokens_that_vllm_took_and_nobody_drew_end_the_request_by_name(worker: WorkerDraw) -> None:
    run = worker.open("a", work(temperature=0.0))
    worker.draw(logits(8), {0: (run, 3)})
    assert "but only 0 were sampled" in str(take(worker, a=3)["a"][0].finish.error)


def test_a_draw_that_raises_ends_its_requests_and_not_the_worker(
    worker: WorkerDraw, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("no room")

    run = worker.open("a", work(temperature=0.0))
    monkeypatch.setattr(worker._sampling, "draw", fail)
    worker.draw(logits(9), {0: (run, 0)})
    monkeypatch.undo()
    error = take(worker, a=1)["a"][0].finish.error
    assert isinstance(error, EngineError)
    assert "no room" in str(error)
    other = worker.open("b", work("b", temperature=0.0))
    worker.draw(logits(9), {0: (other, 0)})
    assert len(take(worker, b=1)["b"][0].token_ids) == 1
