"""Tinker's sampling interface gives the numbers of `LLM`, in this process and over HTTP, in Tinker's types.

The tests with Tinker's types need the package `tinker`; those of JSON requests, as SkyRL sends them, do not.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from logprobe import AsyncLLM, SamplingParams
from logprobe.errors import EngineClosedError, MissingPackageError, ParameterError
from logprobe.integrations.tinker import TinkerSampler
from logprobe.server import ServerSettings
from refusals import raises

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from logprobe import LLM

IDS = [5, 6, 7, 8]
BODY = {"prompt": {"chunks": [{"tokens": IDS}]}, "sampling_params": {"max_tokens": 1}}
needs_tinker = pytest.mark.skipif(find_spec("tinker") is None, reason="the package tinker is not installed")


@pytest.fixture(scope="module", params=["in process", "over HTTP"])
def sampler(
    request: pytest.FixtureRequest, tiny_llm: LLM, tiny_model_folder: Path, new_serving: Any
) -> Iterator[TinkerSampler]:
    if request.param == "in process":
        with TinkerSampler(str(tiny_model_folder), kv_cache_memory_bytes=1 << 21) as sampler:
            yield sampler
        return
    with (
        new_serving(tiny_llm, ServerSettings(max_logprobs=-1)) as (url, _),
        TinkerSampler(url, request_timeout=60) as sampler,
    ):
        yield sampler


def greedy(llm: LLM, ids: list[int], num_tokens: int) -> tuple[list[int], list[float]]:
    """Greedy tokens and their logprobs, computed one by one from whole next-token rows."""
    tokens, logprobs, ids = [], [], [*ids]
    for _ in range(num_tokens):
        params = SamplingParams(max_tokens=1, temperature=0, logprobs=-1, ignore_eos=True)
        (output,) = llm.generate([ids], params)
        record = output.outputs[0].logprobs
        assert record is not None
        top = record.top_entries()
        tokens.append(int(top.token_ids[np.argmax(top.logprobs)]))
        logprobs.append(float(top.logprobs.max()))
        ids.append(tokens[-1])
    return tokens, logprobs


def scored(llm: LLM, ids: list[int]) -> list[float]:
    """Logprobs of all tokens but the first, one request for each."""
    return [llm.score([(ids[:end], ids[end : end + 1])])[0].logprob for end in range(1, len(ids))]


@needs_tinker
def test_the_signatures_are_those_of_the_published_client() -> None:
    import tinker

    for name in ("sample", "compute_logprobs"):
        own = inspect.signature(getattr(TinkerSampler, name)).parameters
        theirs = inspect.signature(getattr(tinker.SamplingClient, name)).parameters
        assert [*own] == [*theirs]
        assert [one.default for one in own.values()] == [one.default for one in theirs.values()]


@needs_tinker
def test_samples_are_tinkers_with_the_engines_numbers(sampler: TinkerSampler, tiny_llm: LLM) -> None:
    import tinker

    prompt = tinker.ModelInput.from_ints(IDS)
    params = tinker.SamplingParams(max_tokens=5, temperature=0, stop=[])
    response = sampler.sample(prompt, 2, params, topk_sample_logprobs=3).result(60)
    assert isinstance(response, tinker.SampleResponse)
    tokens, logprobs = greedy(tiny_llm, IDS, 5)
    for sequence in response.sequences:
        assert isinstance(sequence, tinker.SampledSequence)
        assert sequence.tokens == tokens
        assert sequence.logprobs == pytest.approx(logprobs, abs=1e-5)
        assert sequence.stop_reason == "length"
        assert [len(row) for row in sequence.topk_logprobs] == [3] * 5
        assert [row[0][1] for row in sequence.topk_logprobs] == pytest.approx(logprobs, abs=1e-5)
    assert len({sequence.sequence_id for sequence in response.sequences}) == 2
    assert response.prompt_logprobs is None


@needs_tinker
def test_seeds_stops_and_truncation_are_passed_on(sampler: TinkerSampler, tiny_llm: LLM) -> None:
    import tinker

    asked = {"max_tokens": 6, "seed": 3, "temperature": 0.7, "top_k": 9, "top_p": 0.9}
    prompt = tinker.ModelInput.from_ints(IDS)
    response = sampler.sample(prompt, 3, tinker.SamplingParams(**asked)).result(60)
    (near,) = tiny_llm.generate([IDS], SamplingParams(n=3, **asked))
    assert [one.tokens for one in response.sequences] == [one.token_ids for one in near.outputs]
    first = near.outputs[0].token_ids
    cut = sampler.sample(prompt, 1, tinker.SamplingParams(**asked, stop=[first[2]])).result(60).sequences[0]
    assert cut.tokens == first[: first.index(first[2]) + 1]
    assert cut.stop_reason == "stop"


@needs_tinker
def test_prompts_are_scored(sampler: TinkerSampler, tiny_llm: LLM) -> None:
    import tinker

    prompt, want = tinker.ModelInput.from_ints(IDS), scored(tiny_llm, IDS)
    logprobs = sampler.compute_logprobs(prompt).result(60)
    assert logprobs[0] is None
    assert logprobs[1:] == pytest.approx(want, abs=1e-5)
    assert sampler.compute_logprobs(prompt, 2).result(60)[:2] == [None, None]
    params = tinker.SamplingParams(max_tokens=1, temperature=0.5)
    response = sampler.sample(prompt, 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=2).result(
        60
    )
    assert response.prompt_logprobs == logprobs  # no temperature
    assert response.topk_prompt_logprobs[0] is None
    assert [len(row) for row in response.topk_prompt_logprobs[1:]] == [2] * 3


@needs_tinker
def test_chosen_ids_are_scored_at_chosen_positions(sampler: TinkerSampler, tiny_llm: LLM) -> None:
    import tinker

    targets = np.array([[9, -1], [-1, -1], [3, 3]])
    asked = tinker.TensorData(data=targets, dtype="int64", shape=[3, 2])
    prompt, params = tinker.ModelInput.from_ints(IDS), tinker.SamplingParams(max_tokens=1)
    response = sampler.sample(prompt, 1, params, target_prompt_logprobs=asked).result(60)
    found = np.asarray(response.target_prompt_logprobs.data).reshape(3, 2)
    wants = [tiny_llm.score([(IDS[:1], [9])])[0].logprob, tiny_llm.score([(IDS[:3], [3])])[0].logprob]
    np.testing.assert_allclose(found, [[wants[0], 0], [0, 0], [wants[1], wants[1]]], atol=1e-5)


@needs_tinker
def test_results_can_be_awaited(sampler: TinkerSampler) -> None:
    import tinker

    async def both() -> Any:
        prompt, params = tinker.ModelInput.from_ints(IDS), tinker.SamplingParams(max_tokens=2)
        return await asyncio.gather(
            sampler.sample(prompt, 1, params).coroutine(), sampler.compute_logprobs_async(prompt)
        )

    response, logprobs = asyncio.run(both())
    assert len(response.sequences) == 1
    assert len(logprobs) == len(IDS)


@needs_tinker
@pytest.mark.parametrize(
    ("options", "parameter"),
    [
        ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k"),
        ({"prompt_logprobs_last_n": 2}, "prompt_logprobs_last_n"),
        ({"include_prompt_logprobs": True, "prompt_logprobs_last_n": 4}, "prompt_logprobs_last_n"),
    ],
)
def test_what_is_not_supported_is_named(sampler: TinkerSampler, options: Any, parameter: str) -> None:
    import tinker

    prompt = tinker.ModelInput.from_ints(IDS)
    with raises(ParameterError, parameter=parameter):
        sampler.sample(prompt, 1, tinker.SamplingParams(max_tokens=1), **options)
    with raises(ParameterError, parameter="max_tokens"):
        sampler.sample(prompt, 1, tinker.SamplingParams())


def test_skyrls_requests_are_answered(sampler: TinkerSampler, tiny_llm: LLM) -> None:
    body = {
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": IDS[:2]}, {"tokens": IDS[2:]}]},
        "num_samples": 2,
        "sampling_params": {"max_tokens": 4, "temperature": 0.0, "stop": [], "seed": None},
        "session_id": "s",
        "include_prompt_logprobs": True,
        "topk_prompt_logprobs": 2,
    }
    reply = asyncio.run(sampler.sample_json({"json": body}))
    tokens, logprobs = greedy(tiny_llm, IDS, 4)
    assert reply["type"] == "sample"
    for sequence in reply["sequences"]:
        assert sequence["tokens"] == tokens
        assert sequence["logprobs"] == pytest.approx(logprobs, abs=1e-5)
        assert sequence["stop_reason"] == "length"
    assert reply["prompt_logprobs"][0] is None
    assert reply["prompt_logprobs"][1:] == pytest.approx(scored(tiny_llm, IDS), abs=1e-5)
    assert reply["topk_prompt_logprobs"][0] is None
    assert [len(row) for row in reply["topk_prompt_logprobs"][1:]] == [2, 2, 2]
    bare = asyncio.run(
        sampler.sample_json(body | {"topk_prompt_logprobs": 0, "include_prompt_logprobs": False})
    )
    assert (bare["prompt_logprobs"], bare["topk_prompt_logprobs"]) == (None, None)


@pytest.mark.parametrize(
    ("change", "parameter"),
    [
        ({"sampling_params": {}}, "max_tokens"),
        ({"num_samples": 0}, "n"),
        ({"prompt": {"chunks": [{"type": "image"}]}}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": {"chunks": [1]}}, "prompt"),
        ({"topk_prompt_logprobs": "2"}, "topk_prompt_logprobs"),
        ({"sampling_params": {"max_tokens": 1, "stop": 5}}, "sampling_params"),
    ],
)
def test_invalid_requests_name_the_field(sampler: TinkerSampler, change: Any, parameter: str) -> None:
    body = {"prompt": {"chunks": [{"tokens": IDS}]}, "sampling_params": {"max_tokens": 1}}
    with raises(ParameterError, parameter=parameter):
        asyncio.run(sampler.sample_json(body | change))


def test_processed_logprobs_are_of_the_sampled_distribution(tiny_model_folder: Path) -> None:
    body = {"prompt": {"chunks": [{"tokens": IDS}]}, "sampling_params": {"max_tokens": 3, "top_k": 1}}

    async def logprobs(mode: Any) -> list[float]:
        async with AsyncLLM(str(tiny_model_folder), kv_cache_memory_bytes=1 << 21) as llm:
            with TinkerSampler(llm, logprobs_mode=mode) as sampler:
                reply = await sampler.sample_json(body)
        return [value for sequence in reply["sequences"] for value in sequence["logprobs"]]

    assert asyncio.run(logprobs("processed_logprobs")) == [0.0] * 3
    assert all(value < 0 for value in asyncio.run(logprobs("raw_logprobs")))
    with raises(ParameterError, parameter="logprobs_mode"):
        TinkerSampler("smollm2", logprobs_mode="both")


def test_a_model_opened_by_name_is_closed_in_async_code(tiny_model_folder: Path) -> None:
    async def closed() -> TinkerSampler:
        with TinkerSampler(str(tiny_model_folder), kv_cache_memory_bytes=1 << 21) as sampler:
            await sampler.sample_json(BODY)
        sampler.close()
        return sampler

    with pytest.raises(EngineClosedError):
        asyncio.run(asyncio.run(closed()).sample_json(BODY))


def test_without_the_package_the_extra_is_named(
    sampler: TinkerSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tinker", None)
    with pytest.raises(MissingPackageError, match=r"logprobe\[tinker\]"):
        sampler.compute_logprobs(None)  # type: ignore[arg-type]
