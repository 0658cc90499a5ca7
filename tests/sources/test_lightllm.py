"""LightLLM's reply format for tokens, by the function of docs/coming-from.md."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from doc_pages import examples_of
from logprobe import LLM, SamplingParams

if TYPE_CHECKING:
    from pathlib import Path


def test_tokens_have_texts_ids_and_the_best_by_text(tiny_model_folder: Path) -> None:
    names: dict[str, Any] = {}
    [example] = examples_of("coming-from.md")
    exec(example, names)  # noqa: S102 - our own page
    with LLM(tiny_model_folder, kv_cache_memory_bytes=1 << 20) as llm:
        [output] = llm.generate(
            [[5, 6]], SamplingParams(max_tokens=4, temperature=0, logprobs=3, ignore_eos=True)
        )
        [completion] = output.outputs
        tokens = names["tokens_of"](completion)
    assert [one["id"] for one in tokens] == list(completion.token_ids)
    for one in tokens:
        assert one["top_logprobs"][one["text"]] == one["logprob"] == max(one["top_logprobs"].values())
        assert len(one["top_ids"]) == 3
