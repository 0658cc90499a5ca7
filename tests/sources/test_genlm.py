"""genlm-backend's async language model as its document uses it, on the native engine."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from logprobe import LLM, AsyncLM, AsyncVirtualLM

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
