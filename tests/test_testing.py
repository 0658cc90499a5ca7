"""The public fakes: all numbers of a fake engine are those of its forward pass."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from doc_pages import examples_of, run_examples
from logprobe import SamplingParams
from logprobe.engine.client import Client
from logprobe.errors import EngineClosedError, ForwardError, ParameterError
from logprobe.next_token import AsyncLM
from logprobe.testing import (
    FakeForward,
    check_integrity,
    failing_steps,
    fake_model,
    holding_steps,
    open_requests,
    process_ids,
    watching_steps,
)
from refusals import raises

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from logprobe.engine.backends.start import LoadedModel


@pytest.fixture
def forward() -> FakeForward:
    return FakeForward(num_slots=300, seed=3)


@pytest.fixture
def model(forward: FakeForward) -> Iterator[LoadedModel]:
    loaded = fake_model(forward, max_num_batched_tokens=16, max_num_seqs=4)
    yield loaded
    loaded.engine.close()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    return wide - np.log(np.exp(wide - wide.max()).sum()) - wide.max()


def test_bytes_are_ids(model: LoadedModel) -> None:
    assert model.text.encode("the cät\x00").tolist() == list("the cät\x00".encode())


def test_scores_and_tokens_are_those_of_the_prefixes_however_they_are_cut(
    model: LoadedModel, forward: FakeForward
) -> None:
    params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    prompts = ["the cat and the dog sat there", "the cat", "the cat and the", "another one"]
    outputs = asyncio.run(Client(model.engine, model.text).generate(prompts, params))
    for output in outputs:
        ids = output.prompt_token_ids + output.outputs[0].token_ids
        rows = [*list(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])]
        for place, row in enumerate(rows, start=1):
            want = log_softmax(forward.logits_after(ids[:place]))
            assert row is not None
            for token_id, entry in row.items():
                assert entry.logprob == pytest.approx(want[token_id], abs=1e-5)
        assert len(rows) == len(ids) - 1


def test_an_async_model_asks_it_for_rows(model: LoadedModel, forward: FakeForward) -> None:
    lm = AsyncLM(model)
    row = lm.next_token_logprobs_sync([5, 6, 7])
    np.testing.assert_allclose(row, log_softmax(forward.logits_after([5, 6, 7])), atol=1e-5)
    lm.close()


def test_it_takes_no_lora_weights(model: LoadedModel) -> None:
    with pytest.raises(ParameterError, match="fake model"):
        model.engine.add_lora("a", "b")
    with pytest.raises(ParameterError, match="no LoRA weights 'a'"):
        asyncio.run(Client(model.engine, model.text).generate("x", SamplingParams(lora="a")))


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused() -> None:
    with pytest.raises(ParameterError, match="vocab_size"):
        fake_model(FakeForward(vocab_size=100))


# -- faults ------------------------------------------------------------------------------------------------


@pytest.fixture
def lm(model: LoadedModel) -> Iterator[AsyncLM]:
    with AsyncLM(model) as own:
        yield own


def test_steps_are_watched_and_fail_until_the_block_ends(model: LoadedModel, lm: AsyncLM) -> None:
    counts: list[int] = []
    with watching_steps(model, lambda batch: counts.append(len(batch.token_ids))):
        lm.next_token_logprobs_sync([5, 6])
        with failing_steps(lm, MemoryError("no room")), pytest.raises(ForwardError, match="no room"):
            lm.next_token_logprobs_sync([8, 9, 10])
        lm.next_token_logprobs_sync([5, 6, 7])
    lm.next_token_logprobs_sync([11])
    assert counts == [2, 1]
    check_integrity(model)


def test_a_step_is_held_until_it_is_released(model: LoadedModel, lm: AsyncLM) -> None:
    with holding_steps(model.engine) as hold:
        with pytest.raises(TimeoutError):
            hold.wait(0)
        asking = threading.Thread(target=lm.next_token_logprobs_sync, args=([5, 6],))
        asking.start()
        hold.wait()
        assert len(open_requests(lm)) == 1
        assert asking.is_alive()
        hold.release()
        asking.join()
    assert open_requests(lm) == []


def test_integrity_is_checked_once_the_engine_rests(model: LoadedModel, lm: AsyncLM) -> None:
    with holding_steps(model) as hold:
        asking = threading.Thread(target=lm.next_token_logprobs_sync, args=([5, 6],))
        asking.start()
        hold.wait()
        checking = threading.Thread(target=check_integrity, args=(model,))
        checking.start()
        checking.join(0.1)
        assert checking.is_alive()
        hold.release()
        for thread in (asking, checking):
            thread.join()


def test_a_held_step_goes_on_where_the_engine_is_closed(model: LoadedModel, lm: AsyncLM) -> None:
    async def ask() -> None:
        asked = asyncio.create_task(lm.sample([5, 6], 9, []))
        await asyncio.to_thread(hold.wait)
        await asyncio.to_thread(model.engine.close)
        await asked

    with holding_steps(model) as hold, pytest.raises(EngineClosedError):
        asyncio.run(ask())


def test_an_engine_that_has_no_such_thing_is_refused(
    model: LoadedModel, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with raises(ParameterError, parameter="model"):
        process_ids(model)
    with raises(ParameterError, parameter="model"):
        open_requests(tiny_model_folder)  # type: ignore[arg-type]
    monkeypatch.setattr(model.engine, "core", object())
    for seam in (lambda: check_integrity(model), lambda: holding_steps(model).__enter__()):
        with raises(ParameterError, parameter="model"):
            seam()
    monkeypatch.undo()


def test_the_pages_example_runs(tiny_model_folder: Path) -> None:
    page = "reference/testing.md"
    run_examples(page, examples_of(page), model=tiny_model_folder)
