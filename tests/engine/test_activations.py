"""Hidden states and logit lens: equal bits in any batch, and the model's own numbers at the last layer."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from logprobe import LLM, SamplingParams
from logprobe.analysis import activations_to_arrow, save_activations
from logprobe.errors import OutputError, ParameterError
from logprobe.testing import FakeForward, fake_model
from refusals import raises

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TEXT = "the cat and the dog in the cat and a dog"
ALL = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True, return_hidden_states=[0, 1, 2])
LAST = replace(ALL, return_hidden_states="last")


def same(got: Any, want: Any) -> None:
    np.testing.assert_array_equal(got.prompt_hidden_states, want.prompt_hidden_states)
    for mine, theirs in zip(got.outputs, want.outputs, strict=True):
        assert mine.token_ids == theirs.token_ids
        np.testing.assert_array_equal(mine.hidden_states, theirs.hidden_states)


def test_the_last_state_gives_the_logits(tiny_llm: LLM) -> None:
    params = replace(LAST, logprobs=-1, prompt_logprobs=-1)
    [output] = tiny_llm.generate(TEXT, params)
    head = tiny_llm.engine.core.engine.forward.head  # type: ignore[attr-defined]

    def rows(states: Any) -> Any:
        logits = np.asarray(head(states[:, 0]), np.float64)
        return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))

    for states, record in (
        (output.outputs[0].hidden_states, output.outputs[0].logprobs),
        (output.prompt_hidden_states[:-1], output.prompt_logprobs[1:]),
    ):
        for row, position in zip(rows(states), record, strict=True):
            found = [position[token_id].logprob for token_id in range(len(row))]
            np.testing.assert_allclose(found, row, atol=1e-5)


@pytest.mark.parametrize("params", [ALL, LAST], ids=["layers", "last"])
def test_states_have_the_same_bits_cached_chunked_preempted_and_beside_others(
    new_engine: Callable[..., Any], parts: Any, params: SamplingParams
) -> None:
    ids = parts.text.encode(TEXT).tolist()
    fields = {"max_tokens": 5, "temperature": 0, "ignore_eos": True}
    asked = fields | {"return_hidden_states": params.return_hidden_states}
    cold = new_engine()
    want = cold.submit("a", ids, **asked)
    cold.run()
    cached = cold.submit("b", ids, **asked)
    cold.run()
    same(cached, want)
    chunked = new_engine(max_num_batched_tokens=4, max_num_seqs=3)
    others = [chunked.submit(f"o{place}", ids[place:], **fields) for place in range(2)]
    got = chunked.submit("a", ids, prompt_logprobs=1, **asked)
    chunked.run()
    same(got, want)
    assert all(other.outputs[0].hidden_states is None for other in others)
    tight = new_engine(num_slots=len(ids) * 2 + 4, max_num_batched_tokens=8, max_num_seqs=4)
    several = [tight.submit(f"{place}", ids, **asked) for place in range(4)]
    tight.run()
    assert params is LAST or tight.scheduler.num_preempted
    for output in several:
        same(output, want)
    tight.scheduler.check_integrity()


def test_each_sample_has_the_states_of_its_own_tokens(tiny_llm: LLM) -> None:
    params = SamplingParams(n=3, seed=4, max_tokens=6, ignore_eos=True, return_hidden_states=[1, -1])
    [output] = tiny_llm.generate(TEXT, params)
    for completion in output.outputs:
        whole = [*output.prompt_token_ids, *completion.token_ids]
        [again] = tiny_llm.generate([whole], replace(params, n=1, max_tokens=0))
        np.testing.assert_array_equal(output.prompt_hidden_states, again.prompt_hidden_states[:-6])
        np.testing.assert_array_equal(completion.hidden_states, again.prompt_hidden_states[-7:-1])
        assert again.outputs[0].hidden_states is None


@pytest.mark.parametrize("settings", [{"speculate": True}, {"async_scheduling": True}, {"process": True}])
def test_states_are_the_same_in_every_engine(
    tiny_model_folder: Path, tiny_llm: LLM, settings: dict[str, Any]
) -> None:
    prompt = [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6]
    params = replace(ALL, max_tokens=20)
    with LLM(str(tiny_model_folder), kv_cache_memory_bytes=1 << 21, **settings) as llm:
        [got] = llm.generate([prompt], params)
        lens = llm.logit_lens(prompt)
    [want] = tiny_llm.generate([prompt], params)
    same(got, want)
    np.testing.assert_array_equal(lens.logprobs, tiny_llm.logit_lens(prompt).logprobs)


def test_a_request_that_asks_nothing_shares_a_step_and_its_numbers_stay(tiny_llm: LLM) -> None:
    plain = SamplingParams(max_tokens=5, temperature=0, logprobs=2)
    [alone] = tiny_llm.generate(TEXT, plain)
    together, _ = tiny_llm.generate([TEXT, TEXT], [plain, ALL])
    assert together.outputs[0].logprobs == alone.outputs[0].logprobs
    assert together.prompt_hidden_states is None


def test_states_are_there_where_nothing_else_is_asked(tiny_llm: LLM) -> None:
    [output] = tiny_llm.generate(TEXT, SamplingParams(max_tokens=0, return_hidden_states=[-1]))
    assert output.prompt_hidden_states.shape == (len(output.prompt_token_ids), 1, 64)
    assert output.info.weights == "checkpoint"


@pytest.mark.parametrize(
    ("layers", "words"),
    [([3], "must be in"), ([-4], "must be in"), ([2, -1], "twice"), ([1, 1], "once"), ([], "at least one"),
     ("first", "'last'"), ([1.5], "integer"), (7, "list of layer numbers")],
)  # fmt: skip
def test_a_layer_that_is_not_there_is_refused_by_name(tiny_llm: LLM, layers: Any, words: str) -> None:
    with pytest.raises(ParameterError, match=words) as caught:
        tiny_llm.generate(TEXT, SamplingParams(return_hidden_states=layers))
    assert caught.value.parameter == "return_hidden_states"


def test_windows_and_prompts_without_room_are_refused(tiny_llm: LLM) -> None:
    limit = tiny_llm.engine.capabilities().max_model_len
    with pytest.raises(ParameterError) as caught:
        tiny_llm.generate([[5] * (limit + 40)], replace(LAST, prompt_logprobs=0), truncation="window")
    assert caught.value.parameter == "return_hidden_states"
    with pytest.raises(ParameterError) as caught:
        tiny_llm.generate([[5] * (limit + 1)], replace(LAST, max_tokens=0))
    assert caught.value.parameter == "return_hidden_states"


def test_an_engine_without_layers_has_the_last_state_only() -> None:
    model = fake_model(FakeForward())
    with pytest.raises(ParameterError, match="'last'"):
        model.engine.core.engine.admit(  # type: ignore[attr-defined]
            _request(SamplingParams(return_hidden_states=[0]))
        )
    model.engine.close()


def _request(params: SamplingParams) -> Any:
    from logprobe.transport.messages import Request

    return Request(request_id="r", prompt_token_ids=np.array([5, 6], np.int32), params=params)


# -- the lens ------------------------------------------------------------------------------------------------


def test_the_lens_of_the_last_layer_is_the_models_own_prediction(tiny_llm: LLM) -> None:
    lens = tiny_llm.logit_lens(TEXT, logprobs=3)
    [output] = tiny_llm.generate(
        TEXT, SamplingParams(max_tokens=1, temperature=0, logprobs=3, prompt_logprobs=3, entropy=True)
    )
    assert lens.layers == (0, 1, 2)
    assert lens.targets == [*output.prompt_token_ids[1:], *output.outputs[0].token_ids]
    for own, record in (
        (lens.records[2][:-1], output.prompt_logprobs[1:]),
        (lens.records[2][-1:], output.outputs[0].logprobs),
    ):
        assert own == record
        np.testing.assert_array_equal(own.extras["entropy"], record.extras["entropy"])
    assert lens.top(2, -1)[0][0] == tiny_llm.text.vocabulary.token_text(output.outputs[0].token_ids[0])


def test_the_lens_of_each_layer_is_norm_and_head_of_transformers_states(
    tiny_llm: LLM, tiny_model_folder: Path
) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder, dtype=torch.float64)
    lens = tiny_llm.logit_lens(TEXT, [-2, 0], logprobs=-1)
    ids = torch.tensor([lens.token_ids])
    with torch.inference_mode():
        states = model(input_ids=ids, output_hidden_states=True).hidden_states
        want = [model.lm_head(model.model.norm(states[layer]))[0].log_softmax(-1) for layer in (1, 0)]
    for place, rows in enumerate(want):
        chosen = rows[torch.arange(len(lens.targets)), torch.tensor(lens.targets)].numpy()
        np.testing.assert_allclose(lens.logprobs[place], chosen, atol=1e-4)
        np.testing.assert_allclose(lens.entropy[place], -(rows.exp() * rows).sum(-1).numpy(), atol=1e-4)
        ranks = (
            1 + (rows > rows[torch.arange(len(chosen)), torch.tensor(lens.targets)][:, None]).sum(-1).numpy()
        )
        assert np.abs(lens.ranks[place] - ranks).max() <= 1  # near ties


def test_the_transformers_decoder_has_a_lens_too(tiny_model_folder: Path, tiny_llm: LLM) -> None:
    pytest.importorskip("transformers")
    with LLM(str(tiny_model_folder), kv_cache_memory_bytes=1 << 21, weights="plain") as llm:
        got = llm.logit_lens(TEXT)
    np.testing.assert_allclose(got.logprobs, tiny_llm.logit_lens(TEXT).logprobs, atol=1e-4)


def test_a_lens_is_drawn_and_written(tiny_llm: LLM, tmp_path: Path) -> None:
    lens = tiny_llm.logit_lens(TEXT, [0, -1], logprobs=2)
    lens.plot().save(tmp_path / "lens.png")
    assert (tmp_path / "lens.png").stat().st_size > 1000
    [first, *_] = lens.to_dict()["tokens"]
    assert [len(row["top_logprobs"]) for row in first["predictions"]] == [2, 2]
    with pytest.raises(ParameterError, match="1 or more"):
        tiny_llm.logit_lens(TEXT, logprobs=0).plot()


@pytest.mark.parametrize("layers", [[5], [], [1.5], "first", [1, 1], [2, -1], 7])
def test_the_lens_of_a_layer_that_is_not_there_is_refused(tiny_llm: LLM, layers: Any) -> None:
    with raises(ParameterError, parameter="layers"):
        tiny_llm.logit_lens(TEXT, layers)


def test_the_last_layer_may_be_named(tiny_llm: LLM) -> None:
    lens = tiny_llm.logit_lens(TEXT, "last")
    assert lens.layers == (2,)
    np.testing.assert_array_equal(lens.logprobs, tiny_llm.logit_lens(TEXT, [-1]).logprobs)


# -- files ---------------------------------------------------------------------------------------------------


def test_states_come_back_from_their_files(tiny_llm: LLM, tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    outputs = tiny_llm.generate([TEXT, "the dog"], replace(ALL, n=2, temperature=1.0, seed=1))
    save_activations(tmp_path / "a.safetensors", outputs)
    tensors = load_file(tmp_path / "a.safetensors")
    np.testing.assert_array_equal(tensors["0.prompt.hidden_states"], outputs[0].prompt_hidden_states)
    np.testing.assert_array_equal(tensors["1.1.hidden_states"], outputs[1].outputs[1].hidden_states)
    assert len(tensors) == 6
    with pytest.raises(ParameterError, match="must end with"):
        save_activations(tmp_path / "a.txt", outputs)


@pytest.mark.parametrize("suffix", ["parquet", "safetensors"])
@pytest.mark.parametrize(
    "change",
    [{"return_hidden_states": [0, 1]}, {"return_hidden_states": [2, 1, 0]}, {"logprobs": 2}],
)
def test_outputs_of_other_layers_or_settings_are_refused(
    tiny_llm: LLM, tmp_path: Path, change: dict[str, Any], suffix: str
) -> None:
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    outputs = tiny_llm.generate([TEXT] * 2, [ALL, replace(ALL, **change)])
    with raises(ParameterError, parameter="outputs"):
        save_activations(tmp_path / f"a.{suffix}", outputs)
    assert [*tmp_path.iterdir()] == []


def test_outputs_of_other_models_are_refused(tiny_llm: LLM, tmp_path: Path) -> None:
    mine, theirs = tiny_llm.generate([TEXT] * 2, ALL)
    theirs.info = msgspec.structs.replace(theirs.info, weight_version="another")
    with raises(ParameterError, parameter="outputs"):
        save_activations(tmp_path / "a.safetensors", [mine, theirs])
    save_activations(tmp_path / "a.safetensors", [theirs])


@pytest.mark.parametrize("suffix", ["parquet", "safetensors"])
def test_a_file_that_cannot_be_written_is_named(tiny_llm: LLM, tmp_path: Path, suffix: str) -> None:
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    path = tmp_path / "missing" / f"a.{suffix}"
    with pytest.raises(OutputError, match=re.escape(str(path))):
        save_activations(path, tiny_llm.generate(TEXT, LAST))


def test_states_come_back_from_parquet(tiny_llm: LLM, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    outputs = tiny_llm.generate([TEXT, "the dog"], replace(ALL, n=2, temperature=1.0, seed=1))
    save_activations(tmp_path / "a.parquet", outputs)
    table = parquet.read_table(tmp_path / "a.parquet")
    assert table.equals(activations_to_arrow(outputs))
    states = table["hidden_states"].combine_chunks().flatten().flatten().to_numpy().reshape(-1, 3, 64)
    start = len(outputs[0].prompt_token_ids)
    np.testing.assert_array_equal(states[start : start + 5], outputs[0].outputs[0].hidden_states)
    assert table["token_id"].to_pylist()[start : start + 5] == outputs[0].outputs[0].token_ids
    assert table["completion"].to_pylist()[start - 1 : start + 1] == [None, 0]
    with pytest.raises(ParameterError, match="no activations"):
        save_activations(tmp_path / "b.parquet", tiny_llm.generate(TEXT))
