"""Where texts are split into a context and its continuations, by tokens or by bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import normalizers, processors
from transformers import AutoTokenizer

from logprobe.errors import ParameterError
from logprobe.text.boundary import split_texts
from logprobe.text.edge import TextEdge
from refusals import raises

if TYPE_CHECKING:
    from pathlib import Path

    from logprobe import LLM


@pytest.fixture
def tokenizer(tiny_model_folder: Path) -> Any:
    """The tiny model's own, to be changed."""
    return AutoTokenizer.from_pretrained(tiny_model_folder)


def test_a_pair_whose_tokens_are_aligned_is_split_as_the_harness_does(tiny_llm: LLM) -> None:
    for context, continuation in (("the cat", " and"), ("the cat ", "and"), ("", "the"), ("é", "🌊")):
        ids, start, *_ = split_texts(tiny_llm.text, context, [continuation], rule="token")[0]
        (split,) = split_texts(tiny_llm.text, context, [continuation])
        assert (split.token_ids.tolist(), split.start, split.healing) == (ids.tolist(), start, None)


def test_bytes_are_summed_after_the_tokens_that_all_texts_share(tiny_llm: LLM) -> None:
    splits = split_texts(tiny_llm.text, "the dog an", ["d of", "t", "n"])
    given = len(tiny_llm.text.encode("the dog"))
    for split, text in zip(splits, (b" and of", b" ant", b" ann"), strict=True):
        assert split.healing is not None
        assert (split.healing.first, split.healing.tail, split.healing.text) == (given, b" an", text)
        assert (split.healing.is_open, split.healing.num_bytes) == (True, len(text) - 3)


def test_a_long_text_is_summed_to_the_end_of_the_spanning_token(tiny_llm: LLM) -> None:
    (split,) = split_texts(tiny_llm.text, "the dog an", ["d of the cat and the dog of"])
    assert split.healing is not None
    assert (split.healing.text, split.healing.is_open) == (b" and", False)
    assert tiny_llm.text.text_of(split.token_ids[split.healing.stop :].tolist()).startswith(" of the cat")


def test_a_special_token_ends_the_bytes(tiny_llm: LLM) -> None:
    (split,) = split_texts(tiny_llm.text, "the dog an", ["d of<|eos|> a"])
    assert split.healing is not None
    assert (split.healing.text, split.healing.is_open) == (b" and of", False)
    assert split.token_ids[split.healing.stop] == tiny_llm.text.eos_token_id


def test_a_special_token_across_the_boundary_is_refused(tiny_llm: LLM) -> None:
    with raises(ParameterError, parameter="context"):
        split_texts(tiny_llm.text, "the <|e", ["os|>"])


def test_a_tokenizer_that_rewrites_text_across_the_boundary_is_refused(tokenizer: Any) -> None:
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    edge = TextEdge.of(tokenizer)
    with raises(ParameterError, parameter="context"):
        split_texts(edge, "the e", ["\u0301"])
    (split,) = split_texts(edge, "the e", ["\u0301"], rule="token")
    assert split.healing is None


def test_special_tokens_behind_a_text_are_not_its_context(tokenizer: Any) -> None:
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A <|eos|>", special_tokens=[("<|bos|>", 0), ("<|eos|>", 1)]
    )
    edge = TextEdge.of(tokenizer)
    (split,) = split_texts(edge, "the cat", [" and"])
    assert edge.text_of(split.context.tolist()) == "the cat"
    assert (edge.text_of(split.continuation.tolist()), split.healing) == (" and", None)
    (split,) = split_texts(edge, "the ca", ["t"])
    assert split.healing is not None
    assert (split.healing.tail, split.healing.text, split.healing.is_open) == (b" ca", b" cat", False)


def test_white_space_that_ends_a_template_is_its_own_unless_a_token_spans_it(tiny_llm: LLM) -> None:
    for template, continuation, scored in (
        ("assistant:\n", "the", "the"),
        ("assistant: ", "the", " the"),
        ("assistant: an", "d", " and"),
    ):
        (split,) = split_texts(tiny_llm.text, template, [continuation], is_laid_out=True)
        assert tiny_llm.text.text_of(split.continuation.tolist()) == scored
        assert split.token_ids[0] != tiny_llm.text.bos_token_id
        assert (split.healing is None) == (scored != " and")


def test_a_continuation_that_is_empty_is_refused(tiny_llm: LLM) -> None:
    for rule in ("auto", "token"):
        with raises(ParameterError, parameter="continuation"):
            split_texts(tiny_llm.text, "the cat", ["s", ""], rule=rule)  # type: ignore[arg-type]
