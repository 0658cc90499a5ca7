"""`LLM`, `AsyncLM`, the server and our processors with vLLM as the engine."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from logprobe.analysis.client import ScoringClient
from logprobe.next_token.async_lm import AsyncLM
from logprobe.sampling import SamplingParams
from logprobe.server import ServerSettings

if TYPE_CHECKING:
    from logprobe.engine.backends.start import LoadedModel

pytestmark = pytest.mark.vllm
TOLERANCE = 1e-4


def test_pairs_and_conversations_are_those_of_the_native_engine(
    on_vllm: LoadedModel, native: LoadedModel
) -> None:
    async def ask(loaded: LoadedModel) -> tuple[Any, Any]:
        client = ScoringClient(loaded.engine, loaded.text)
        pairs, asked = (
            [("the cat", " and the dog"), ("in", " the")],
            SamplingParams(max_tokens=0, prompt_logprobs=0),
        )
        scores = await client.score(pairs, asked)
        scores += await client.score(pairs, asked, sampling=SamplingParams(temperature=0.5, top_k=200))
        scores += await client.score(pairs, asked, sampling=SamplingParams(repetition_penalty=1.3))
        [chat] = await client.chat("the cat?", SamplingParams(max_tokens=5, temperature=0, logprobs=2))
        return scores, chat

    (scores, chat), (want, other) = (asyncio.run(ask(one)) for one in (on_vllm, native))
    for mine, theirs in zip(scores, want, strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, abs=10 * TOLERANCE)
        assert mine.is_greedy == theirs.is_greedy
    assert chat.outputs[0].text == other.outputs[0].text
    assert chat.info.engine == "vllm"


def test_next_token_rows_come_through_the_same_interface(on_vllm: LoadedModel, native: LoadedModel) -> None:
    prefixes = [[5, 6, 7], [5, 6], [9], [5, 6, 7]]

    async def rows(loaded: LoadedModel) -> Any:
        lm = AsyncLM(loaded)
        try:
            return np.stack(await lm.batch_next_token_logprobs(prefixes))
        finally:
            lm.close()

    got, want = (asyncio.run(rows(one)) for one in (on_vllm, native))
    np.testing.assert_allclose(got, want, atol=TOLERANCE, rtol=0)


def test_a_grammar_and_masks_hold_inside_vllm(on_vllm: LoadedModel) -> None:
    async def ask() -> Any:
        client = ScoringClient(on_vllm.engine, on_vllm.text)
        shaped = SamplingParams(
            max_tokens=12, seed=1, response_format={"type": "regex", "regex": "(cat|dog)+"}
        )
        masked = SamplingParams(max_tokens=6, seed=1, allowed_token_ids=[40, 41], logprobs=0, ignore_eos=True)
        return await client.generate(["the", "the"], [shaped, masked])

    shaped, masked = asyncio.run(ask())
    assert set(shaped.outputs[0].text.replace("cat", "").replace("dog", "")) <= set("catdog")
    assert set(masked.outputs[0].token_ids) <= {40, 41}


def test_the_server_serves_it(on_vllm: LoadedModel, new_serving: Any) -> None:
    import httpx

    with new_serving(on_vllm, ServerSettings(model_name="tiny")) as (url, _):
        asked = {"prompt": "the cat", "max_tokens": 4, "temperature": 0, "logprobs": 2}
        reply = httpx.post(f"{url}/v1/completions", json=asked, timeout=60).json()
        assert len(reply["choices"][0]["logprobs"]["tokens"]) == 4
        told = httpx.get(f"{url}/v1/capabilities", timeout=60).json()
        assert told["engine"] == "vllm"
        metrics = httpx.get(f"{url}/metrics", timeout=60)
        assert metrics.status_code == 200
