"""Weights replaced in a running engine: no cache and no request mixes the numbers of both."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from logprobe import LLM, AsyncLM, SamplingParams
from logprobe.errors import (
    BatchError,
    EngineClosedError,
    ModelNotFoundError,
    ParameterError,
    UnsupportedModelError,
    WeightsReplacedError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LIMIT_S = 120  # nothing takes as long, also on a busy machine
PAIRS = [("the cat", " and the dog"), ([5, 60, 61], [70, 71, 72, 9])]
LONG = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def state(tiny_model_folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a model in training, some steps on."""
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
    """The same weights as a folder like any other."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("trained")
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    model.load_state_dict(state)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model_folder).save_pretrained(folder)
    return folder


def _new_llm(folder: Path) -> LLM:
    return LLM(str(folder), kv_bytes=1 << 20, max_batch_tokens=64, max_batch_rows=8)


@pytest.fixture
def llm(tiny_model_folder: Path) -> Iterator[LLM]:
    """A model of its own for each test, as its weights change."""
    with _new_llm(tiny_model_folder) as llm:
        yield llm


@pytest.fixture(scope="module")
def want(new_folder: Path) -> list[Any]:
    """What a fresh load of the new weights gives: two scores, then a greedy text."""
    with _new_llm(new_folder) as fresh:
        return [*fresh.score(PAIRS), fresh.generate("the cat", LONG)[0].outputs[0].token_ids]


@pytest.mark.parametrize("form", ["state", "folder", "bfloat16"])
def test_the_numbers_afterwards_are_those_of_a_fresh_load(
    llm: LLM, state: dict[str, torch.Tensor], new_folder: Path, want: list[Any], form: str
) -> None:
    before = llm.score(PAIRS)
    llm.generate("the cat", LONG)  # its prefix and rows are known now
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
    llm.engine._engine.check_integrity()


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
    old = llm.score(PAIRS, lora="wide")
    llm.load_weights(state)
    new = llm.score(PAIRS, lora="wide")
    with _new_llm(new_folder) as fresh:
        fresh.add_lora("wide", adapter_folders["wide"])
        assert new == fresh.score(PAIRS, lora="wide")
    assert new != old


class Running:
    """Some long requests under way on another thread."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
        self.outputs: list[Any] = []
        self.errors: list[BaseException] = []
        self._started, self._may_go_on = threading.Event(), threading.Event()
        forward = llm.engine._engine.forward
        plain = forward.run

        def run(batch: Any) -> None:
            plain(batch)
            self._started.set()
            assert self._may_go_on.wait(LIMIT_S)

        monkeypatch.setattr(forward, "run", run)
        self._thread = threading.Thread(target=self._work, args=(llm,))
        self._thread.start()
        assert self._started.wait(LIMIT_S)

    def _work(self, llm: LLM) -> None:
        try:
            self.outputs = llm.generate(["the cat", "the dog"], LONG)
        except BatchError as error:
            self.outputs, self.errors = list(error.outputs), [*error.errors.values()]

    def go_on(self) -> None:
        self._may_go_on.set()

    def join(self) -> None:
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()


def wait_for_command(llm: LLM, kind: str) -> None:
    """Wait until a message waits for the end of a step that is held."""
    deadline = time.monotonic() + LIMIT_S
    while kind not in {type(one).__name__ for one in list(llm.engine._thread._commands)}:
        assert time.monotonic() < deadline, f"no {kind} came"
        time.sleep(0.005)


def test_requests_that_run_finish_on_the_old_weights_and_later_ones_wait(
    llm: LLM, state: dict[str, torch.Tensor], want: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    old = [output.outputs[0].token_ids for output in llm.generate(["the cat", "the dog"], LONG)]
    llm.engine.forget_prefixes()
    running = Running(llm, monkeypatch)
    loading = threading.Thread(target=llm.load_weights, args=(state,))
    loading.start()
    later: list[Any] = []
    asking = threading.Thread(target=lambda: later.extend(llm.score(PAIRS)))
    wait_for_command(llm, "ReplaceForward")
    asking.start()
    wait_for_command(llm, "Submit")  # behind the new weights
    running.go_on()
    for thread in (loading, asking):
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    running.join()
    assert [output.outputs[0].token_ids for output in running.outputs] == old
    assert later == want[:2]


def test_requests_that_run_end_by_name_where_that_is_asked(
    llm: LLM, state: dict[str, torch.Tensor], want: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = Running(llm, monkeypatch)
    loading = threading.Thread(target=llm.load_weights, args=(state,), kwargs={"on_running": "end"})
    loading.start()
    wait_for_command(llm, "ReplaceForward")
    running.go_on()
    loading.join(LIMIT_S)
    running.join()
    assert [type(error) for error in running.errors] == [WeightsReplacedError] * 2
    assert "weights were replaced" in str(running.errors[0])
    assert llm.score(PAIRS) == want[:2]
    llm.engine._engine.check_integrity()


def test_weights_that_do_not_fit_are_refused_and_the_old_ones_go_on(
    llm: LLM, state: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    before = llm.score(PAIRS)
    name = "model.layers.0.mlp.up_proj.weight"
    part = {key: weight for key, weight in state.items() if key != name}
    for weights, says in (
        (part, rf"1 missing \({name}\)"),
        (state | {"extra": torch.zeros(2)}, r"1 unknown \(extra\)"),
        (state | {name: torch.zeros(3, 64)}, "1 of another shape"),
    ):
        with pytest.raises(UnsupportedModelError, match=says):
            llm.load_weights(weights)
    with pytest.raises(ModelNotFoundError, match=r"no \*.safetensors there"):
        llm.load_weights(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no such thing")
    with pytest.raises(UnsupportedModelError, match="cannot be read"):
        llm.load_weights(tmp_path)
    with pytest.raises(ParameterError, match="on_running"):
        llm.load_weights(state, on_running="wait")  # type: ignore[arg-type]
    assert llm.score(PAIRS) == before


def test_a_closed_engine_takes_no_weights(tiny_model_folder: Path, state: dict[str, torch.Tensor]) -> None:
    llm = _new_llm(tiny_model_folder)
    llm.close()
    with pytest.raises(EngineClosedError, match="before the new weights answered"):
        llm.load_weights(state)


def test_a_request_given_up_while_it_waits_never_runs(
    llm: LLM, state: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = Running(llm, monkeypatch)
    loading = threading.Thread(target=llm.load_weights, args=(state,))
    loading.start()
    wait_for_command(llm, "ReplaceForward")
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
