"""`AsyncLLM` has the methods, signatures, results and errors of `LLM`."""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from async_twin import async_twin
from logprobe import LLM, AsyncLLM, SamplingParams
from logprobe.errors import EngineClosedError, ParameterError
from refusals import raises

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TALK = [{"role": "user", "content": "the cat"}]
LABELS = [" the dog", " of the", " a"]
LAYOUT: dict[str, Any] = {"template": ("th ", "{query}: {document}", " the"), "labels": (" a", " o")}
DRAWN = SamplingParams(max_tokens=6, seed=3, logprobs=2, prompt_logprobs=0)


@pytest.fixture(scope="module")
def llm(tiny_model_folder: Path, adapter_folders: dict[str, Path]) -> Iterator[LLM]:
    """The tiny Llama with a LoRA adapter; its results do not depend on the batch."""
    with LLM(str(tiny_model_folder), kv_cache_memory_bytes=1 << 21) as llm:
        llm.add_lora("wide", adapter_folders["wide"])
        yield llm


def public(kind: type) -> dict[str, Any]:
    """Return the public methods and properties of a class, and its constructor."""
    names = {name for name in dir(kind) if not name.startswith("_")} | {"__init__"}
    return {name: getattr(kind, name) for name in names}


def test_both_classes_have_the_same_methods_and_signatures() -> None:
    blocking, awaited = public(LLM), public(AsyncLLM)
    assert blocking.keys() == awaited.keys()
    for name, method in blocking.items():
        other = awaited[name]
        if not callable(method):
            assert method is other, name
            continue
        mine, theirs = inspect.signature(method), inspect.signature(other)
        assert mine.parameters == theirs.parameters, name
        returns = str(theirs.return_annotation).replace("AsyncGenerator", "Generator")
        assert mine.return_annotation == returns, name
        assert inspect.getdoc(method) == inspect.getdoc(other), name
        assert not inspect.iscoroutinefunction(method), name
        assert not inspect.isasyncgenfunction(method), name


def test_every_method_that_computes_or_loads_is_a_coroutine() -> None:
    methods = {name: method for name, method in public(AsyncLLM).items() if callable(method)}
    streams = {name for name, method in methods.items() if inspect.isasyncgenfunction(method)}
    awaited = {name for name, method in methods.items() if inspect.iscoroutinefunction(method)}
    assert streams == {"stream"}
    assert methods.keys() - awaited - streams == {"__init__", "list_loras", "with_lora"}


CALLS: dict[str, tuple[Any, ...]] = {
    "generate": (["the cat", [5, 6]], DRAWN),
    "chat": (TALK, DRAWN),
    "classify": (["the cat and", TALK], LABELS),
    "judge": (TALK, range(1, 11)),
    "uncertainty": ("the cat", 3, SamplingParams(max_tokens=6, seed=3)),
    "minimal_pairs": ([("the cat", "cat the")],),
}


def shown(value: Any) -> Any:
    """Return what can be compared with ==."""
    if isinstance(value, list):
        return [shown(item) for item in value]
    if hasattr(value, "outputs"):
        return [(item.token_ids, item.text, item.logprobs, item.finish_reason) for item in value.outputs]
    if hasattr(value, "grades"):
        return shown(value.grades)
    if hasattr(value, "corrected"):
        return (value.labels, value.logprobs.tolist(), value.corrected.tolist(), value.boundary)
    if hasattr(value, "good_logprobs"):
        return (value.good_logprobs.tolist(), value.bad_logprobs.tolist())
    return value


@pytest.mark.parametrize("lora", [None, "wide"])
@pytest.mark.parametrize("name", CALLS)
def test_results_are_those_of_the_blocking_call_bit_by_bit(llm: LLM, name: str, lora: str | None) -> None:
    near = llm.with_lora(lora)
    want = getattr(near, name)(*CALLS[name])
    found = asyncio.run(getattr(async_twin(near), name)(*CALLS[name]))
    assert shown(found) == shown(want)


@pytest.mark.parametrize("lora", [None, "wide"])
def test_scores_and_scored_texts_are_the_same_bit_by_bit(llm: LLM, lora: str | None) -> None:
    near, text = llm.with_lora(lora), "the cat and the dog " * 20
    far = async_twin(near)
    pairs: Any = [("the cat", " and"), ("the ca", "t and")]

    async def ask() -> tuple[Any, ...]:
        return await asyncio.gather(
            far.score(pairs, entropy=True, unconditional=True),
            far.rerank("the", ["the cat", "a dog", ""], **LAYOUT),
            far.perplexity(text, window=40),
            far.surprisal(["the cat", text], window=40, boundary="end"),
        )

    scores, ranks, perplexity, texts = asyncio.run(ask())
    assert scores == near.score(pairs, entropy=True, unconditional=True)
    assert ranks == near.rerank("the", ["the cat", "a dog", ""], **LAYOUT)
    assert perplexity == near.perplexity(text, window=40)
    for mine, theirs in zip(texts, near.surprisal(["the cat", text], window=40, boundary="end"), strict=True):
        np.testing.assert_array_equal(mine.logprobs, theirs.logprobs)
        assert mine.rows() == theirs.rows()


def test_a_stream_ends_with_the_output_of_generate(llm: LLM) -> None:
    async def last() -> Any:
        return [output async for output in async_twin(llm).stream("the cat", DRAWN)][-1]

    [want] = llm.generate("the cat", DRAWN)
    got = asyncio.run(last())
    assert (got.outputs[0].token_ids, got.outputs[0].text) == (
        want.outputs[0].token_ids,
        want.outputs[0].text,
    )
    assert got.outputs[0].logprobs == want.outputs[0].logprobs


def test_errors_name_their_parameter(llm: LLM) -> None:
    far = async_twin(llm)
    asks: dict[str, Any] = {
        "labels": lambda: far.classify("a", ["yes", "yes, sir"]),
        "scale": lambda: far.judge("a", [1]),
        "documents": lambda: far.rerank("a", "text"),
        "window": lambda: far.perplexity("a", window=1),
        "sampling_params": lambda: far.generate("a", "greedy"),  # type: ignore[arg-type]
    }
    for parameter, ask in asks.items():
        with raises(ParameterError, parameter=parameter):
            asyncio.run(ask())
    with raises(ParameterError, parameter="lora"):
        far.with_lora("none")


def test_a_cancelled_call_ends_its_requests(llm: LLM) -> None:
    far = async_twin(llm)
    long = SamplingParams(max_tokens=100, ignore_eos=True)

    async def cancel() -> None:
        for work in (far.generate("the cat", long), far.perplexity("the cat " * 50 for _ in range(10_000))):
            task: asyncio.Task[Any] = asyncio.ensure_future(work)
            while not far.engine.is_busy:  # noqa: ASYNC110 - the engine has no event for it
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while far.engine.is_busy:  # noqa: ASYNC110 - the engine has no event for it
                await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(cancel(), 60))


def test_it_loads_changes_and_closes_a_model_of_its_own(
    tiny_model_folder: Path, adapter_folders: dict[str, Path]
) -> None:
    async def use() -> AsyncLLM:
        async with AsyncLLM(tiny_model_folder, kv_cache_memory_bytes=1 << 20) as llm:
            assert "AsyncLLM(" in repr(llm)
            await llm.add_lora("wide", adapter_folders["wide"])
            assert set(llm.list_loras()) == {"wide"}
            async with llm.with_lora("wide") as view:
                assert view.lora == "wide"
            assert (await view.generate("the cat", DRAWN))[0].error is None
            await llm.remove_lora("wide")
            assert await llm.load_weights(tiny_model_folder, version="again") == "again"
            assert llm.tokenizer.decode(llm.text.encode("the cat")).endswith("the cat")
        return llm

    llm = asyncio.run(use())
    with pytest.raises(EngineClosedError):
        asyncio.run(llm.generate("a"))


def test_prompts_are_also_vllms_dicts(llm: LLM) -> None:
    ids = llm.text.encode("the cat").tolist()
    [want] = llm.generate("the cat", DRAWN)
    dicts: list[Any] = [{"prompt": "the cat"}, {"prompt_token_ids": ids}]
    for prompt in [*dicts, {"prompt_token_ids": ids, "prompt": "t"}]:
        *_, streamed = llm.stream(prompt, DRAWN)
        for [output] in (llm.generate(prompt, DRAWN), llm.generate([prompt], DRAWN), [streamed]):
            assert output.prompt_token_ids == ids
            assert output.outputs[0].token_ids == want.outputs[0].token_ids
            assert output.prompt == prompt.get("prompt")
    assert [output.prompt_token_ids for output in llm.generate(dicts, DRAWN)] == [ids, ids]
    pair: Any = ({"prompt": "the cat"}, {"prompt": " and"})
    assert llm.score([pair]) == llm.score([("the cat", " and")])
    drawn = SamplingParams(max_tokens=4, seed=1)
    for prompt in dicts:
        assert llm.uncertainty(prompt, 2, drawn) == llm.uncertainty("the cat", 2, drawn)
    texts: list[Any] = [{"prompt": "the cat and"}, {"prompt": "the"}]
    assert shown(llm.classify(texts, LABELS)) == shown(llm.classify(["the cat and", "the"], LABELS))
    assert shown(llm.classify(texts[0], LABELS)) == shown(llm.classify("the cat and", LABELS))
    assert shown(llm.classify({"prompt_token_ids": ids}, LABELS)) == shown(llm.classify(ids, LABELS))


@pytest.mark.parametrize(
    "prompt", [{}, {"prompt": 5}, {"text": "a"}, {"prompt": "a", "multi_modal_data": {"image": b""}}]
)
def test_other_dicts_are_rejected(llm: LLM, prompt: Any) -> None:
    with raises(ParameterError, parameter="prompt"):
        llm.generate(prompt, DRAWN)
