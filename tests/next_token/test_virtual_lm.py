"""What `AsyncVirtualLM` adds to any engine: tensors, rows kept by number, genlm-backend's names."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import logprobe.integrations.vllm.virtual_lm
from logprobe import AsyncVirtualLM
from logprobe.errors import EngineClosedError, ParameterError
from logprobe.processors import GlobalLogprobsCapture
from refusals import raises

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from logprobe import LLM

TOLERANCE = 2e-5  # nats, of the native engine on the tiny model


@pytest.fixture(scope="module")
def new_virtual(tiny_llm: LLM) -> Callable[..., AsyncVirtualLM]:
    """Make one around the tiny model's open engine."""
    return lambda *args, **settings: AsyncVirtualLM(tiny_llm, *args, **settings)


def test_rows_are_tensors_of_the_callers_own(new_virtual: Any, plain_row: Any, random_ids: Any) -> None:
    asked = [random_ids(seed, 5) for seed in (1, 2)]
    with new_virtual(None, 8) as lm:
        rows = [
            lm.next_token_logprobs_sync(asked[0]),
            asyncio.run(lm.next_token_logprobs(asked[0])),
            lm.batch_next_token_logprobs_sync(asked)[0],
            asyncio.run(lm.batch_next_token_logprobs(asked))[0],
            lm.next_token_logprobs_uncached(asked[0]),
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


def test_the_number_of_lora_weights_is_the_same_everywhere_and_fits_32_bits() -> None:
    assert AsyncVirtualLM.hash_to_int("lora_1") == 361714580
    numbers = {AsyncVirtualLM.hash_to_int(f"name {i}") for i in range(20_000)}
    assert len(numbers) == 20_000
    assert min(numbers) >= 1
    assert max(numbers) <= 2**31 - 1


def test_lora_weights_go_by_genlm_backends_names(
    new_virtual: Any, adapter_folders: dict[str, Path], random_ids: Any
) -> None:
    ids, folder = random_ids(3, 5), str(adapter_folders["wide"])
    with new_virtual(None, 8) as lm:
        plain = lm.next_token_logprobs_sync(ids)
        lm.add_new_lora(folder, lora_name="virtual")
        assert torch.equal(lm.next_token_logprobs_sync(ids), plain), "loaded, and not yet set"
        lm.set_lora(folder, "virtual")
        tuned = lm.next_token_logprobs_sync(ids)
        assert float((tuned - plain).abs().max()) > 0.01
        lm.clear_lora()
        assert torch.equal(lm.next_token_logprobs_sync(ids), plain)
        with pytest.raises(ValueError, match=r"known: .*virtual"):
            lm.set_lora(folder, "other")
        lm.remove_lora("virtual")


def test_what_exists_stays_open_and_what_was_asked_too_late_is_told(
    new_virtual: Any, tiny_llm: LLM, random_ids: Any
) -> None:
    lm = new_virtual(GlobalLogprobsCapture())
    lm.cleanup()
    lm.cleanup()
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
