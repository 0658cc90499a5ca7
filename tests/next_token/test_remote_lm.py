"""A model behind HTTP: the bits of its engine, few requests, and no waiter hangs."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from logprobe import LLM, RemoteLLM
from logprobe.engine.backends.start import LoadedModel
from logprobe.errors import ParameterError, PromptTooLongError
from logprobe.next_token import AsyncLM
from logprobe.server import ServerSettings
from refusals import raises

if TYPE_CHECKING:
    from pathlib import Path

    from logprobe.testing import StepHold

TOLERANCE = 5e-5  # nats: float32 rounding between steps with different batches
ROWS = "/v1/next_token_logprobs"


@pytest.fixture
def posts(far: RemoteLLM, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Record every body sent from now on."""
    link, sent = far._source._link, []  # type: ignore[attr-defined]
    post = link.post

    async def noted(path: str, body: Any, max_bytes: int) -> bytes:
        sent.append((path, body))
        return await post(path, body, max_bytes)  # type: ignore[no-any-return]

    monkeypatch.setattr(link, "post", noted, raising=False)
    return sent


def test_rows_are_the_engines_own_bits(far: RemoteLLM, lm: AsyncLM, random_ids: Any) -> None:
    for seed in range(5):
        ids = random_ids(seed, 3 + 4 * seed)
        near = lm.next_token_logprobs_sync(ids)
        lm.clear_kv_cache()
        np.testing.assert_array_equal(far.next_token_logprobs_sync(ids), near)
        lm.clear_kv_cache()
    np.testing.assert_array_equal(far.next_token_logprobs_sync([]), lm.next_token_logprobs_sync([]))


def test_one_loop_serves_the_desk_and_the_exchanges(far: RemoteLLM) -> None:
    before = set(threading.enumerate())
    with RemoteLLM(far._source._link.url) as lm:  # type: ignore[attr-defined]
        lm.next_token_logprobs_sync([5, 6])
        loops = [one for one in set(threading.enumerate()) - before if one.name == "logprobe-loop"]
        assert len(loops) == 1
    assert not loops[0].is_alive()


def test_a_trie_walked_far_is_the_trie_walked_near(far: RemoteLLM, lm: AsyncLM, random_ids: Any) -> None:
    stem = random_ids(10, 6)
    sequences = [[*stem, 8, 9], [*stem, 8, 10], [*stem, 11], stem[:2]]
    near, there = (asyncio.run(one.trie_logprobs(sequences)) for one in (lm, far))
    assert list(near) == list(there)
    for ids, row in near.items():
        np.testing.assert_allclose(there[ids], row, atol=TOLERANCE, rtol=0)


def test_samples_are_those_of_the_engine(far: RemoteLLM, lm: AsyncLM, random_ids: Any) -> None:
    prompts = [random_ids(11, 5), random_ids(12, 4), random_ids(11, 5)]
    for temperature, seed in ((1.0, 7), (0.3, -(2**70)), (0.0, None)):
        asked = (prompts, 12, [5, 9], temperature, seed)
        assert asyncio.run(far.batch_sample(*asked)) == asyncio.run(lm.batch_sample(*asked))
    assert asyncio.run(far.sample(prompts[0], 0, [])) == asyncio.run(lm.sample(prompts[0], 0, [])) == []
    stop = asyncio.run(far.sample(prompts[0], 8, [], seed=7))[4]
    assert stop not in asyncio.run(far.sample(prompts[0], 8, [stop], seed=7))


def test_the_vocabulary_and_the_tokenizer_are_the_models(far: RemoteLLM, lm: AsyncLM) -> None:
    assert far.byte_vocab == lm.byte_vocab
    assert [bytes(token) for token in far.byte_vocab] == [bytes(token) for token in lm.byte_vocab]
    assert far.str_vocab == lm.str_vocab
    for text in ("the cat é 🐈", " and  the dogs", "<|eos|>x"):
        ids = lm.tokenizer.encode(text)
        assert far.tokenizer.encode(text) == ids
        assert far.tokenizer.encode(text, add_special_tokens=True) == [0, *ids]
        assert far.tokenizer.decode(ids) == lm.tokenizer.decode(ids)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "chat_template", "all_special_ids"):
        assert getattr(far.tokenizer, name) == getattr(lm.tokenizer, name)


def test_concurrent_asks_are_one_exchange_and_equal_ones_one_row(
    far: RemoteLLM, posts: list[Any], random_ids: Any
) -> None:
    asked = [random_ids(20 + place % 4, 6) for place in range(12)]

    async def ask() -> list[Any]:
        return await asyncio.gather(*(far.next_token_logprobs(ids) for ids in asked))

    rows = asyncio.run(ask())
    assert sum(len(body["prompts"]) for _, body in posts) == 4
    assert len(posts) == 1
    assert all(rows[place] is rows[place % 4] for place in range(12))
    assert rows[0].base is None or rows[0].base.nbytes == rows[0].nbytes
    with pytest.raises(ValueError, match="read-only"):
        rows[0][0] = 0


def test_kept_rows_cost_no_exchange_until_they_are_cleared(
    far: RemoteLLM, posts: list[Any], random_ids: Any
) -> None:
    ids = random_ids(30, 6)
    row = far.next_token_logprobs_sync(ids)
    assert far.next_token_logprobs_sync(ids) is row
    assert len(posts) == 1
    far.clear_cache()
    assert far.next_token_logprobs_sync(ids) is not row
    assert len(posts) == 2


def test_what_comes_while_exchanges_are_under_way_is_gathered(
    far: RemoteLLM, lm: AsyncLM, posts: list[Any], random_ids: Any, held: StepHold
) -> None:

    async def ask() -> list[Any]:
        tasks = []
        for place in range(30):
            tasks.append(asyncio.create_task(far.next_token_logprobs(random_ids(40 + place, 5))))
            await asyncio.sleep(0.01)
        held.release()
        return await asyncio.wait_for(asyncio.gather(*tasks), 120)

    rows = asyncio.run(ask())
    assert len(posts) <= 6, "four went alone, the rest was gathered"
    for place, row in enumerate(rows):
        want = lm.next_token_logprobs_sync(random_ids(40 + place, 5))
        np.testing.assert_allclose(row, want, atol=TOLERANCE, rtol=0)


def test_adapters_are_chosen_by_call_and_by_default(
    far: RemoteLLM, lm: AsyncLM, adapter_folders: dict[str, Path], random_ids: Any
) -> None:
    assert far.list_loras() == {name: str(folder) for name, folder in adapter_folders.items()}
    ids = random_ids(50, 7)

    async def ask() -> Any:
        asks = []
        for name in (None, "wide", "narrow", None):
            far.clear_lora() if name is None else far.set_lora(name)
            asks.append(asyncio.create_task(far.next_token_logprobs(ids)))
            asks.append(asyncio.create_task(far.next_token_logprobs(ids, lora=name)))
            await asyncio.sleep(0)
        far.set_lora("wide")
        known = await far.start(ids)
        far.clear_lora()
        return await asyncio.gather(*asks), await far.extend(known, 7)

    for _ in range(2):  # cold, then cached
        rows, known = asyncio.run(ask())
        for place, name in enumerate((None, None, "wide", "wide", "narrow", "narrow", None, None)):
            want = lm.next_token_logprobs_sync(ids, lora=name)
            np.testing.assert_allclose(rows[place], want, atol=TOLERANCE, rtol=0)
        want = lm.next_token_logprobs_sync([*ids, 7], lora="wide")
        np.testing.assert_allclose(known.logprobs, want, atol=TOLERANCE, rtol=0)
    assert np.abs(rows[0] - rows[2]).max() > 0.05
    sampled = [asyncio.run(one.sample(ids, 8, [], seed=1, lora="wide")) for one in (far, lm)]
    assert sampled[0] == sampled[1]


def test_what_cannot_be_served_is_refused_by_name_before_anything_is_sent(
    far: RemoteLLM, posts: list[Any], random_ids: Any
) -> None:
    for bad in ([far.vocab_size], [-1], [[1, 2]], "text", None, [1.5]):
        with pytest.raises(ParameterError, match=r"token_ids|prompt"):
            far.batch_next_token_logprobs_sync([random_ids(60, 4), bad])
    with pytest.raises(PromptTooLongError, match="128"):
        far.next_token_logprobs_sync(random_ids(61, 129))
    with pytest.raises(ParameterError, match=r"nobody.*wide, narrow"):
        far.next_token_logprobs_sync([5], lora="nobody")
    with pytest.raises(ParameterError, match=r"nobody.*wide, narrow"):
        far.set_lora("nobody")
    assert posts == []
    with raises(ParameterError, parameter="temperature"):
        asyncio.run(far.sample([5], 4, [], temperature=3.0))  # above the server's maximum
    assert not far._source._samples  # type: ignore[attr-defined]


def test_what_a_server_cannot_do_is_absent() -> None:
    for name in ("add_lora", "remove_lora", "load_weights", "clear_kv_cache", "underlying_model", "classify"):
        assert hasattr(AsyncLM, name) or name == "classify"
        assert not hasattr(RemoteLLM, name)


def test_more_than_the_server_lets_through_goes_in_portions(
    shared_lm: AsyncLM, new_serving: Any, random_ids: Any
) -> None:
    asked = [random_ids(100 + place, 8) for place in range(40)]
    limits = {"max_requests": 6, "max_tokens_in_flight": 200, "max_body_bytes": 400}
    with new_serving(shared_lm._loaded, ServerSettings(**limits)) as (url, _), RemoteLLM(url) as far:
        rows = far.batch_next_token_logprobs_sync(asked)
        samples = asyncio.run(far.batch_sample(asked[:10], 3, [], seed=1))
    for row, ids in zip(rows, asked, strict=True):
        want = shared_lm.next_token_logprobs_sync(ids)
        np.testing.assert_allclose(row, want, atol=TOLERANCE, rtol=0)
    assert samples == asyncio.run(shared_lm.batch_sample(asked[:10], 3, [], seed=1))


def test_a_vocabulary_wider_than_the_tokenizers(wide_model_folder: Path, new_serving: Any) -> None:
    with (
        AsyncLM.from_name(str(wide_model_folder), kv_cache_memory_bytes=1 << 20) as near,
        new_serving(near._loaded, ServerSettings()) as (url, _),
        RemoteLLM(f"{url}/v1/") as far,
    ):
        assert far.vocab_size == near.vocab_size == len(far.byte_vocab)
        assert far.byte_vocab == near.byte_vocab
        assert far.str_vocab == near.str_vocab
        assert len(far.next_token_logprobs_sync([far.vocab_size - 1])) == far.vocab_size


def test_a_model_without_bos_refuses_an_empty_prefix(tiny_window_folder: Path, new_serving: Any) -> None:
    with (
        LLM(str(tiny_window_folder), kv_cache_memory_bytes=1 << 20) as llm,
        new_serving(llm, ServerSettings()) as (url, _),
        RemoteLLM(url) as far,
        raises(ParameterError, parameter="token_ids"),
    ):
        far.next_token_logprobs_sync([])


@pytest.mark.real_model
def test_the_real_models_rows_tokens_and_words_are_the_same_far_and_near(
    real_llm: LLM, new_serving: Any
) -> None:
    loaded = LoadedModel(real_llm.engine, real_llm.text)
    ids = real_llm.text.encode("The capital of France is").tolist()
    with (
        AsyncLM(loaded) as near,
        new_serving(real_llm, ServerSettings()) as (url, _),
        RemoteLLM(url) as far,
    ):
        near.clear_kv_cache()
        row = near.next_token_logprobs_sync(ids)
        near.clear_kv_cache()
        np.testing.assert_array_equal(far.next_token_logprobs_sync(ids), row)
        assert far.byte_vocab == near.byte_vocab
        assert [bytes(token) for token in far.byte_vocab] == [bytes(token) for token in near.byte_vocab]
        assert far.tokenizer.encode("1234 cats") == near.tokenizer.encode("1234 cats")
        assert asyncio.run(far.sample(ids, 6, [], 0.0)) == asyncio.run(near.sample(ids, 6, [], 0.0))
