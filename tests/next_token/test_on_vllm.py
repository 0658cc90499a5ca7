"""`AsyncVirtualLM` on vLLM: faults of similar designs, and use of an existing engine."""

from __future__ import annotations

import asyncio
import os
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from logprobe.errors import ModelError, ParameterError
from logprobe.next_token import AsyncVirtualLM
from logprobe.processors import GlobalLogprobsCapture
from refusals import raises

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.vllm

TOLERANCE = 2e-4  # nats
ON_VLLM = pytest.mark.parametrize("lm", ["vllm"], indirect=True)
LIMIT_S = 120


def assert_rows(rows: Any, wanted: list[Any]) -> None:
    for row, want in zip(rows, wanted, strict=True):
        np.testing.assert_allclose(row, want, atol=TOLERANCE, rtol=0)


@pytest.fixture(scope="module")
def lora_rows(wide_heads: tuple[Path, dict[str, Path]], plain_rows_of: Any) -> dict[str, Any]:
    """Return LoRA name → slow reference rows, by a model with the weights merged by peft."""
    from peft import PeftModel

    ways = {}
    for name, folder in wide_heads[1].items():
        way = plain_rows_of(wide_heads[0])
        way.model = PeftModel.from_pretrained(way.model, str(folder)).merge_and_unload()
        ways[name] = way
    return ways


@ON_VLLM
def test_more_prompts_than_max_num_seqs_and_prompts_that_one_step_cannot_hold(
    lm: AsyncVirtualLM, plain_row: Any, random_ids: Any
) -> None:
    lengths = [3, 100, 1, 50, 7, 33, 2, 90, 32, 31, 5, 64] * 2  # four rows and 32 tokens per step
    asked = [random_ids(seed, length) for seed, length in enumerate(lengths)]
    assert_rows(lm.batch_next_token_logprobs_sync(asked), [plain_row(ids) for ids in asked])

    async def ask() -> list[Any]:
        return await asyncio.gather(*(lm.next_token_logprobs(ids, use_cache=False) for ids in asked))

    rows = asyncio.run(asyncio.wait_for(ask(), LIMIT_S))
    assert_rows(rows, [plain_row(ids) for ids in asked])


@ON_VLLM
def test_known_prefixes_of_all_lengths_and_unknown_ones_in_one_batch(
    lm: AsyncVirtualLM, plain_row: Any, random_ids: Any
) -> None:
    stem = random_ids(200, 100)
    lm.next_token_logprobs_sync(stem)  # vLLM caches whole blocks of 32
    asked = [[*stem[:end], 7] for end in (99, 31, 64, 1, 63, 65, 32, 96)]
    asked += [random_ids(300 + length, length) for length in (70, 2, 40)]
    assert_rows(lm.batch_next_token_logprobs_sync(asked), [plain_row(ids) for ids in asked])
    lm.clear_cache()
    assert_rows(lm.batch_next_token_logprobs_sync(asked[::-1]), [plain_row(ids) for ids in asked[::-1]])


@ON_VLLM
def test_rows_of_lora_weights_are_never_stale(
    lm: AsyncVirtualLM,
    wide_heads: tuple[Path, dict[str, Path]],
    lora_rows: dict[str, Any],
    plain_row: Any,
    random_ids: Any,
) -> None:
    ids = random_ids(400, 70)
    (first, first_folder), (second, second_folder) = wide_heads[1].items()
    assert_rows([lm.next_token_logprobs_sync(ids)], [plain_row(ids)])
    lm.add_lora("tuned", str(first_folder))
    lm.set_lora("tuned")
    assert_rows([lm.next_token_logprobs_sync(ids)], [lora_rows[first](ids)])
    lm.add_lora("tuned", str(second_folder))  # replaces the other
    assert_rows([lm.next_token_logprobs_sync(ids)], [lora_rows[second](ids)])
    lm.clear_cache()
    assert_rows([lm.next_token_logprobs_sync(ids)], [lora_rows[second](ids)])

    async def ask() -> list[Any]:
        asked = []
        for _ in range(3):
            lm.set_lora("tuned")
            asked.append(asyncio.ensure_future(lm.next_token_logprobs(ids[:40], use_cache=False)))
            await asyncio.sleep(0)
            lm.clear_lora()
            asked.append(asyncio.ensure_future(lm.next_token_logprobs(ids[:40], use_cache=False)))
            await asyncio.sleep(0)
        return await asyncio.gather(*asked)

    rows = asyncio.run(asyncio.wait_for(ask(), LIMIT_S))
    assert_rows(rows, [lora_rows[second](ids[:40]), plain_row(ids[:40])] * 3)
    lm.remove_lora("tuned")
    with raises(ParameterError, parameter="lora"):
        lm.next_token_logprobs_sync(ids, lora="tuned")


@ON_VLLM
def test_lora_weights_that_changed_on_disk_are_loaded_anew(
    lm: AsyncVirtualLM,
    wide_heads: tuple[Path, dict[str, Path]],
    lora_rows: dict[str, Any],
    random_ids: Any,
    tmp_path: Path,
) -> None:
    ids = random_ids(401, 70)
    for name, folder in wide_heads[1].items():
        shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
        lm.add_lora("saved", str(tmp_path))
        lm.set_lora("saved")
        assert_rows([lm.next_token_logprobs_sync(ids)], [lora_rows[name](ids)])
    lm.remove_lora("saved")


@ON_VLLM
def test_a_missing_path_of_lora_weights_fails_where_it_is_added(lm: AsyncVirtualLM, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="adapter_config"):
        lm.add_lora("absent", str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="loaded: none"):
        lm.set_lora("absent")


@ON_VLLM
def test_a_walk_and_the_narrower_questions(lm: AsyncVirtualLM, plain_row: Any, random_ids: Any) -> None:
    ids = random_ids(500, 6)

    async def ask() -> None:
        known = await lm.start(ids[:3])
        for token_id in ids[3:]:
            known = await lm.extend(known, token_id)
        assert_rows([known.logprobs], [plain_row(ids)])
        top = await lm.next_token_topk(ids, 5)
        np.testing.assert_array_equal(top.token_ids, known.logprobs.topk(5).indices)
        given = await lm.next_token_logprobs_for(ids, [3, 200])
        np.testing.assert_array_equal(given, known.logprobs[[3, 200]])
        rows = await lm.trie_logprobs([ids[:2], [*ids[:1], 9]])
        assert_rows(rows.values(), [plain_row(list(prefix)) for prefix in rows])

    asyncio.run(asyncio.wait_for(ask(), LIMIT_S))


@ON_VLLM
def test_the_model_is_in_another_process(lm: AsyncVirtualLM) -> None:
    assert lm.underlying_model is None


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"no_such_option": 1}, "no_such_option"),
        ({"max_logprobs": 5}, "max_logprobs"),
        ({"speculative_config": {"method": "ngram"}}, "speculative_config"),
    ],
)
def test_an_option_that_cannot_be_is_refused_by_name(
    wide_heads: tuple[Path, dict[str, Path]], options: dict[str, Any], match: str
) -> None:
    with pytest.raises(ParameterError, match=match):
        AsyncVirtualLM.from_name(wide_heads[0], options)


@pytest.fixture(scope="module")
def two_workers(wide_heads: tuple[Path, dict[str, Path]], vllm_options: dict[str, Any]) -> Iterator[Any]:
    """vLLM's own blocking engine with two workers, as made by its owner."""
    from vllm import LLM

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1" if (os.cpu_count() or 1) > 1 else "0|0")
        options = vllm_options | {"tensor_parallel_size": 2}
        yield LLM(**AsyncVirtualLM.engine_options(wide_heads[0], options))


def test_an_engine_that_exists_on_several_workers_gives_the_rows_and_stays_its_owners(
    two_workers: Any, plain_rows_of: Any, lora_rows: dict[str, Any], wide_heads: Any, random_ids: Any
) -> None:
    from vllm import SamplingParams

    adapters = list(wide_heads[1].items())
    plain = plain_rows_of(wide_heads[0])
    asked = [random_ids(seed, 3 + 9 * seed) for seed in range(9)]
    wanted = [plain(ids) for ids in asked]
    for name, folder in adapters:  # one after the other, on the same engine
        capture = GlobalLogprobsCapture()
        lm = AsyncVirtualLM(two_workers, capture, cache_size=4)
        with lm:
            assert lm.llm_engine is two_workers
            rows = lm.batch_next_token_logprobs_sync(asked)
            assert_rows(rows, wanted)
            np.testing.assert_array_equal(capture.get_all_logprobs(), rows)
            assert_rows(asyncio.run(lm.batch_next_token_logprobs(asked[::-1])), wanted[::-1])
            lm.add_lora("lora_1", folder)
            lm.set_lora("lora_1")
            assert_rows([lm.next_token_logprobs_sync(asked[8])], [lora_rows[name](asked[8])])
        own = two_workers.generate(
            [{"prompt_token_ids": asked[0]}], SamplingParams(max_tokens=1, temperature=0), use_tqdm=False
        )
        assert own[0].outputs[0].token_ids[0] == wanted[0].argmax()


def test_what_is_no_engine_is_named() -> None:
    with raises(ParameterError, parameter="llm_engine"):
        AsyncVirtualLM(object(), GlobalLogprobsCapture())
