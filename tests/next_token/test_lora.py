"""LoRA adapters: rows with different adapters share a step and are never mixed up."""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
import subprocess
import sys
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from logprobe.errors import ModelError, ModelNotFoundError, ParameterError, UnsupportedModelError
from logprobe.testing import holding_steps
from refusals import raises

if TYPE_CHECKING:
    from pathlib import Path

    from logprobe.next_token import AsyncLM

TOLERANCE = 5e-5


@pytest.fixture(scope="module")
def lora_rows(
    adapter_folders: dict[str, Path], tiny_model_folder: Path, plain_rows_of: Any
) -> dict[str, Any]:
    """Return adapter → slow reference rows, by a model with the adapter merged into its weights by peft."""
    from peft import PeftModel

    ways = {}
    for name, folder in adapter_folders.items():
        way = plain_rows_of(tiny_model_folder)
        way.model = PeftModel.from_pretrained(way.model, str(folder)).merge_and_unload()
        ways[name] = way
    return ways


@pytest.fixture(scope="module", params=["plain", "checkpoint"])
def adapted(request: Any, new_lm: Any, adapter_folders: dict[str, Path]) -> Any:
    with new_lm(weights=request.param) as lm:
        for name, folder in adapter_folders.items():
            lm.add_lora(name, folder)
        yield lm


@pytest.fixture
def fresh(adapted: AsyncLM) -> AsyncLM:
    adapted.clear_cache()
    adapted.clear_kv_cache()
    adapted.clear_lora()
    return adapted


def test_rows_of_one_batch_run_each_under_their_own_adapter(
    fresh: AsyncLM, lora_rows: dict[str, Any], plain_row: Any, random_ids: Any
) -> None:
    names = [None, *lora_rows]
    asked = [(names[place % 3], random_ids(place // 3, 5 + place)) for place in range(12)]

    async def ask() -> list[Any]:
        return await asyncio.gather(*(fresh.next_token_logprobs(ids, lora=name) for name, ids in asked))

    for (name, ids), row in zip(asked, asyncio.run(ask()), strict=True):
        want = plain_row(ids) if name is None else lora_rows[name](ids)
        np.testing.assert_allclose(row, want, atol=TOLERANCE, rtol=0)


def test_a_step_after_one_under_an_adapter_runs_on_the_model_alone(
    fresh: AsyncLM, lora_rows: dict[str, Any], plain_row: Any, random_ids: Any
) -> None:
    ids = random_ids(3, 40)  # too many rows for the recorded series, which does not support adapters

    async def ask() -> list[Any]:
        return [await fresh.next_token_logprobs(ids, lora=name) for name in (next(iter(lora_rows)), None)]

    _, row = asyncio.run(ask())
    np.testing.assert_allclose(row, plain_row(ids), atol=TOLERANCE, rtol=0)


def test_an_adapter_set_between_ask_and_flush_or_after_caching_changes_no_answer_already_asked(
    fresh: AsyncLM, lora_rows: dict[str, Any], plain_row: Any, random_ids: Any
) -> None:
    ids = random_ids(1, 9)
    first, second = lora_rows

    async def ask() -> list[Any]:
        tasks = []
        for name in (None, first, second, None):
            fresh.clear_lora() if name is None else fresh.set_lora(name)
            tasks.append(asyncio.create_task(fresh.next_token_logprobs(ids)))
            await asyncio.sleep(0)
        return await asyncio.gather(*tasks)

    for _ in range(2):  # cold, then cached
        rows = asyncio.run(ask())
        for place, want in enumerate([plain_row, lora_rows[first], lora_rows[second], plain_row]):
            np.testing.assert_allclose(rows[place], want(ids), atol=TOLERANCE, rtol=0)
    assert np.abs(rows[0] - rows[1]).max() > 0.05


def test_prefixes_cached_under_one_adapter_are_not_taken_for_another(
    fresh: AsyncLM, lora_rows: dict[str, Any], plain_row: Any, random_ids: Any
) -> None:
    ids = random_ids(2, 20)
    first = next(iter(lora_rows))
    fresh.next_token_logprobs_sync(ids[:-1])
    fresh.next_token_logprobs_sync(ids[:-1], lora=first)
    np.testing.assert_allclose(
        fresh.next_token_logprobs_sync(ids, lora=first), lora_rows[first](ids), atol=TOLERANCE, rtol=0
    )
    np.testing.assert_allclose(fresh.next_token_logprobs_sync(ids), plain_row(ids), atol=TOLERANCE, rtol=0)


def test_extend_stays_with_the_adapter_that_it_started_under(
    fresh: AsyncLM, lora_rows: dict[str, Any], random_ids: Any
) -> None:
    ids, first = random_ids(3, 6), next(iter(lora_rows))

    async def ask() -> Any:
        known = await fresh.start(ids, lora=first)
        fresh.clear_lora()
        return await fresh.extend(known, 7)

    known = asyncio.run(ask())
    np.testing.assert_allclose(known.logprobs, lora_rows[first]([*ids, 7]), atol=TOLERANCE, rtol=0)


def test_samples_under_an_adapter_follow_its_rows(
    fresh: AsyncLM, lora_rows: dict[str, Any], random_ids: Any
) -> None:
    ids, first = random_ids(4, 6), next(iter(lora_rows))
    for token_id in asyncio.run(fresh.sample(ids, 6, [], temperature=0, lora=first)):
        assert lora_rows[first](ids).argmax() == token_id
        ids = [*ids, token_id]


def test_set_lora_on_an_unknown_name_lists_the_known_ones(fresh: AsyncLM, lora_rows: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"nobody.*" + ".*".join(lora_rows)):
        fresh.set_lora("nobody")
    with raises(ParameterError, parameter="lora"):
        fresh.next_token_logprobs_sync([5], lora="nobody")
    with raises(ParameterError, parameter="lora"):
        asyncio.run(fresh.sample([5], 1, [], lora="nobody"))


def test_a_missing_adapter_path_fails_when_it_is_added(fresh: AsyncLM, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="adapter_config"):
        fresh.add_lora("missing", tmp_path / "nowhere")
    assert "missing" not in fresh.list_loras()


@pytest.mark.parametrize(
    ("option", "value"),
    [("use_dora", True), ("modules_to_save", ["lm_head"]), ("peft_type", "IA3")],
)
def test_an_adapter_that_lacks_the_weights_of_its_options_or_is_of_another_kind_is_refused(
    fresh: AsyncLM, adapter_folders: dict[str, Path], tmp_path: Path, option: str, value: Any
) -> None:
    folder = changed_copy(next(iter(adapter_folders.values())), tmp_path / "a", **{option: value})
    with pytest.raises(UnsupportedModelError):
        fresh.add_lora("odd", folder)
    assert "odd" not in fresh.list_loras()


def test_a_rank_that_does_not_fit_is_an_error_before_any_request(
    fresh: AsyncLM, adapter_folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = changed_copy(next(iter(adapter_folders.values())), tmp_path / "a", r=7)
    with pytest.raises(ModelError, match="does not match"):
        fresh.add_lora("odd", folder)


def test_an_adapter_with_weights_that_have_no_place_is_refused(
    fresh: AsyncLM, adapter_folders: dict[str, Path], tmp_path: Path
) -> None:
    from safetensors.numpy import load_file, save_file

    folder = changed_copy(next(iter(adapter_folders.values())), tmp_path / "a")
    file = folder / "adapter_model.safetensors"
    save_file(load_file(file) | {"base_model.model.extra.weight": np.ones(3)}, file)
    with pytest.raises(ModelError, match="changes extra, which is neither a linear layer"):
        fresh.add_lora("odd", folder)


def test_a_removed_adapter_ends_what_runs_and_takes_nothing_new(
    new_lm: Any,
    adapter_folders: dict[str, Path],
    lora_rows: dict[str, Any],
    random_ids: Any,
) -> None:
    (name, folder), ids = next(iter(adapter_folders.items())), random_ids(5, 9)
    with new_lm() as lm:
        lm.add_lora(name, folder)
        weights = weakref.ref(lm._loaded.engine.core.engine._loras[lm._loaded.engine.lora_number(name)])

        async def ask() -> Any:
            with holding_steps(lm) as hold:
                task = asyncio.create_task(lm.next_token_logprobs(ids, lora=name))
                await asyncio.to_thread(hold.wait)
                lm.remove_lora(name)
            return await task

        np.testing.assert_allclose(asyncio.run(ask()), lora_rows[name](ids), atol=TOLERANCE, rtol=0)
        with raises(ParameterError, parameter="lora"):
            lm.next_token_logprobs_sync(ids, lora=name)
        lm.next_token_logprobs_sync(ids)
        gc.collect()
        assert weights() is None, "removed weights are still held"
        lm.add_lora(name, folder)
        row = lm.next_token_logprobs_sync(ids, lora=name)
        np.testing.assert_allclose(row, lora_rows[name](ids), atol=TOLERANCE, rtol=0)


def test_a_name_loaded_again_answers_anew_and_leaves_what_was_asked(
    new_lm: Any,
    adapter_folders: dict[str, Path],
    lora_rows: dict[str, Any],
    random_ids: Any,
) -> None:
    (first, folder), (second, other) = adapter_folders.items()
    ids = random_ids(7, 9)
    with new_lm() as lm:
        lm.add_lora("legal", folder)
        kept = lm.next_token_logprobs_sync(ids[:-1], lora="legal")

        async def ask() -> list[Any]:
            with holding_steps(lm) as hold:
                before = asyncio.create_task(lm.next_token_logprobs(ids, lora="legal"))
                await asyncio.to_thread(hold.wait)
                lm.add_lora("legal", other)
                after = asyncio.create_task(lm.next_token_logprobs(ids, lora="legal"))
                again = asyncio.create_task(lm.next_token_logprobs(ids[:-1], lora="legal"))
                await asyncio.sleep(0.1)
            return await asyncio.gather(before, after, again)

        before, after, again = asyncio.run(ask())
        assert lm.list_loras() == {"legal": str(other)}
    np.testing.assert_allclose(before, lora_rows[first](ids), atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(after, lora_rows[second](ids), atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(kept, lora_rows[first](ids[:-1]), atol=TOLERANCE, rtol=0)
    np.testing.assert_allclose(again, lora_rows[second](ids[:-1]), atol=TOLERANCE, rtol=0)
    assert np.abs(before - after).max() > 0.05


def test_a_row_begun_after_its_name_was_loaded_again_is_kept_as_the_new_weights(
    new_lm: Any,
    adapter_folders: dict[str, Path],
    lora_rows: dict[str, Any],
    random_ids: Any,
) -> None:
    (_, folder), (second, other) = adapter_folders.items()
    ids = random_ids(7, 9)
    with new_lm(timeout=600.0, batch_size=1000) as lm:
        lm.add_lora("legal", folder)

        async def ask() -> Any:
            waiting = asyncio.create_task(lm.next_token_logprobs(ids, lora="legal"))
            await asyncio.sleep(0.1)
            await asyncio.to_thread(lm.add_lora, "legal", other)
            await lm.batch_next_token_logprobs([ids[:3]])  # starts at once, together with what waits
            return await waiting

        row = asyncio.run(ask())
        assert lm.next_token_logprobs_sync(ids, lora="legal") is row
    np.testing.assert_allclose(row, lora_rows[second](ids), atol=TOLERANCE, rtol=0)


def test_a_missing_adapter_on_the_hub_names_its_id(fresh: AsyncLM) -> None:
    with pytest.raises(ModelNotFoundError, match="Hugging Face id"):
        fresh.add_lora("far", "me/absent")


def test_the_engines_thread_has_ended_before_the_interpreter_takes_itself_apart(
    tiny_model_folder: Path, adapter_folders: dict[str, Path]
) -> None:
    program = f"""
import atexit, threading
atexit.register(lambda: print(sorted(t.name for t in threading.enumerate() if t.name == "logprobe-engine")))
from logprobe.next_token import AsyncLM
lm = AsyncLM.from_name({str(tiny_model_folder)!r}, kv_cache_memory_bytes=1 << 20)
lm.add_lora("legal", {str(next(iter(adapter_folders.values())))!r})
lm.next_token_logprobs_sync([5, 6], lora="legal")
lm.remove_lora("legal")
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "[]"


def test_llm_generates_and_scores_each_request_on_its_own_adapter(
    tiny_model_folder: Path, adapter_folders: dict[str, Path], lora_rows: dict[str, Any], random_ids: Any
) -> None:
    from logprobe import LLM, SamplingParams

    (name, folder), ids = next(iter(adapter_folders.items())), random_ids(6, 9)
    with LLM(str(tiny_model_folder), kv_cache_memory_bytes=1 << 20) as llm:
        llm.add_lora(name, folder)
        assert llm.list_loras() == {name: str(folder)}
        params = [SamplingParams(max_tokens=1, temperature=0, logprobs=0, lora=lora) for lora in (name, None)]
        outputs = llm.generate([ids, ids], params)
        [score] = llm.with_lora(name).score([(ids[:-1], ids[-1:])])
        with raises(ParameterError, parameter="lora"):
            llm.generate(ids, SamplingParams(lora="nobody"))
        with raises(ParameterError, parameter="lora"):
            SamplingParams(lora="")
    want = lora_rows[name](ids)
    assert outputs[0].outputs[0].token_ids == [want.argmax()]
    assert outputs[0].outputs[0].cumulative_logprob == pytest.approx(want.max(), abs=TOLERANCE)
    assert score.logprob == pytest.approx(lora_rows[name](ids[:-1])[ids[-1]], abs=TOLERANCE)


def changed_copy(source: Path, folder: Path, **options: Any) -> Path:
    shutil.copytree(source, folder)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | options))
    return folder
