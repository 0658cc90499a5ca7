"""The public fakes: every number of a fake engine is the one that its forward pass says."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np
import pytest

from logprobe import AsyncLM, SamplingParams
from logprobe.engine.client import Client
from logprobe.errors import ParameterError
from logprobe.testing import FakeForward, fake_model

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logprobe.engine.backends.start import LoadedModel


@pytest.fixture
def forward() -> FakeForward:
    return FakeForward(num_slots=300, seed=3)


@pytest.fixture
def model(forward: FakeForward) -> Iterator[LoadedModel]:
    loaded = fake_model(forward, max_batch_tokens=16, max_batch_rows=4)
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
    lm.cleanup()


def test_it_takes_no_lora_weights(model: LoadedModel) -> None:
    with pytest.raises(ParameterError, match="fake model"):
        model.engine.add_lora("a", "b")
    with pytest.raises(ParameterError, match="no LoRA weights 'a'"):
        asyncio.run(Client(model.engine, model.text).generate("x", SamplingParams(lora="a")))


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused() -> None:
    with pytest.raises(ParameterError, match="vocab_size"):
        fake_model(FakeForward(vocab_size=100))
