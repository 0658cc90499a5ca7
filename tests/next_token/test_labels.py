"""Async labels, documents and grades give the same numbers as `LLM`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from logprobe import LLM
from logprobe.errors import EngineClosedError, ParameterError
from logprobe.next_token import AsyncLM
from refusals import raises

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


TALK = [{"role": "user", "content": "the cat"}]
LABELS = [" the dog", " of the", " a"]
LAYOUT: dict[str, Any] = {"template": ("th ", "{query}: {document}", " the"), "labels": (" a", " o")}


@pytest.fixture(scope="module")
def llm(tiny_model_folder: Path, adapter_folders: dict[str, Path]) -> Iterator[LLM]:
    """The tiny Llama with LoRA weights; its results do not depend on the batch."""
    with LLM(str(tiny_model_folder), kv_bytes=1 << 21) as llm:
        llm.add_lora("wide", adapter_folders["wide"])
        yield llm


@pytest.mark.parametrize("lora", [None, "wide"])
def test_all_answers_are_those_of_the_blocking_calls_bit_by_bit(llm: LLM, lora: str | None) -> None:
    prompts = ["the cat and", "a dog", TALK]
    by_length: Any = {"correction": "calibrated", "content_free": "th"}

    async def ask(lm: AsyncLM) -> list[Any]:
        return await asyncio.gather(
            lm.classify(prompts, LABELS, lora=lora, **by_length),
            lm.classify(TALK, {"a": ["the dog", "a"], "b": "of"}, lora=lora),
            lm.judge(TALK, range(1, 11), lora=lora),
            lm.rerank("the", ["the cat", "a dog", ""], lora=lora, **LAYOUT),
        )

    near: Any = llm.with_lora(lora)
    with AsyncLM(llm) as lm:
        classified, one, grade, ranked = asyncio.run(ask(lm))
    for found, want in zip(classified, near.classify(prompts, LABELS, **by_length), strict=True):
        np.testing.assert_array_equal(found.logprobs, want.logprobs)
        np.testing.assert_array_equal(found.corrected, want.corrected)
    want = near.classify(TALK, {"a": ["the dog", "a"], "b": "of"})
    assert (one.labels, one.logprobs.tolist()) == (want.labels, want.logprobs.tolist())
    assert grade.grades.logprobs.tolist() == near.judge(TALK, range(1, 11)).grades.logprobs.tolist()
    assert ranked == near.rerank("the", ["the cat", "a dog", ""], **LAYOUT)


def test_lora_weights_that_are_set_answer_where_none_are_named(llm: LLM) -> None:
    async def ask(lm: AsyncLM) -> list[Any]:
        base = await lm.classify("the cat", LABELS)
        lm.set_lora("wide")
        return [base, await lm.classify("the cat", LABELS)]

    with AsyncLM(llm) as lm:
        base, tuned = asyncio.run(ask(lm))
        with AsyncLM(llm.with_lora("wide")) as view:
            (viewed,) = asyncio.run(asyncio.wait_for(view.classify(["the cat"], LABELS), 60))  # type: ignore[misc]
    assert np.abs(base.logprobs - tuned.logprobs).max() > 1e-3
    assert viewed.logprobs.tolist() == tuned.logprobs.tolist()


def test_what_cannot_be_asked_is_named(llm: LLM) -> None:
    with AsyncLM(llm) as lm:
        for parameter, ask in {
            "labels": lambda: lm.classify("a", ["yes", "yes, sir"]),
            "scale": lambda: lm.judge("a", [1]),
            "documents": lambda: lm.rerank("a", "text"),
            "lora": lambda: lm.classify("a", LABELS, lora="none"),
        }.items():
            with raises(ParameterError, parameter=parameter):
                asyncio.run(ask())  # type: ignore[no-untyped-call]
    with pytest.raises(EngineClosedError):
        asyncio.run(lm.classify("a", LABELS))


@pytest.mark.parametrize("lora", [None, "wide"])
def test_labels_are_measured_by_bytes_bit_by_bit(llm: LLM, lora: str | None) -> None:
    want: Any = llm.with_lora(lora).classify("the ca", ["t and", "r"])
    with AsyncLM(llm) as lm:
        found: Any = asyncio.run(lm.classify("the ca", ["t and", "r"], lora=lora))
    assert found.boundary == want.boundary == "bytes"
    assert found.logprobs.tolist() == want.logprobs.tolist()
