"""Results that vLLM gets wrong and this engine right; a test also fails once vLLM has fixed its bug."""

from __future__ import annotations

import asyncio
import threading
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest

from logprobe.engine.backends.start import start_engine
from logprobe.engine.request import Requests
from logprobe.errors import ParameterError
from logprobe.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from logprobe.config import EngineConfig
    from logprobe.engine.backends.start import LoadedModel

pytestmark = pytest.mark.vllm
LIMIT_S = 120
TOLERANCE = 1e-4
GIVEN = [4, 9, 200]


def vllm_params(**asked: Any) -> Any:
    from vllm import SamplingParams as VllmParams
    from vllm.sampling_params import RequestOutputKind

    kind = RequestOutputKind.FINAL_ONLY
    return VllmParams(temperature=0.0, ignore_eos=True, detokenize=False, output_kind=kind, **asked)


async def of_vllm(engine: Any, ids: list[int], *, lora: Any = None, **asked: Any) -> Any:
    """Run one request directly on vLLM and return its output."""
    name = uuid.uuid4().hex
    outputs = engine.core._llm.generate(
        {"prompt_token_ids": ids}, vllm_params(**asked), name, lora_request=lora
    )
    return [output async for output in outputs][-1]


def ask_vllm(engine: Any, *requests: tuple[list[int], dict[str, Any]]) -> list[Any]:
    async def together() -> list[Any]:
        return await asyncio.gather(*(of_vllm(engine, ids, **asked) for ids, asked in requests))

    return engine.core._bridge.run(asyncio.wait_for(together(), LIMIT_S))


def ask(engine: Any, *requests: tuple[list[int], dict[str, Any]]) -> list[Any]:
    """Run requests concurrently on this engine and return their outputs."""

    async def together() -> list[Any]:
        maker = Requests(engine)
        admitted = [
            maker.admit(
                np.array(ids, np.int32), SamplingParams(**{"temperature": 0.0, "ignore_eos": True} | params)
            )
            for ids, params in requests
        ]
        engine.submit(admitted)
        waits = [engine.result(one.request.request_id) for one in admitted]
        return await asyncio.wait_for(asyncio.gather(*waits), LIMIT_S)

    outputs = asyncio.run(together())
    assert [output.error for output in outputs] == [None] * len(outputs)
    return outputs


def difference(output: Any, other: Any) -> float:
    """Return the largest difference of the chosen tokens' log-probabilities (nats); inf if tokens differ."""
    text, twin = output.outputs[0], other.outputs[0]
    if list(text.token_ids) != list(twin.token_ids):
        return float("inf")
    rows = zip(text.token_ids, text.logprobs, twin.logprobs, strict=True)
    return max(abs(row[key].logprob - true[key].logprob) for key, row, true in rows)


def random_ids(seed: int, length: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(2, 250, length).tolist()
    return ids


class TestPromptLogprobsBesideThePrefixCache:
    """On a prefix cache hit, vLLM leaves the rows of cached tokens uninitialised."""

    LENGTH = 80

    def chosen_by_vllm(self, engine: Any, ids: list[int], *, reads_cache: bool) -> Any:
        asked = {"prompt_logprobs": 0, "flat_logprobs": True, "max_tokens": 1}
        [output] = ask_vllm(engine, (ids, {**asked, "skip_reading_prefix_cache": not reads_cache}))
        return np.array(output.prompt_logprobs.logprobs, np.float64), output.num_cached_tokens

    def test_vllms_own_rows_are_not_those_of_the_prompt(self, on_vllm: LoadedModel) -> None:
        """The memory may by chance still hold the right rows, so several texts are tried."""
        engine = on_vllm.engine
        are_right = []
        for seed in range(100, 180, 10):
            ids = random_ids(seed, self.LENGTH)
            cold, num_cold = self.chosen_by_vllm(engine, ids, reads_cache=False)
            for other in range(1, 4):  # reuse the memory
                self.chosen_by_vllm(engine, random_ids(seed + other, self.LENGTH), reads_cache=False)
            warm, num_warm = self.chosen_by_vllm(engine, ids, reads_cache=True)
            assert (num_cold, num_warm > 0) == (0, True)
            np.testing.assert_allclose(warm[num_warm:], cold[num_warm:], atol=TOLERANCE)
            # Uninitialised memory may also hold NaN.
            are_right.append(bool((np.abs(warm[:num_warm] - cold[:num_warm]) <= 0.1).all()))
            if not are_right[-1]:
                return
        raise AssertionError(f"vLLM has mended it: read the cache ({len(are_right)} texts were right)")

    def test_ours_are_the_same_cold_and_cached(self, on_vllm: LoadedModel, native: LoadedModel) -> None:
        ids = random_ids(1, self.LENGTH)
        asked = {"prompt_logprobs": 2, "max_tokens": 1}
        [want] = ask(native.engine, (ids, asked))
        for _ in range(2):
            [got] = ask(on_vllm.engine, (ids, asked))
            for mine, theirs in zip(got.prompt_logprobs[1:], want.prompt_logprobs[1:], strict=True):
                assert {key: one.rank for key, one in mine.items()} == {
                    key: one.rank for key, one in theirs.items()
                }
                for key, one in mine.items():
                    assert one.logprob == pytest.approx(theirs[key].logprob, abs=TOLERANCE)


class TestGivenIds:
    def test_vllm_spoils_the_alternatives_of_a_neighbour(self, on_vllm: LoadedModel) -> None:
        """A request with `logprob_token_ids` removes the top-k alternatives of the others in its batch."""
        ids = random_ids(3, 10)
        asked = {"logprobs": 3, "max_tokens": 6}
        [alone] = ask_vllm(on_vllm.engine, (ids, asked))
        given = {"logprob_token_ids": GIVEN, "max_tokens": 6}
        beside, _ = ask_vllm(on_vllm.engine, (ids, asked), (random_ids(4, 10), given))
        steps = zip(alone.outputs[0].logprobs, beside.outputs[0].logprobs, strict=True)
        assert any(set(one) != set(other) for one, other in steps), "vLLM has mended it"

    def test_ours_do_not_depend_on_neighbours(self, on_vllm: LoadedModel, native: LoadedModel) -> None:
        asked = {"logprobs": 3, "max_tokens": 6}
        given = {"logprobs": 1, "logprob_token_ids": GIVEN, "max_tokens": 6}
        requests = [(random_ids(3, 10), asked), (random_ids(4, 10), given)]
        for mine, theirs in zip(ask(on_vllm.engine, *requests), ask(native.engine, *requests), strict=True):
            assert mine.outputs[0].token_ids == theirs.outputs[0].token_ids
            for got, want in zip(mine.outputs[0].logprobs, theirs.outputs[0].logprobs, strict=True):
                assert list(got) == list(want)

    def test_vllms_ranks_of_named_ids_are_their_places_in_the_list(self, on_vllm: LoadedModel) -> None:
        ids = random_ids(5, 12)
        [own] = ask_vllm(on_vllm.engine, (ids, {"logprob_token_ids": GIVEN, "max_tokens": 1}))
        told = own.outputs[0].logprobs[0]
        [ours] = ask(on_vllm.engine, (ids, {"logprobs": -1, "logprob_token_ids": GIVEN, "max_tokens": 1}))
        row = ours.outputs[0].logprobs[0]
        true = {key: 1 + sum(other.logprob > row[key].logprob for other in row.values()) for key in GIVEN}
        assert [told[key].rank for key in GIVEN] == [1, 2, 3] != list(true.values()), "vLLM has mended them"
        given = ours.outputs[0].logprobs.given[0]
        assert {key: given[key].rank for key in GIVEN} == true
        for key in GIVEN:
            assert given[key].logprob == pytest.approx(told[key].logprob, abs=TOLERANCE)


class TestTheLastAlternative:
    """If the chosen token is not among the k best, vLLM's chat reply has it and only k - 1 of them."""

    ASKED: ClassVar = {"temperature": 2.0, "seed": 5, "logprobs": 2, "max_tokens": 30}

    def test_ours_hold_all_k(self, on_vllm: LoadedModel) -> None:
        [output] = ask(on_vllm.engine, (random_ids(6, 8), self.ASKED))
        record = output.outputs[0].logprobs
        outside = [row for row in record if next(iter(row.values())).rank > 2]
        assert outside, "a token was drawn from beyond the two best"
        for row in outside:
            assert len(row) == 3
            assert sorted(one.rank for one in row.values())[:2] == [1, 2]

    def test_vllms_reply_drops_the_last_of_them(self) -> None:
        from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
        from vllm.logprobs import Logprob

        row = {7: Logprob(-6.0, 40, "c"), 1: Logprob(-0.1, 1, "a"), 2: Logprob(-2.5, 2, "b")}
        serving: Any = object.__new__(OpenAIServingChat)
        listed = serving._get_top_logprobs(row, 2, None, False)
        assert [one.token for one in listed] == ["c", "a"], "vLLM has mended it"


class TestLoraOnACpu:
    """With LoRA enabled, vLLM's CPU build has additional faults."""

    @pytest.fixture
    def engine(self, vllm_config: EngineConfig) -> Iterator[Any]:
        """An engine with two LoRA slots, of which this library leaves the last one empty."""
        options = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
        options |= vllm_config.engine_options  # type: ignore[operator]
        loaded = start_engine(replace(vllm_config, engine_options=options))
        yield loaded.engine
        loaded.engine.close()

    def test_texts_without_weights_take_those_of_the_last_place(
        self, engine: Any, native: LoadedModel, wide_heads: tuple[Path, dict[str, Path]]
    ) -> None:
        from vllm.lora.request import LoRARequest

        (first, folder), (second, last) = wide_heads[1].items()
        asked: dict[str, Any] = {"logprobs": 1, "max_tokens": 6}
        bare, tuned = (random_ids(7, 10), asked), (random_ids(8, 10), asked | {"lora": first})
        engine.add_lora(first, folder)
        [want] = ask(native.engine, bare)
        got, _ = ask(engine, bare, tuned)
        assert difference(got, want) < TOLERANCE
        with pytest.raises(ParameterError, match="raise max_loras"):
            engine.add_lora(second, last)

        engine.remove_lora(first)
        own = [LoRARequest(path.name, 1 + place, str(path)) for place, path in enumerate((folder, last))]
        for request in own:
            assert engine.core._bridge.run(engine.core._llm.add_lora(request))
        beside, *_ = ask_vllm(engine, bare, *((tuned[0], asked | {"lora": request}) for request in own))
        assert difference(beside, want) > 0.1, "vLLM has mended it: fill the last place"

    def test_an_engine_that_closes_waits_for_no_answer_of_what_is_gone(
        self, engine: Any, wide_heads: tuple[Path, dict[str, Path]]
    ) -> None:
        name, folder = next(iter(wide_heads[1].items()))
        engine.add_lora(name, folder)
        engine.forget_prefixes()
        engine.remove_lora(name)
        closing = threading.Thread(target=engine.close, daemon=True)
        closing.start()
        closing.join(LIMIT_S)
        assert not closing.is_alive(), "vLLM answers nothing once it is shut down"

    def test_numbers_of_a_prompt_beside_another_text_end_the_engine(self, engine: Any) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        neighbour = (random_ids(9, 5), {"max_tokens": 100})
        asked = (random_ids(10, 12), {"prompt_logprobs": 1, "max_tokens": 1})
        with pytest.raises(ParameterError, match="start the engine without enable_lora"):
            ask(engine, neighbour, asked)
        assert ask(engine, neighbour), "it lives on"
        with pytest.raises(EngineDeadError):
            ask_vllm(engine, neighbour, asked)
