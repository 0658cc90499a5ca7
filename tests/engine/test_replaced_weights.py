"""Weights replaced in a running engine: no cache and no request mixes results of old and new weights."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import shutil
import threading
import time
import weakref
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from logprobe import LLM, RemoteLLM, SamplingParams
from logprobe.analysis import DataSettings, score_dataset
from logprobe.analysis.datasets.run import DatasetRun, OneModel
from logprobe.analysis.io.sources import find_sources
from logprobe.analysis.windows import WindowSettings, score_windows
from logprobe.compat import genlm
from logprobe.engine.forward import process_memory
from logprobe.errors import (
    BatchError,
    EngineClosedError,
    InputError,
    ModelNotFoundError,
    ParameterError,
    UnsupportedModelError,
    WeightsReplacedError,
)
from logprobe.models.loading import digest_of, read_state, save_state
from logprobe.next_token import AsyncLM
from logprobe.records import FlatLogprobs
from logprobe.server import ServerSettings
from logprobe.testing import check_integrity, holding_steps
from refusals import raises

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LIMIT_S = 120  # generous, also for a busy machine
PAIRS = [("the cat", " and the dog"), ([5, 60, 61], [70, 71, 72, 9])]
LONG = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def state(tiny_model_folder: Path) -> dict[str, torch.Tensor]:
    """The model's weights after some training steps."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    generator = torch.Generator().manual_seed(7)
    return {
        name: weight + 0.03 * torch.randn(weight.shape, generator=generator)
        for name, weight in model.state_dict().items()
    }


@pytest.fixture(scope="module")
def new_folder(
    state: dict[str, torch.Tensor], tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The same weights as a checkpoint folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("trained")
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    model.load_state_dict(state)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model_folder).save_pretrained(folder)
    return folder


def _new_llm(folder: Path) -> LLM:
    return LLM(str(folder), kv_cache_memory_bytes=1 << 20, max_num_batched_tokens=64, max_num_seqs=8)


@pytest.fixture
def llm(tiny_model_folder: Path) -> Iterator[LLM]:
    """A separate model for each test, as its weights change."""
    with _new_llm(tiny_model_folder) as llm:
        yield llm


@pytest.fixture(scope="module")
def want(new_folder: Path) -> list[Any]:
    """The results of a fresh load of the new weights: two scores, then a greedy text."""
    with _new_llm(new_folder) as fresh:
        return [*fresh.score(PAIRS), fresh.generate("the cat", LONG)[0].outputs[0].token_ids]


@pytest.mark.parametrize("form", ["state", "folder", "bfloat16"])
def test_the_numbers_afterwards_are_those_of_a_fresh_load(
    llm: LLM, state: dict[str, torch.Tensor], new_folder: Path, want: list[Any], form: str
) -> None:
    before = llm.score(PAIRS)
    llm.generate("the cat", LONG)  # caches its prefix and rows
    if form == "bfloat16":
        llm.load_weights({name: weight.bfloat16() for name, weight in state.items()})
        moved = llm.score(PAIRS)
        assert abs(moved[0].logprob - want[0].logprob) < 1.0
        assert moved[0].token_logprobs != before[0].token_logprobs
        return
    llm.load_weights(state if form == "state" else new_folder)
    assert llm.score(PAIRS) == want[:2]
    assert llm.generate("the cat", LONG)[0].outputs[0].token_ids == want[2]
    assert before != want[:2]
    check_integrity(llm)


@pytest.mark.parametrize("form", ["bfloat16", "float16", "float32"])
def test_new_weights_run_by_the_native_decoder_in_the_form_that_they_come_in(
    llm: LLM, state: dict[str, torch.Tensor], form: str
) -> None:
    dtype: torch.dtype = getattr(torch, form)
    llm.load_weights({name: weight.to(dtype) for name, weight in state.items()})
    forward: Any = llm.engine.core.engine.forward
    assert forward.layout.why_transformers is None
    assert forward.decoder.launches is not None
    parts = [
        part for layer in forward.decoder.layers for part in (*layer.projection.parts, *layer.output.parts)
    ]
    assert {part.form.name for part in parts} == {form}


def test_training_goes_on_without_moving_what_was_loaded(
    llm: LLM, state: dict[str, torch.Tensor], want: list[Any]
) -> None:
    own = {name: weight.clone() for name, weight in state.items()}
    llm.load_weights(own)
    for weight in own.values():
        weight.zero_()
    assert llm.score(PAIRS) == want[:2]


def test_kept_rows_of_the_next_token_do_not_outlive_their_weights(
    llm: LLM, state: dict[str, torch.Tensor], new_folder: Path
) -> None:
    with AsyncLM(llm) as lm, _new_llm(new_folder) as fresh, AsyncLM(fresh) as other:
        old = lm.next_token_logprobs_sync([5, 60])
        llm.load_weights(state)
        new = lm.next_token_logprobs_sync([5, 60])
        np.testing.assert_array_equal(new, other.next_token_logprobs_sync([5, 60]))
        assert np.abs(new - old).max() > 1e-3


def test_lora_weights_are_kept_over_the_new_ones(
    llm: LLM, state: dict[str, torch.Tensor], new_folder: Path, adapter_folders: dict[str, Path]
) -> None:
    llm.add_lora("wide", adapter_folders["wide"])
    tuned = llm.with_lora("wide")
    old = tuned.score(PAIRS)
    llm.load_weights(state)
    new = tuned.score(PAIRS)
    with _new_llm(new_folder) as fresh:
        fresh.add_lora("wide", adapter_folders["wide"])
        assert new == fresh.with_lora("wide").score(PAIRS)
    assert new != old


@pytest.mark.parametrize("is_there", [False, True])
def test_lora_weights_are_kept_as_they_were_read(
    llm: LLM,
    state: dict[str, torch.Tensor],
    new_folder: Path,
    adapter_folders: dict[str, Path],
    tmp_path: Path,
    *,
    is_there: bool,
) -> None:
    """Whatever the folder holds by then."""
    folder = tmp_path / "lora"
    shutil.copytree(adapter_folders["wide"], folder)
    llm.add_lora("a", folder)
    shutil.rmtree(folder)
    if is_there:
        shutil.copytree(adapter_folders["narrow"], folder)
    llm.load_weights(state)
    with _new_llm(new_folder) as fresh, genlm.AsyncLM(llm) as lm:
        fresh.add_lora("a", adapter_folders["wide"])
        assert llm.with_lora("a").score(PAIRS) == fresh.with_lora("a").score(PAIRS)
        lm.set_lora(folder, "a")
        lm.next_token_logprobs_sync([5, 60])


@pytest.mark.parametrize(
    "wrapped",
    ["module.{}", "_orig_mod.{}", "base_model.model.{}", "module._orig_mod.base_model.model.{}", "numpy"],
)
def test_weights_of_a_wrapped_module_and_numpys_are_taken(
    llm: LLM, state: dict[str, torch.Tensor], want: list[Any], wrapped: str
) -> None:
    given: dict[str, Any] = {wrapped.format(name): weight for name, weight in state.items()}
    if wrapped == "numpy":
        given = {name: weight.numpy() for name, weight in state.items()}
        given["lm_head.weight"].flags.writeable = False
    assert llm.load_weights(given) == digest_of(state)
    assert llm.score(PAIRS) == want[:2]


def test_a_folder_of_a_wrapped_modules_weights_is_taken(
    llm: LLM, state: dict[str, torch.Tensor], want: list[Any], tmp_path: Path
) -> None:
    save_state({f"module.{name}": weight for name, weight in state.items()}, tmp_path)
    assert llm.load_weights(tmp_path) == digest_of(state)
    assert llm.score(PAIRS) == want[:2]


def test_weights_that_are_none_or_not_merged_are_refused_with_the_remedy(
    llm: LLM, state: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    before, name = llm.score(PAIRS), "model.layers.0.mlp.up_proj"
    peft = {f"base_model.model.{name}.base_layer.weight": state[f"{name}.weight"]}
    peft |= {f"base_model.model.{name}.lora_A.default.weight": torch.zeros(2, 64)}
    save_state(peft, tmp_path)
    others: list[tuple[Any, str]] = [
        (peft, r"belongs to an unmerged PEFT model; give merge_and_unload\(\)\.state_dict\(\)"),
        (tmp_path, "belongs to an unmerged PEFT model"),
        (state | {f"{name}.weight": [1.0]}, "is a list; give a torch tensor or NumPy array"),
        (state | {f"{name}.weight": np.array(["x"])}, "is not a dtype of weights"),
        ({7: state[f"{name}.weight"]}, "must have strings as keys, got 7"),
        (torch.nn.Linear(2, 2), r"must be a state_dict\(\) or a folder, got a Linear"),
        (
            state | {f"_orig_mod.{name}.weight": state[f"{name}.weight"] + 1},
            "twice after the prefixes of wrappers",
        ),
    ]
    for weights, says in others:
        with raises(ParameterError, parameter="weights", match=says):
            llm.load_weights(weights)
    assert llm.score(PAIRS) == before


def test_a_caller_in_an_event_loop_replaces_weights(
    llm: LLM, state: dict[str, torch.Tensor], new_folder: Path
) -> None:
    async def run(lm: AsyncLM) -> tuple[Any, Any]:
        old = await lm.next_token_logprobs([5, 60])
        with raises(ParameterError, parameter="on_running"):
            await lm.load_weights(state, on_running="wait")  # type: ignore[arg-type]
        assert await lm.load_weights(state, version="step 2") == "step 2"
        return old, await lm.next_token_logprobs([5, 60])

    with AsyncLM(llm) as lm, _new_llm(new_folder) as fresh, AsyncLM(fresh) as other:
        old, new = asyncio.run(run(lm))
        np.testing.assert_array_equal(new, other.next_token_logprobs_sync([5, 60]))
    assert np.abs(new - old).max() > 1e-3
    assert llm.engine.capabilities().weight_version == "step 2"


class Running:
    """Long requests running on another thread, stopped within a step."""

    def __init__(self, llm: LLM) -> None:
        self.outputs: list[Any] = []
        self.errors: list[BaseException] = []
        self._held = ExitStack()
        hold = self._held.enter_context(holding_steps(llm))
        self._thread = threading.Thread(target=self._work, args=(llm,))
        self._thread.start()
        hold.wait(LIMIT_S)

    def _work(self, llm: LLM) -> None:
        try:
            self.outputs = llm.generate(["the cat", "the dog"], LONG)
        except BatchError as error:
            self.outputs, self.errors = list(error.outputs), [*error.errors.values()]

    def go_on(self) -> None:
        self._held.close()

    def join(self) -> None:
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()


def wait_for_command(llm: LLM, kind: str) -> None:
    """Wait until a command is queued behind the held step."""
    deadline = time.monotonic() + LIMIT_S
    while kind not in {type(one).__name__ for one in list(llm.engine.core._commands)}:
        assert time.monotonic() < deadline, f"no {kind} came"
        time.sleep(0.005)


def test_requests_that_run_finish_on_the_old_weights_and_later_ones_wait(
    llm: LLM, state: dict[str, torch.Tensor], want: list[Any]
) -> None:
    old = [output.outputs[0].token_ids for output in llm.generate(["the cat", "the dog"], LONG)]
    llm.engine.forget_prefixes()
    running = Running(llm)
    loading = threading.Thread(target=llm.load_weights, args=(state,))
    loading.start()
    later: list[Any] = []
    asking = threading.Thread(target=lambda: later.extend(llm.score(PAIRS)))
    wait_for_command(llm, "TakeWeights")
    asking.start()
    wait_for_command(llm, "Submit")  # queued behind the new weights
    running.go_on()
    for thread in (loading, asking):
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    running.join()
    assert [output.outputs[0].token_ids for output in running.outputs] == old
    assert later == want[:2]


def test_requests_that_run_end_by_name_where_that_is_asked(
    llm: LLM, state: dict[str, torch.Tensor], want: list[Any]
) -> None:
    running = Running(llm)
    loading = threading.Thread(target=llm.load_weights, args=(state,), kwargs={"on_running": "end"})
    loading.start()
    wait_for_command(llm, "TakeWeights")
    running.go_on()
    loading.join(LIMIT_S)
    running.join()
    assert [type(error) for error in running.errors] == [WeightsReplacedError] * 2
    assert "weights were replaced" in str(running.errors[0])
    assert llm.score(PAIRS) == want[:2]
    check_integrity(llm)


def test_weights_that_do_not_fit_are_refused_and_the_old_ones_go_on(
    llm: LLM, state: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    before = llm.score(PAIRS)
    name = "model.layers.0.mlp.up_proj.weight"
    part = {key: weight for key, weight in state.items() if key != name}
    for weights, says in (
        (part, rf"1 missing \({name}\)"),
        (state | {"extra": torch.zeros(2)}, r"1 unknown \(extra\)"),
        (state | {name: torch.zeros(3, 64)}, "1 with another shape"),
    ):
        with pytest.raises(UnsupportedModelError, match=says):
            llm.load_weights(weights)
    with pytest.raises(ModelNotFoundError, match=r"has no \*.safetensors"):
        llm.load_weights(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no such thing")
    with pytest.raises(UnsupportedModelError, match="cannot be read"):
        llm.load_weights(tmp_path)
    with raises(ParameterError, parameter="on_running"):
        llm.load_weights(state, on_running="wait")  # type: ignore[arg-type]
    assert llm.score(PAIRS) == before


def test_a_closed_engine_takes_no_weights(tiny_model_folder: Path, state: dict[str, torch.Tensor]) -> None:
    llm = _new_llm(tiny_model_folder)
    llm.close()
    with pytest.raises(EngineClosedError):
        llm.load_weights(state)
    with pytest.raises(EngineClosedError, match="before the new weights"):
        llm.engine.load_weights(state, finishes=True)


def test_a_request_given_up_while_it_waits_never_runs(llm: LLM, state: dict[str, torch.Tensor]) -> None:
    running = Running(llm)
    loading = threading.Thread(target=llm.load_weights, args=(state,))
    loading.start()
    wait_for_command(llm, "TakeWeights")
    stream = llm.stream([5, 60], LONG)
    waiter = threading.Thread(target=lambda: next(stream, None))
    waiter.start()
    running.go_on()
    for thread in (loading, waiter):
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    running.join()
    stream.close()
    assert llm.generate([5], SamplingParams(max_tokens=1))[0].error is None


# -- weights versions in records ---------------------------------------------------------------------------


def version_of(folder: Path) -> str:
    """Return the version of a folder's weights: the digest of its file."""
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    return f"sha256:{digest}"


def versions_of(output: Any) -> set[str | None]:
    """Return the versions in all records of an output."""
    completion = output.outputs[0]
    records = (output.prompt_logprobs, completion.logprobs, completion.processed_logprobs)
    return {one.info.weight_version for one in (output, *records) if one is not None}


def numbers_of(output: Any) -> Any:
    """Return the log-probabilities of the prompt's tokens, nats."""
    return np.ma.compressed(output.prompt_logprobs.chosen_entries().logprobs)


ALL = SamplingParams(
    max_tokens=3, temperature=0.7, seed=1, logprobs=2, prompt_logprobs=1, logprobs_mode="both"
)


def test_records_name_the_weights_that_gave_them(
    llm: LLM, state: dict[str, torch.Tensor], tiny_model_folder: Path
) -> None:
    first, own = llm.generate("the cat", ALL)[0], version_of(tiny_model_folder)
    assert versions_of(first) == {own}
    assert llm.load_weights(state, version="step-1200") == "step-1200"
    output, [score] = llm.generate("the cat", ALL)[0], llm.score(PAIRS[:1])
    assert versions_of(output) == {"step-1200"}
    assert score.record.info.weight_version == "step-1200"
    assert FlatLogprobs.from_bytes(output.prompt_logprobs.to_bytes()).info == output.prompt_logprobs.info
    assert versions_of(first) == {own}


def test_the_form_and_the_proof_that_are_told_are_those_of_the_new_weights(
    llm: LLM, state: dict[str, torch.Tensor]
) -> None:
    before = llm.engine.capabilities()
    llm.load_weights(state)
    able, info = llm.engine.capabilities(), llm.score(PAIRS[:1])[0].record.info
    layout = llm.engine.core.engine.forward.layout
    assert (info.weights, info.layers) == (layout.weights, layout.layers)
    assert layout is not before.layout
    assert info.probe_difference == layout.probe_difference
    assert (able.layout, able.weight_version) == (layout, info.weight_version)


def test_weights_without_a_name_go_by_a_digest_of_their_numbers(
    llm: LLM, state: dict[str, torch.Tensor], new_folder: Path
) -> None:
    want = digest_of(state)
    assert llm.load_weights(state) == llm.load_weights(new_folder) == want
    assert digest_of(read_state(new_folder)) == want
    name = next(iter(state))
    others: list[dict[str, Any]] = [
        state | {name: state[name] + 1},
        state | {name: state[name].double()},
        state | {name: state[name].T},
        {key: value for key, value in state.items() if key != name},
        {f"{key}x" if key == name else key: value for key, value in state.items()},
    ]
    assert len({want, *map(digest_of, others)}) == 6
    assert digest_of({"a": torch.tensor(1.5), "b": torch.zeros(0)}).startswith("blake2b:")


@pytest.mark.parametrize("version", ["", "a\nb", "\ud800", "x" * 257, 7])
def test_a_version_that_no_record_can_hold_is_refused(
    llm: LLM, state: dict[str, torch.Tensor], version: Any
) -> None:
    own = llm.engine.capabilities().weight_version
    with raises(ParameterError, parameter="version"):
        llm.load_weights(state, version=version)
    assert llm.engine.capabilities().weight_version == own


@pytest.mark.parametrize("overlap", [False, True])
def test_a_record_across_a_replacement_names_the_weights_that_it_ran_on(
    tiny_model_folder: Path,
    state: dict[str, torch.Tensor],
    *,
    overlap: bool,
) -> None:
    """Running requests finish on the old weights; waiting ones run on the new, even if submitted before."""
    with LLM(
        str(tiny_model_folder), kv_cache_memory_bytes=1 << 20, max_num_seqs=8, async_scheduling=overlap
    ) as llm:
        running = Running(llm)
        loading = threading.Thread(target=llm.load_weights, args=(state,), kwargs={"version": "new"})
        loading.start()
        later: list[Any] = []
        asking = threading.Thread(target=lambda: later.extend(llm.generate(["the cat"], ALL)))
        wait_for_command(llm, "TakeWeights")
        asking.start()
        wait_for_command(llm, "Submit")
        running.go_on()
        for thread in (loading, asking):
            thread.join(LIMIT_S)
            assert not thread.is_alive()
        running.join()
        want = llm.generate(["the cat"], ALL)[0]
    assert [versions_of(output) for output in running.outputs] == [{version_of(tiny_model_folder)}] * 2
    assert versions_of(later[0]) == versions_of(want) == {"new"}
    assert later[0].prompt_logprobs == want.prompt_logprobs


def test_of_two_loads_the_later_answers_in_the_end(
    llm: LLM, state: dict[str, torch.Tensor], tiny_model_folder: Path
) -> None:
    running = Running(llm)
    loads = [threading.Thread(target=llm.load_weights, args=(state,), kwargs={"version": "first"})]
    loads[0].start()
    wait_for_command(llm, "TakeWeights")
    last = {"version": "last"}
    loads.append(threading.Thread(target=llm.load_weights, args=(tiny_model_folder,), kwargs=last))
    loads[1].start()
    running.go_on()
    for thread in loads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    running.join()
    assert llm.engine.capabilities().weight_version == "last"
    assert llm.score(PAIRS[:1])[0].record.info.weight_version == "last"


def test_lora_weights_that_come_while_others_wait_run_on_both(
    llm: LLM,
    state: dict[str, torch.Tensor],
    new_folder: Path,
    adapter_folders: dict[str, Path],
) -> None:
    running = Running(llm)
    loading = threading.Thread(target=llm.load_weights, args=(state,))
    loading.start()
    wait_for_command(llm, "TakeWeights")
    llm.add_lora("wide", adapter_folders["wide"])
    running.go_on()
    loading.join(LIMIT_S)
    assert not loading.is_alive()
    running.join()
    with _new_llm(new_folder) as fresh:
        fresh.add_lora("wide", adapter_folders["wide"])
        assert llm.with_lora("wide").score(PAIRS) == fresh.with_lora("wide").score(PAIRS)


# -- no cache returns results of old weights ----------------------------------------------------------------


@pytest.mark.parametrize("lora", [None, "wide"])
def test_prompts_asked_again_have_the_new_numbers_and_the_new_version(
    llm: LLM,
    state: dict[str, torch.Tensor],
    new_folder: Path,
    adapter_folders: dict[str, Path],
    lora: str | None,
) -> None:
    """The radix tree, the rows of cached prompts, and LoRA weights of the same name."""
    asked = SamplingParams(max_tokens=2, temperature=0, logprobs=2, prompt_logprobs=2, lora=lora)
    with _new_llm(new_folder) as fresh:
        for one in (llm, fresh):
            one.add_lora("wide", adapter_folders["wide"])
        want = fresh.generate("the cat and the dog", asked)[0]
    first = [llm.generate("the cat and the dog", asked)[0] for _ in range(2)][1]
    llm.load_weights(state, version="b")
    again = llm.generate("the cat and the dog", asked)[0]
    np.testing.assert_allclose(numbers_of(again), numbers_of(want), atol=5e-5, rtol=0)
    assert np.abs(numbers_of(again) - numbers_of(first)).max() > 1e-3
    assert again.outputs[0].token_ids == want.outputs[0].token_ids
    assert versions_of(again) == {"b"}


@pytest.mark.parametrize("lora", [None, "wide"])
def test_rows_that_are_kept_are_those_of_the_weights_that_answer(
    llm: LLM, state: dict[str, torch.Tensor], adapter_folders: dict[str, Path], lora: str | None
) -> None:
    llm.add_lora("wide", adapter_folders["wide"])
    with AsyncLM(llm) as lm:
        old = lm.next_token_logprobs_sync([5, 60], lora=lora)
        llm.load_weights(state)
        new = lm.next_token_logprobs_sync([5, 60], lora=lora)
        assert lm.next_token_logprobs_sync([5, 60], lora=lora) is new
        np.testing.assert_array_equal(new, lm.next_token_logprobs_sync([5, 60], lora=lora, use_cache=False))
    assert np.abs(new - old).max() > 1e-3


def test_a_row_that_waited_for_other_weights_is_kept_as_theirs(
    llm: LLM, state: dict[str, torch.Tensor]
) -> None:
    with AsyncLM(llm) as lm:
        running = Running(llm)
        loading = threading.Thread(target=llm.load_weights, args=(state,))
        loading.start()
        wait_for_command(llm, "TakeWeights")
        rows: list[Any] = []
        asking = threading.Thread(target=lambda: rows.append(lm.next_token_logprobs_sync([5, 60])))
        asking.start()
        wait_for_command(llm, "Submit")
        running.go_on()
        for thread in (loading, asking):
            thread.join(LIMIT_S)
            assert not thread.is_alive()
        running.join()
        assert lm.next_token_logprobs_sync([5, 60]) is rows[0]
        lm.clear_cache()
        np.testing.assert_array_equal(rows[0], lm.next_token_logprobs_sync([5, 60]))


def test_the_module_below_an_async_model_is_that_of_the_new_weights(
    llm: LLM, state: dict[str, torch.Tensor]
) -> None:
    with AsyncLM(llm) as lm:
        assert lm.underlying_model is not None
        before = weakref.ref(llm.engine.core.engine.forward)
        llm.load_weights(state)
        norm = dict(lm.underlying_model.named_parameters())["model.norm.weight"]
        assert torch.equal(norm, state["model.norm.weight"])
        gc.collect()
        assert before() is None, "the old weights go"


def test_the_old_weights_are_gone_when_the_new_ones_answer(
    llm: LLM, state: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `gc.collect()` by the caller, and their memory is returned to the system."""
    llm.load_weights(state)
    before, returned = weakref.ref(llm.engine.core.engine.forward), []
    monkeypatch.setattr(process_memory, "return_freed", lambda: returned.append(before() is None))
    gc.disable()
    try:
        llm.load_weights(state)
        is_gone = before() is None
    finally:
        gc.enable()
    assert is_gone
    assert returned == [True]


def test_nothing_of_the_new_weights_is_stored_for_the_models_own(
    tiny_model_folder: Path, state: dict[str, torch.Tensor]
) -> None:
    with _new_llm(tiny_model_folder) as llm:
        before = llm.score(PAIRS)
        llm.load_weights(state)
        assert llm.score(PAIRS) != before
    with _new_llm(tiny_model_folder) as again:  # from the model cache
        scores = again.score(PAIRS)
        assert scores == before
        assert scores[0].record.info.weight_version == version_of(tiny_model_folder)


def test_a_text_in_windows_has_numbers_of_one_version(llm: LLM, state: dict[str, torch.Tensor]) -> None:
    is_scored = threading.Event()

    class Noting:
        text, engine = llm.text, llm.engine

        def score(self, *args: Any, **more: Any) -> Any:
            scores = llm.score(*args, **more)
            is_scored.set()
            return scores

    ids = np.arange(40, dtype=np.int32) % 7 + 60

    def pieces() -> Iterator[Any]:
        yield ids
        assert is_scored.wait(20)
        llm.load_weights(state, version="b")
        yield ids

    settings = WindowSettings.of(llm, window=16)
    with pytest.raises(WeightsReplacedError, match="score it again"):
        list(score_windows(Noting(), pieces(), settings))
    assert len(list(score_windows(llm, [ids, ids], settings))) > 2


def test_a_run_over_a_data_set_holds_numbers_of_one_version(
    llm: LLM, state: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    import pyarrow.parquet as pq

    (tmp_path / "in.jsonl").write_text('{"text": "the cat"}\n' * 3)

    class Turning(OneModel):
        def scored(self, *, skip: int) -> Iterator[Any]:
            yield from super().scored(skip=skip)
            llm.load_weights(state, version="b")
            yield from super().scored(skip=skip)

    turning = Turning(llm, find_sources([str(tmp_path / "in.jsonl")]), DataSettings())
    with pytest.raises(InputError, match=r"weight_version is 'b', but earlier rows have 'sha256:"):
        DatasetRun(turning).to_file(tmp_path / "turned.parquet")
    score_dataset(llm, tmp_path / "in.jsonl", tmp_path / "out.parquet")
    assert b'"weight_version":"b"' in pq.read_schema(tmp_path / "out.parquet").metadata[b"logprobe.info"]


@pytest.mark.parametrize(
    "layout", [{"process": True}, {"data_parallel_size": 2}], ids=["process", "replicas"]
)
def test_engine_processes_tell_and_forget_as_a_thread_does(
    tiny_model_folder: Path, state: dict[str, torch.Tensor], new_serving: Any, layout: dict[str, Any]
) -> None:
    import httpx

    want = digest_of(state)
    with (
        LLM(str(tiny_model_folder), kv_cache_memory_bytes=1 << 20, max_num_seqs=8, **layout) as llm,
        AsyncLM(llm) as lm,
    ):
        first = [llm.generate("the cat", ALL)[0] for _ in range(4)][-1]
        old = lm.next_token_logprobs_sync([5, 60])
        own = version_of(tiny_model_folder)
        assert versions_of(first) == {own}
        calls, is_loaded = [], threading.Event()

        def ask() -> None:
            while not is_loaded.is_set():
                calls.append(llm.generate(["the cat"] * 4, ALL))

        asking = threading.Thread(target=ask)
        asking.start()
        assert llm.load_weights(state) == want
        is_loaded.set()
        asking.join(LIMIT_S)
        assert not asking.is_alive()
        [output, *_] = after = llm.generate(["the cat"] * 4, ALL)
        assert versions_of(output) == {want}
        truth = {own: numbers_of(first), want: numbers_of(output)}
        assert np.abs(truth[own] - truth[want]).max() > 1e-3
        for outputs in [*calls, after]:
            [version] = set.union(*map(versions_of, outputs))  # one per call
            for one in outputs:
                np.testing.assert_allclose(numbers_of(one), truth[version], atol=5e-5, rtol=0)
        new = lm.next_token_logprobs_sync([5, 60])
        assert np.abs(new - old).max() > 1e-3
        assert lm.next_token_logprobs_sync([5, 60]) is new
        able, info = llm.engine.capabilities(), output.info
        assert (info.weights, info.layers) == (able.weights, able.layout.layers)
        assert info.probe_difference == able.layout.probe_difference
        with new_serving(llm, ServerSettings()) as (url, _):
            figures = httpx.get(f"{url}/metrics", timeout=LIMIT_S).text
        assert f'logprobe_weights{{arithmetic="fma",version="{want}"}} 1.0' in figures.splitlines()
        llm.load_weights(tiny_model_folder, version="back")
        back = llm.generate("the cat", ALL)[0]
        assert versions_of(back) == {"back"}
        np.testing.assert_allclose(lm.next_token_logprobs_sync([5, 60]), old, atol=5e-5, rtol=0)


# -- what a server reports -----------------------------------------------------------------------------------


def test_a_server_tells_the_weights_that_answer(
    llm: LLM, state: dict[str, torch.Tensor], tiny_model_folder: Path, new_serving: Any
) -> None:
    import httpx

    own = version_of(tiny_model_folder)
    asked = {"prompt": "the cat", "max_tokens": 1, "logprobs": 1, "logprobs_mode": "raw_logprobs"}

    def told(url: str) -> list[Any]:
        ask = {path: httpx.get(url + path, timeout=LIMIT_S) for path in ("/v1/capabilities", "/v1/models")}
        reply = httpx.post(f"{url}/v1/completions", json=asked, timeout=LIMIT_S).json()
        rows = httpx.post(f"{url}/v1/next_token_logprobs", json={"prompts": [[5]]}, timeout=LIMIT_S).content
        figures = httpx.get(f"{url}/metrics", timeout=LIMIT_S).text.splitlines()
        return [
            ask["/v1/capabilities"].json()["weight_version"],
            ask["/v1/models"].json()["data"][0]["weight_version"],
            reply["choices"][0]["logprobs_info"]["weight_version"],
            *[version for version in (own, "step 2") if f'"weight_version":"{version}"'.encode() in rows],
            *[line for line in figures if line.startswith("logprobe_weights")],
        ]

    with new_serving(llm, ServerSettings()) as (url, _), RemoteLLM(url) as far:
        old = far.next_token_logprobs_sync([5, 60])
        assert told(url) == [own] * 4 + [f'logprobe_weights{{arithmetic="fma",version="{own}"}} 1.0']
        llm.load_weights(state, version="step 2")
        assert told(url) == ["step 2"] * 4 + ['logprobe_weights{arithmetic="fma",version="step 2"} 1.0']
        # A client learns the new version with its next reply; its cached rows are then dropped.
        far.next_token_logprobs_sync([7])
        new = far.next_token_logprobs_sync([5, 60])
        assert far.next_token_logprobs_sync([5, 60]) is new
    assert np.abs(new - old).max() > 1e-3


def test_a_client_that_learns_of_new_weights_gives_no_kept_row_beside_theirs(
    llm: LLM, state: dict[str, torch.Tensor], new_serving: Any
) -> None:
    with new_serving(llm, ServerSettings()) as (url, _), RemoteLLM(url) as far:
        old = far.next_token_logprobs_sync([5, 60])
        llm.load_weights(state)
        kept, new = far.batch_next_token_logprobs_sync([[5, 60], [7]])
        np.testing.assert_array_equal(far.next_token_logprobs_sync([5, 60]), kept)
        with AsyncLM(llm) as near:
            for row, ids in ((kept, [5, 60]), (new, [7])):
                np.testing.assert_array_equal(row, near.next_token_logprobs_sync(ids))
    assert np.abs(kept - old).max() > 1e-3


def test_rows_of_a_server_that_is_started_again_at_its_address_are_its_own(
    tiny_model_folder: Path, new_folder: Path, new_serving: Any, tmp_path: Path
) -> None:
    """The same folder with other weights, which have no version name."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_folder, folder)
    with _new_llm(folder) as first, new_serving(first, ServerSettings()) as (url, _):
        far = RemoteLLM(url)
        old = far.next_token_logprobs_sync([5, 60])
    shutil.copy(new_folder / "model.safetensors", folder)
    again = new_serving(second := _new_llm(folder), ServerSettings(), port=int(url.rpartition(":")[2]))
    with far, second, again, AsyncLM(second) as near:
        far.next_token_logprobs_sync([7])
        new = far.next_token_logprobs_sync([5, 60])
        np.testing.assert_array_equal(new, near.next_token_logprobs_sync([5, 60]))
    assert np.abs(new - old).max() > 1e-3


def test_rows_of_lora_weights_that_a_server_replaced_are_theirs(
    llm: LLM, adapter_folders: dict[str, Path], new_serving: Any
) -> None:
    llm.add_lora("a", adapter_folders["wide"])
    with new_serving(llm, ServerSettings()) as (url, _), RemoteLLM(url) as far, AsyncLM(llm) as near:
        base = far.next_token_logprobs_sync([5, 60])
        old = far.next_token_logprobs_sync([5, 60], lora="a")
        llm.add_lora("a", adapter_folders["narrow"])
        far.next_token_logprobs_sync([7], lora="a")
        new = far.next_token_logprobs_sync([5, 60], lora="a")
        np.testing.assert_array_equal(new, near.next_token_logprobs_sync([5, 60], lora="a"))
        assert far.next_token_logprobs_sync([5, 60]) is base, "the model's own are the same as before"
    assert np.abs(new - old).max() > 1e-4


# -- data sets ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["folder", "load", "lora"])
def test_a_run_goes_on_with_the_weights_that_began_it_alone(
    tiny_model_folder: Path,
    new_folder: Path,
    adapter_folders: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    monkeypatch.setattr("logprobe.analysis.io.journal.ROWS_A_PART", 256)
    folder, source, out = tmp_path / "model", tmp_path / "in.jsonl", tmp_path / "o.parquet"
    shutil.copytree(tiny_model_folder, folder)
    source.write_text('{"text": "the cat"}\n' * 600)

    class Dying(OneModel):
        def scored(self, *, skip: int) -> Iterator[Any]:
            yield next(iter(super().scored(skip=skip)))
            raise InterruptedError

    def asked(llm: LLM) -> LLM:
        return llm.with_lora("a") if how == "lora" else llm

    with _new_llm(folder) as llm:
        llm.add_lora("a", adapter_folders["wide"])
        run = DatasetRun(Dying(asked(llm), find_sources([str(source)]), DataSettings()))
        with pytest.raises(InterruptedError):
            run.to_file(out)
    if how == "folder":
        shutil.copy(new_folder / "model.safetensors", folder)
    with _new_llm(folder) as llm:
        llm.add_lora("a", adapter_folders["narrow" if how == "lora" else "wide"])
        if how == "load":
            llm.load_weights(new_folder)
        told = "lora_version is 'sha256:" if how == "lora" else r"different settings \(weight_version\)"
        with pytest.raises(InputError, match=told):
            score_dataset(asked(llm), source, out, resume=True)
    shutil.copy(tiny_model_folder / "model.safetensors", folder)
    with _new_llm(folder) as llm:
        llm.add_lora("a", adapter_folders["wide"])
        assert score_dataset(asked(llm), source, out, resume=True).num_rows == 600
