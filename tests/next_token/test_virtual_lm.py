"""What `AsyncVirtualLM` adds to other engines: tensors, rows cached by number, genlm-backend's names."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import logprobe.integrations.vllm.virtual_lm
from logprobe.errors import EngineClosedError, ParameterError
from logprobe.next_token import AsyncLM, AsyncVirtualLM
from logprobe.processors import GlobalLogprobsCapture
from refusals import raises

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from logprobe import LLM

TOLERANCE = 2e-5  # nats, of the native engine on the tiny model


@pytest.fixture(scope="module")
def new_virtual(tiny_llm: LLM) -> Callable[..., AsyncVirtualLM]:
    """Make an AsyncVirtualLM on the tiny model's running engine."""
    return lambda *args, **settings: AsyncVirtualLM(tiny_llm, *args, **settings)


class StepCapture:
    """Keep the log-softmax of the latest step, as a vLLM logits processor without knowledge of requests."""

    def __init__(self) -> None:
        self._captured_batch: torch.Tensor | None = None
        self._lock = threading.Lock()

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        captured = torch.log_softmax(logits, dim=-1, dtype=logits.dtype).clone()
        with self._lock:
            self._captured_batch = captured
        return logits

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: Any) -> None:
        pass

    def get_all_logprobs(self) -> torch.Tensor | None:
        with self._lock:
            return None if self._captured_batch is None else self._captured_batch.clone()

    def clear(self) -> None:
        with self._lock:
            self._captured_batch = None


class AllStepsCapture(StepCapture):
    """Keep the steps since the last clear."""

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        before = self.get_all_logprobs()
        super().apply(logits)
        if before is not None:
            assert self._captured_batch is not None
            self._captured_batch = torch.cat([before, self._captured_batch])
        return logits


def test_rows_are_tensors_of_the_callers_own(new_virtual: Any, plain_row: Any, random_ids: Any) -> None:
    asked = [random_ids(seed, 5) for seed in (1, 2)]
    with new_virtual(None, 8) as lm:
        rows = [
            lm.next_token_logprobs_sync(asked[0]),
            asyncio.run(lm.next_token_logprobs(asked[0])),
            lm.batch_next_token_logprobs_sync(asked)[0],
            asyncio.run(lm.batch_next_token_logprobs(asked))[0],
            lm.next_token_logprobs_sync(asked[0], use_cache=False),
            asyncio.run(lm.trie_logprobs(asked))[tuple(asked[0])],
            asyncio.run(lm.start(asked[0])).logprobs,
        ]
        for row in rows:
            assert isinstance(row, torch.Tensor)
            assert row.dtype == torch.float32
            np.testing.assert_allclose(row, plain_row(asked[0]), atol=TOLERANCE, rtol=0)
            row.zero_()
        np.testing.assert_allclose(
            lm.next_token_logprobs_sync(asked[0]), plain_row(asked[0]), atol=TOLERANCE, rtol=0
        )
        given = asyncio.run(lm.next_token_logprobs_for(asked[0], [3, 4]))
        assert isinstance(given, torch.Tensor)
        assert lm.batch_next_token_logprobs_sync([]).shape == (0, lm.vocab_size)


def test_the_cache_is_bounded_by_a_number_of_rows(new_virtual: Any, random_ids: Any) -> None:
    with new_virtual(cache_size=3, cache_opts={"move_to_cpu": True}) as lm:
        for seed in range(5):
            lm.next_token_logprobs_sync(random_ids(seed, 2))
        assert len(lm._cache) == 3
        longest = random_ids(9, 100)
        lm.next_token_logprobs_sync(longest)
        assert len(lm._cache) == 3
        key = next(key for key in lm._cache._kept if len(key[-1]) == 400)
        assert lm._cache.get(key) is not None
    with new_virtual() as lm:
        lm.next_token_logprobs_sync(random_ids(0, 2))
        assert len(lm._cache) == 0


def test_the_capture_is_shown_the_rows_of_the_latest_answer(new_virtual: Any, random_ids: Any) -> None:
    capture = GlobalLogprobsCapture()
    with new_virtual(capture, 4) as lm:
        rows = lm.batch_next_token_logprobs_sync([random_ids(seed, 4) for seed in range(3)])
        assert torch.equal(capture.get_all_logprobs(), rows)
        rows.zero_()
        row = lm.next_token_logprobs_sync(random_ids(1, 4))
        assert torch.equal(capture.get_logprobs(), row)
        assert capture.get_logprobs(1) is None
    assert capture.get_logprobs() is None


@pytest.mark.parametrize("kind", [StepCapture, AllStepsCapture, GlobalLogprobsCapture])
def test_any_capture_has_all_rows_of_a_call_that_no_step_could_hold(
    new_virtual: Any, random_ids: Any, plain_row: Any, kind: Any
) -> None:
    capture = kind()
    asked = [random_ids(seed, 50) for seed in range(5)]  # at 64 tokens per step
    with new_virtual(capture) as lm:
        rows = lm.batch_next_token_logprobs_sync(token_ids_list=asked)
        np.testing.assert_allclose(capture.get_all_logprobs(), rows, atol=1e-5)
        np.testing.assert_allclose(rows, np.stack([plain_row(ids) for ids in asked]), atol=1e-4, rtol=0)
        row = asyncio.run(lm.next_token_logprobs(asked[3]))
        np.testing.assert_allclose(capture.get_all_logprobs(), row[None], atol=1e-5)
        lm.batch_next_token_logprobs_sync([])
        assert capture.get_all_logprobs() is None
    assert capture.get_all_logprobs() is None


def test_rows_that_are_kept_are_passed_by_in_a_sync_batch_alone(new_virtual: Any, random_ids: Any) -> None:
    ids = random_ids(1, 4)
    with new_virtual(None, 8) as lm:
        row = lm.next_token_logprobs_sync(ids)
        wrong = np.zeros(lm.vocab_size, np.float32)
        lm._cache.put(lm._prefix_of(ids), wrong)
        assert torch.equal(lm.batch_next_token_logprobs_sync([ids])[0], row)
        kept = [
            lm.next_token_logprobs_sync(ids),
            asyncio.run(lm.next_token_logprobs(ids)),
            asyncio.run(lm.batch_next_token_logprobs([ids]))[0],
            lm.batch_next_token_logprobs_sync([ids], use_cache=True)[0],
        ]
        assert all(torch.equal(found, torch.from_numpy(wrong)) for found in kept)


def test_the_cache_is_there_by_token_ids(
    new_virtual: Any, adapter_folders: dict[str, Path], random_ids: Any
) -> None:
    first, second = (tuple(random_ids(seed, 4)) for seed in (1, 2))
    with new_virtual() as lm:
        assert lm.cache is None
    with new_virtual(None, 2) as lm:
        assert lm.cache.maxsize == 2
        row = lm.next_token_logprobs_sync(first)
        assert first in lm.cache
        assert second not in lm.cache
        assert torch.equal(lm.cache[first], row)
        lm.cache[first].zero_()
        assert torch.equal(lm.cache[first], row), "it is the caller's own"
        with pytest.raises(KeyError):
            lm.cache[second]
        lm.add_lora("kept", adapter_folders["wide"])
        lm.set_lora("kept")
        assert first not in lm.cache, "not under these weights"
        lm.clear_lora()
        lm.remove_lora("kept")
        lm.next_token_logprobs_sync(second)
        assert len(lm.cache) == 2
        lm.clear_cache()
        assert len(lm.cache) == 0


def test_a_sample_ends_at_the_models_end_of_text_unless_it_is_told(new_virtual: Any, random_ids: Any) -> None:
    prompts = [random_ids(seed, 4) for seed in range(24)]
    with new_virtual() as lm:
        eos = lm.tokenizer.eos_token_id
        free = asyncio.run(lm.batch_sample(prompts, 60, [], 4.0, 1, ignore_eos=True))
        samples = asyncio.run(lm.batch_sample(prompts, 60, [], 4.0, 1))
    assert any(eos in sample for sample in free)
    for sample, whole in zip(samples, free, strict=True):
        assert sample == whole[: whole.index(eos) + 1 if eos in whole else None]


def test_it_counts_as_an_async_lm(new_virtual: Any) -> None:
    assert issubclass(AsyncVirtualLM, AsyncLM)
    with new_virtual() as lm:
        assert isinstance(lm, AsyncLM)


def test_the_number_of_lora_weights_is_the_same_everywhere_and_fits_32_bits() -> None:
    assert AsyncVirtualLM.hash_to_int("lora_1") == 279494801
    numbers = {AsyncVirtualLM.hash_to_int(f"name {i}") for i in range(20_000)}
    assert len(numbers) == 20_000
    assert min(numbers) >= 1
    assert max(numbers) <= 2**31 - 1


def test_lora_weights_are_set_by_name(
    new_virtual: Any, adapter_folders: dict[str, Path], random_ids: Any
) -> None:
    ids, folder = random_ids(3, 5), str(adapter_folders["wide"])
    with new_virtual(None, 8) as lm:
        plain = lm.next_token_logprobs_sync(ids)
        lm.add_lora("virtual", folder)
        assert torch.equal(lm.next_token_logprobs_sync(ids), plain), "loaded, and not yet set"
        lm.set_lora("virtual")
        tuned = lm.next_token_logprobs_sync(ids)
        assert float((tuned - plain).abs().max()) > 0.01
        lm.clear_lora()
        assert torch.equal(lm.next_token_logprobs_sync(ids), plain)
        with pytest.raises(ValueError, match=r"loaded: .*virtual"):
            lm.set_lora("other")
        lm.remove_lora("virtual")


def test_what_exists_stays_open_and_what_was_asked_too_late_is_told(
    new_virtual: Any, tiny_llm: LLM, random_ids: Any
) -> None:
    lm = new_virtual(GlobalLogprobsCapture())
    lm.close()
    lm.close()
    with pytest.raises(EngineClosedError):
        lm.next_token_logprobs_sync(random_ids(1, 3))
    assert tiny_llm.generate([random_ids(1, 3)])[0].outputs[0].token_ids


def test_without_vllm_the_line_that_installs_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logprobe.integrations.vllm.virtual_lm, "find_spec", lambda _: None)
    with pytest.raises(ImportError, match=r"pip install 'logprobe\[vllm\]'"):
        AsyncVirtualLM.from_name("smollm2")
    with pytest.raises(ImportError, match=r"pip install 'logprobe\[vllm\]'"):
        AsyncVirtualLM(object(), GlobalLogprobsCapture())


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"cache_size": -1}, "cache_size"),
        ({"cache_size": 1.5}, "cache_size"),
        ({"cache_opts": {"move_to_gpu": True}}, "move_to_gpu"),
        ({"batch_size": 0}, "batch_size"),
        ({"timeout": -1}, "timeout"),
    ],
)
def test_a_setting_out_of_range_is_named_before_a_model_is_loaded(
    new_virtual: Any, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], name: str
) -> None:
    with raises(ParameterError, parameter=name):
        new_virtual(**settings)
    monkeypatch.setattr(logprobe.integrations.vllm.virtual_lm, "find_spec", lambda _: True)
    with raises(ParameterError, parameter=name):
        AsyncVirtualLM.from_name("no such model", **settings)
    with pytest.raises(ParameterError, match="batch_size"):
        AsyncVirtualLM.from_name("no such model", batchsize=3)


def test_the_defaults_are_genlm_backends(new_virtual: Any) -> None:
    assert AsyncVirtualLM.default_params == {
        "max_tokens": 1,
        "n": 1,
        "detokenize": False,
        "stop": None,
        "ignore_eos": True,
    }
    with new_virtual() as lm:
        assert (lm.batch_size, lm.timeout) == (20, 0.02)
