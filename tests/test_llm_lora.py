"""The view of a model with LoRA weights: all calls use them, and the view owns no resources."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from async_twin import async_twin
from logprobe import LLM, SamplingParams
from logprobe.analysis import DataSettings, score_dataset
from logprobe.errors import EngineClosedError, InputError, ParameterError
from logprobe.next_token import AsyncLM
from refusals import raises

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TEXT = "the cat and the dog"
CALLS: dict[str, Any] = {
    "one text": lambda llm, lora: numbers(llm.generate(TEXT, asked(lora))),
    "several": lambda llm, lora: numbers(llm.generate([TEXT, "a"], [asked(lora), asked(lora)])),
    "chat": lambda llm, lora: numbers(llm.chat("hello", asked(lora))),
    "stream": lambda llm, lora: numbers(list(llm.stream(TEXT, asked(lora)))[-1:]),
    "async": lambda llm, lora: numbers([asyncio.run(last(llm, asked(lora)))]),
}


def asked(lora: str | None) -> SamplingParams:
    return SamplingParams(max_tokens=3, temperature=0, logprobs=0, prompt_logprobs=0, lora=lora)


async def last(llm: LLM, params: SamplingParams) -> Any:
    return [output async for output in async_twin(llm).stream(TEXT, params)][-1]


def numbers(outputs: list[Any]) -> list[float]:
    records = [record for one in outputs for record in (one.prompt_logprobs[1:], one.outputs[0].logprobs)]
    return [value for record in records for value in record.chosen_entries().logprobs.tolist()]


@pytest.fixture(scope="module")
def llm(tiny_model_folder: Path, adapter_folders: dict[str, Path]) -> Iterator[LLM]:
    with LLM(str(tiny_model_folder), kv_cache_memory_bytes=1 << 21) as llm:
        for name, folder in adapter_folders.items():
            llm.add_lora(name, folder)
        yield llm


@pytest.mark.parametrize("call", CALLS)
def test_every_call_runs_on_the_weights_of_the_view(llm: LLM, call: str) -> None:
    named, base = CALLS[call](llm, "wide"), CALLS[call](llm, None)
    tuned = llm.with_lora("wide")
    for lora in (None, "wide"):
        np.testing.assert_allclose(CALLS[call](tuned, lora), named, rtol=0, atol=2e-5)
    assert np.abs(np.array(named) - base).max() > 1e-3
    with raises(ParameterError, parameter="lora"):
        CALLS[call](tuned, "narrow")


def test_scores_of_every_kind_are_of_the_view(llm: LLM) -> None:
    tuned, base = llm.with_lora("wide"), llm
    (output,) = llm.generate(TEXT, asked("wide"))
    want = float(output.prompt_logprobs[1:].chosen_entries().logprobs.sum())
    found = [
        tuned.perplexity(TEXT).logprob,
        tuned.perplexity(TEXT).logprob,
        tuned.surprisal(TEXT)[0].logprob,
        tuned.score([(output.prompt_token_ids[:1], output.prompt_token_ids[1:])])[0].logprob,
    ]
    assert found == pytest.approx([want] * 4, abs=1e-3)
    assert base.perplexity(TEXT).logprob != pytest.approx(want, abs=1e-3)
    with raises(ParameterError, parameter="lora"):
        tuned.score([("a", "b")], sampling_params=SamplingParams(lora="narrow"))


def test_a_view_names_its_weights_and_gives_another(llm: LLM) -> None:
    tuned = llm.with_lora("wide")
    assert (llm.lora, tuned.lora, tuned.with_lora("narrow").lora) == (None, "wide", "narrow")
    assert "wide" in repr(tuned)
    own = tuned.with_lora(None)
    assert own.lora is None
    assert CALLS["one text"](own, "narrow") == CALLS["one text"](llm, "narrow")


@pytest.mark.parametrize("name", ["none", "", 5, ["wide"]])
def test_unknown_weights_are_refused_at_once(llm: LLM, name: Any) -> None:
    with raises(ParameterError, parameter="lora"):
        llm.with_lora(name)


def test_weights_that_are_gone_are_refused_by_the_call(llm: LLM, adapter_folders: dict[str, Path]) -> None:
    llm.add_lora("gone", adapter_folders["narrow"])
    tuned = llm.with_lora("gone")
    llm.remove_lora("gone")
    with raises(ParameterError, parameter="lora"):
        tuned.generate(TEXT)


def test_next_tokens_of_a_view_have_its_weights(llm: LLM) -> None:
    with AsyncLM(llm) as base, AsyncLM(llm.with_lora("wide")) as tuned:
        want = base.next_token_logprobs_sync([5, 6], lora="wide")
        np.testing.assert_array_equal(tuned.next_token_logprobs_sync([5, 6]), want)
        assert np.abs(base.next_token_logprobs_sync([5, 6]) - want).max() > 1e-3


def test_parameters_that_name_other_weights_fail_their_own_prompt(llm: LLM) -> None:
    tuned, asked = llm.with_lora("wide"), [SamplingParams(max_tokens=1), SamplingParams(lora="narrow")]
    with raises(ParameterError, parameter="lora") as refused:
        tuned.generate([TEXT, TEXT], asked)
    assert "number 1 of 2" in str(refused.value)
    first, second = tuned.generate([TEXT, TEXT], asked, on_error="return")
    assert first.error is None
    assert isinstance(second.error, ParameterError)


def test_a_view_ends_with_the_model_that_was_loaded(
    tiny_model_folder: Path, adapter_folders: dict[str, Path]
) -> None:
    with LLM(str(tiny_model_folder), kv_cache_memory_bytes=1 << 21) as llm:
        llm.add_lora("wide", adapter_folders["wide"])
        with llm.with_lora("wide") as tuned:
            tuned.generate(TEXT)
        tuned.close()
        tuned.generate(TEXT)
        llm.generate(TEXT)
    with pytest.raises(EngineClosedError):
        tuned.generate(TEXT)


def test_a_data_set_goes_on_with_the_same_lora_alone(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = tmp_path / "in.txt"
    rows.write_text(f"{TEXT}\n" * 2)
    tuned, out = llm.with_lora("wide"), tmp_path / "out.jsonl"

    with monkeypatch.context() as patch:
        patch.setattr("logprobe.analysis.io.journal.Journal.groups", interrupted)
        with pytest.raises(KeyboardInterrupt):
            score_dataset(tuned, rows, out, by_line=True)
    for other in (llm, llm.with_lora("narrow")):
        with pytest.raises(InputError, match="lora"):
            score_dataset(other, rows, out, by_line=True, resume=True)
    summary = score_dataset(tuned, rows, out, by_line=True, resume=True)
    assert summary.num_rows == 2
    assert summary.logprob == pytest.approx(2 * tuned.perplexity(TEXT).logprob, abs=1e-3)


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_settings_of_a_data_set_name_no_lora() -> None:
    with raises(ParameterError, parameter="lora"):
        DataSettings(lora="wide")  # type: ignore[call-arg]  # the model says which
