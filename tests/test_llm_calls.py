"""`LLM` calls in the forms that other libraries use."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from logprobe import LLM, EngineConfig, SamplingParams
from logprobe.errors import ParameterError
from logprobe.next_token import AsyncLM

if TYPE_CHECKING:
    from collections.abc import Iterator


GREEDY = SamplingParams(max_tokens=6, temperature=0, logprobs=0, ignore_eos=True)


class Unprintable(list[Any]):
    """Too expensive to format."""

    def __repr__(self) -> str:
        raise AssertionError("a call that is served puts into words what it was given")


def test_a_call_that_is_served_prints_nothing_of_what_it_was_given(tiny_llm: LLM) -> None:
    prompts = Unprintable([Unprintable([5, 6, 7]), Unprintable([6, 7])])
    assert len(tiny_llm.generate(prompts, Unprintable([GREEDY, GREEDY]))) == 2
    assert len(tiny_llm.score([Unprintable(prompts)])) == 1
    messages = Unprintable([{"role": "user", "content": "the cat"}])
    assert len(tiny_llm.chat(messages, GREEDY)) == 1


def test_chat_takes_a_text_content_parts_and_many_conversations(tiny_llm: LLM) -> None:
    asked = SamplingParams(max_tokens=2, temperature=0)
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "cat"}]
    whole = [{"role": "user", "content": "the cat"}]
    for messages in ("the cat", parts, whole, [whole], (tuple(whole),)):
        [output] = tiny_llm.chat(messages, sampling_params=asked)
        assert output.prompt == "user: the cat\nassistant:"
    outputs = tiny_llm.chat([whole, [{"role": "user", "content": "a dog"}]], [asked, GREEDY])
    assert [output.prompt for output in outputs] == ["user: the cat\nassistant:", "user: a dog\nassistant:"]
    assert [len(output.outputs[0].token_ids) for output in outputs][1] == 6


@pytest.mark.parametrize(
    "messages",
    [
        None,
        5,
        b"the cat",
        {"role": "user", "content": "the cat"},
        ["the cat"],
        [None],
        [[]],
        [[{"role": "user", "content": "a"}], {"role": "user", "content": "a"}],
        [{"role": "user", "content": {"type": "text", "text": "a"}}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
        [{"type": "image_url", "image_url": {}}],
        [{"role": 5, "content": "a"}],
    ],
)
def test_a_conversation_of_a_wrong_shape_is_one_parameter_error(tiny_llm: LLM, messages: Any) -> None:
    with pytest.raises(ParameterError, match="messages"):
        tiny_llm.chat(messages)


def test_a_model_may_be_a_path(tiny_model_folder: Path) -> None:
    settings: dict[str, Any] = {"model": tiny_model_folder}
    assert EngineConfig(**settings).model == str(tiny_model_folder)
    with LLM(Path(tiny_model_folder), kv_cache_memory_bytes=1 << 20) as llm:
        assert llm.config.model == str(tiny_model_folder)


def test_a_loaded_model_with_its_tokenizer_is_a_model(tiny_model_folder: Path, tiny_llm: LLM) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_folder)
    with LLM(model=model, tokenizer=tokenizer, kv_cache_memory_bytes=1 << 20) as llm:
        [mine], [want] = llm.generate("the cat", GREEDY), tiny_llm.generate("the cat", GREEDY)
    assert mine.outputs[0].token_ids == want.outputs[0].token_ids
    assert mine.outputs[0].cumulative_logprob == pytest.approx(want.outputs[0].cumulative_logprob, abs=1e-4)
    assert model.config._attn_implementation != "logprobe", "the caller's own model was changed"


@pytest.fixture(params=["here", "process"])
def given_llm(request: Any, tiny_model_folder: Path) -> Iterator[LLM]:
    """An LLM made from a model loaded by transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_folder)
    is_process = request.param == "process"
    with LLM(model=model, tokenizer=tokenizer, kv_cache_memory_bytes=1 << 20, process=is_process) as llm:
        yield llm


def test_a_loaded_model_takes_new_weights_and_lora_weights(
    given_llm: LLM, tiny_llm: LLM, tiny_model_folder: Path, adapter_folders: dict[str, Path]
) -> None:
    from safetensors.torch import load_file

    pairs = [("the cat", " and the dog")]
    state = load_file(tiny_model_folder / "model.safetensors")
    [before] = given_llm.score(pairs)
    given_llm.load_weights({name: weight * 1.1 for name, weight in state.items()})
    [changed] = given_llm.score(pairs)
    assert abs(changed.logprob - before.logprob) > 1e-3
    given_llm.load_weights(state)
    given_llm.add_lora("wide", adapter_folders["wide"])
    tiny_llm.add_lora("given", adapter_folders["wide"])
    try:
        want = [*tiny_llm.score(pairs), *tiny_llm.with_lora("given").score(pairs)]
    finally:
        tiny_llm.remove_lora("given")
    found = [*given_llm.score(pairs), *given_llm.with_lora("wide").score(pairs)]
    assert [one.logprob for one in found] == pytest.approx([one.logprob for one in want], abs=1e-4)


def test_the_module_of_a_loaded_model_has_its_weights(tiny_model_folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_folder)
    with LLM(model=model, tokenizer=tokenizer, kv_cache_memory_bytes=1 << 20) as llm:
        assert llm._loaded.load_module is not None
        state = llm._loaded.load_module().state_dict()
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(state[name], weight) for name, weight in model.state_dict().items())


def test_a_loaded_model_needs_a_fast_tokenizer_and_a_name_brings_its_own(tiny_model_folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    with pytest.raises(ParameterError, match="fast"):
        LLM(model)
    with pytest.raises(ParameterError, match="must be None unless"):
        LLM(str(tiny_model_folder), tokenizer=object())
    with pytest.raises(ParameterError, match="a loaded model"):
        LLM(5)  # type: ignore[arg-type]


# -- streams -----------------------------------------------------------------------------------------------


def test_a_stream_grows_to_what_generate_gives(tiny_llm: LLM) -> None:
    [want] = tiny_llm.generate("the cat", GREEDY)
    texts, counts, output = [], [], None
    for output in tiny_llm.stream("the cat", GREEDY):
        texts.append(output.outputs[0].text)
        counts.append(len(output.outputs[0].token_ids))
    assert output is not None
    assert output.prompt == "the cat"
    assert output.outputs[0].token_ids == want.outputs[0].token_ids
    assert output.outputs[0].text == want.outputs[0].text
    assert counts == sorted(counts)
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))


def test_leaving_a_stream_gives_its_request_up(tiny_llm: LLM) -> None:
    stream = tiny_llm.stream("the cat", SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    stream.close()
    tiny_llm.generate("a", SamplingParams(max_tokens=1))  # runs at least one more step
    assert not tiny_llm.engine.is_busy


@pytest.mark.parametrize(
    ("prompt", "params"),
    [(["a", "b"], None), ("a", SamplingParams(n=1, best_of=3)), (["a"] * 2, GREEDY), (5, GREEDY)],
)
def test_what_cannot_be_streamed_is_refused(tiny_llm: LLM, prompt: Any, params: Any) -> None:
    with pytest.raises(ParameterError):
        next(tiny_llm.stream(prompt, params))


# -- AsyncLM -----------------------------------------------------------------------------------------------


def test_an_async_lm_is_made_of_a_name_or_of_an_open_llm(tiny_model_folder: Path, tiny_llm: LLM) -> None:
    with (
        AsyncLM(tiny_model_folder, kv_cache_memory_bytes=1 << 20) as named,
        AsyncLM(tiny_llm, batch_size=2) as shared,
    ):
        rows = [lm.next_token_logprobs_sync([5, 6, 7]) for lm in (named, shared)]
    np.testing.assert_allclose(*rows, atol=1e-4)
    assert tiny_llm.generate("a", SamplingParams(max_tokens=1)), "the LLM stays open"
    with pytest.raises(ParameterError, match="kv_cache_memory_bytes"):
        AsyncLM(tiny_llm, kv_cache_memory_bytes=1 << 20)
    with pytest.raises(ParameterError, match="an open LLM"):
        AsyncLM(5)  # type: ignore[arg-type]


def test_a_sample_takes_the_truncations_and_gives_its_numbers_when_asked(tiny_llm: LLM) -> None:
    with AsyncLM(tiny_llm) as lm:
        only = asyncio.run(lm.sample([5, 6, 7], 4, [], temperature=2.0, top_k=1, logprobs=3))
        greedy = asyncio.run(lm.sample([5, 6, 7], 4, [], temperature=0))
        narrow = asyncio.run(lm.sample([5, 6, 7], 4, [], temperature=2.0, top_p=1e-6))
        stopped = asyncio.run(lm.sample([5, 6, 7], 4, [greedy[2]], temperature=0, logprobs=0))
        many = asyncio.run(lm.batch_sample([[5, 6, 7]] * 2, 4, [], 2.0, top_k=1, logprobs=0))
    assert only == greedy == narrow
    assert greedy.logprobs is None
    assert only.logprobs is not None
    assert stopped.logprobs is not None
    assert [next(iter(row)) for row in only.logprobs] == only
    first = greedy.index(greedy[2])
    assert stopped == greedy[:first]
    assert len(stopped.logprobs) == first
    assert all(sample == only and sample.logprobs is not None for sample in many)


def test_a_text_with_its_special_tokens_gets_no_more_where_the_call_says_so(tiny_llm: LLM) -> None:
    prompt, params = "<|bos|>the cat", SamplingParams(max_tokens=2, temperature=0)
    ids = tiny_llm.text.encode("the cat").tolist()
    (twice,) = tiny_llm.generate([prompt], params)
    (once,) = tiny_llm.generate([prompt], params, add_special_tokens=False)
    assert (twice.prompt_token_ids, once.prompt_token_ids) == ([0, *ids], ids)
    *_, streamed = tiny_llm.stream(prompt, params, add_special_tokens=False)
    assert streamed.prompt_token_ids == ids
    assert streamed.outputs[0].token_ids == once.outputs[0].token_ids


def test_a_second_bos_is_told_once(tiny_model_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    from transformers import AutoTokenizer

    from logprobe.text.edge import TextEdge

    edge = TextEdge.of(AutoTokenizer.from_pretrained(tiny_model_folder))
    with caplog.at_level("WARNING", logger="logprobe"):
        edge.encode("the cat")
        edge.encode("<|bos|>the cat", add_special_tokens=False)
        assert not caplog.records
        for _ in range(2):
            edge.encode("<|bos|>the cat")
        assert len(caplog.records) == 1
        assert "add_special_tokens" in caplog.text
