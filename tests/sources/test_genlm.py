"""genlm-backend's async language model as its document uses it, on the native engine."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from logprobe import LLM, SamplingParams
from logprobe.compat.genlm import AsyncLM, AsyncVirtualLM, GlobalLogprobsCapture, Token

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROMPTS = [[5, 6, 7], [5, 6], [5, 6, 7]]


@pytest.fixture
def llm(tiny_llm: LLM) -> Iterator[AsyncVirtualLM]:
    with AsyncVirtualLM(tiny_llm, cache_size=8, batch_size=20, timeout=0.02) as made:
        yield made


def test_its_methods_give_the_same_rows(llm: AsyncVirtualLM) -> None:
    async def asked() -> tuple[torch.Tensor, torch.Tensor]:
        one = await llm.next_token_logprobs(PROMPTS[0])
        return one, await llm.batch_next_token_logprobs(PROMPTS)

    one, many = asyncio.run(asked())
    assert isinstance(one, torch.Tensor)
    assert many.shape == (len(PROMPTS), len(llm.byte_vocab))
    sync = llm.batch_next_token_logprobs_sync(token_ids_list=PROMPTS)
    for row in (many[0], many[2], sync[0], llm.next_token_logprobs_sync(PROMPTS[0])):
        np.testing.assert_allclose(row, one, atol=2e-5)
    np.testing.assert_allclose(torch.logsumexp(one, 0), 0.0, atol=1e-5)
    assert isinstance(llm, AsyncLM)
    assert len(llm.str_vocab) == len(llm.byte_vocab)


def test_samples_end_where_they_are_told(llm: AsyncVirtualLM) -> None:
    async def drawn() -> list[list[int]]:
        one = await llm.sample(PROMPTS[0], max_tokens=6, eos_token_ids=[], temperature=0.5, seed=1)
        again = await llm.sample(PROMPTS[0], max_tokens=6, eos_token_ids=[], temperature=0.5, seed=1)
        cut = await llm.sample(PROMPTS[0], max_tokens=6, eos_token_ids=[one[1]], temperature=0.5, seed=1)
        batch = await llm.batch_sample(PROMPTS, max_tokens=2, eos_token_ids=[], temperature=0.5)
        return [one, again, cut, *batch]

    one, again, cut, *batch = asyncio.run(drawn())
    assert one == again
    assert cut == one[: one.index(one[1])]
    assert len(batch) == len(PROMPTS)


def test_lora_weights_are_set_and_cleared(llm: AsyncVirtualLM, adapter_folders: dict[str, Path]) -> None:
    base = llm.next_token_logprobs_sync(PROMPTS[0])
    llm.add_new_lora(str(adapter_folders["wide"]), lora_name="lora_1")
    llm.set_lora(str(adapter_folders["wide"]), "lora_1")
    assert not torch.allclose(llm.next_token_logprobs_sync(PROMPTS[0]), base, atol=1e-2)
    llm.clear_lora()
    np.testing.assert_allclose(llm.next_token_logprobs_sync(PROMPTS[0]), base, atol=2e-5)
    assert llm.cache is not None
    llm.clear_cache()
    assert len(llm.cache) == 0
    llm.reset_async_queries()


def test_a_vocabulary_is_of_tokens(llm: AsyncVirtualLM) -> None:
    [token, other] = llm.byte_vocab[5:7]
    assert isinstance(token, Token)
    assert (token.token_id, other.token_id) == (5, 6)
    assert token == Token(5, token.byte_string) != Token(6, token.byte_string)


def test_a_model_of_a_name_gives_the_same_rows(tiny_model_folder: Path, llm: AsyncVirtualLM) -> None:
    with AsyncLM.from_name(str(tiny_model_folder), batch_size=2, kv_cache_memory_bytes=1 << 20) as lm:
        row = lm.next_token_logprobs_sync(PROMPTS[0])
        np.testing.assert_array_equal(row, lm.next_token_logprobs_uncached(PROMPTS[0]))
    np.testing.assert_allclose(row, llm.next_token_logprobs_sync(PROMPTS[0]), atol=2e-5)


def test_a_capture_sees_the_rows_of_answers_and_of_steps(tiny_llm: LLM, tiny_model_folder: Path) -> None:
    capture = GlobalLogprobsCapture()
    with AsyncVirtualLM(tiny_llm, capture) as lm:
        rows = lm.batch_next_token_logprobs_sync(PROMPTS[:2])
        np.testing.assert_allclose(capture.get_all_logprobs(), rows, atol=1e-6)
    assert capture.get_all_logprobs() is None
    with LLM(
        tiny_model_folder, logits_processors=[GlobalLogprobsCapture], kv_cache_memory_bytes=1 << 20
    ) as model:
        model.generate([PROMPTS[0]], SamplingParams(max_tokens=1))
        assert model.processors is not None
        own = model.processors.registered["GlobalLogprobsCapture"]
        np.testing.assert_allclose(own.get_logprobs(0), rows[0], atol=2e-5)
