from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from logprobe.errors import ParameterError
from logprobe.processors import (
    AllowedTokensLogitsProcessor,
    BannedWordsLogitsProcessor,
    MinTokensLogitsProcessor,
    ModelFacts,
)
from logprobe.processors.arguments import AllowedTokensArgs, BannedWordsArgs, MinTokensArgs
from logprobe.processors.builtin.masks import word_sequences
from logprobe.sampling import SamplingParams
from logprobe.text.edge import TextEdge

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray


def possible(logits: NDArray[np.float32]) -> list[list[int]]:
    return [np.flatnonzero(np.isfinite(row)).tolist() for row in logits]


def test_only_the_allowed_tokens_stay_and_keep_their_logits(
    make: Callable[..., Any], row: Callable[..., Any], run: Callable[..., Any], logits: Callable[..., Any]
) -> None:
    rows = [
        row("a", AllowedTokensArgs(allowed_token_ids=[7, 2])),
        row("b", AllowedTokensArgs()),
        row("c", AllowedTokensArgs(allowed_token_ids=[0])),
    ]
    after = run(make(AllowedTokensLogitsProcessor), rows)
    assert possible(after) == [[2, 7], list(range(10)), [0]]
    assert after[0, [2, 7]].tolist() == logits(3)[0, [2, 7]].tolist()
    assert after[1].tolist() == logits(3)[1].tolist()


def test_what_ends_a_text_is_impossible_until_enough_tokens_were_generated(
    make: Callable[..., Any], row: Callable[..., Any], run: Callable[..., Any]
) -> None:
    params = SamplingParams(stop_token_ids=[4])
    rows = [row("a", MinTokensArgs(min_tokens=2), output=[1] * count, params=params) for count in range(4)]
    without_ends = [token_id for token_id in range(10) if token_id not in {4, 9}]
    processor = make(MinTokensLogitsProcessor)
    assert possible(run(processor, rows)) == [without_ends] * 2 + [list(range(10))] * 2


@pytest.mark.parametrize(
    ("output", "banned"),
    [([], {3}), ([0], {1, 3}), ([0, 1], {2, 3}), ([1, 0], {1, 3}), ([0, 1, 2], {3})],
)
def test_the_token_that_would_complete_a_banned_word_is_impossible(
    make: Callable[..., Any],
    row: Callable[..., Any],
    run: Callable[..., Any],
    output: list[int],
    banned: set[int],
) -> None:
    args = BannedWordsArgs(bad_words=["ab", "d"], bad_words_token_ids=[[0, 1, 2]])
    after = run(make(BannedWordsLogitsProcessor), [row("x", args, output=output)])
    assert set(range(10)) - set(possible(after)[0]) == banned


def test_a_word_without_tokens_is_refused(make: Callable[..., Any]) -> None:
    with pytest.raises(ParameterError, match=r"'\?!' has no tokens"):
        make(BannedWordsLogitsProcessor).check_args(BannedWordsArgs(bad_words=["?!"]))


def facts_of(llm: Any) -> ModelFacts:
    text = llm.text
    return ModelFacts(vocab_size=len(text.vocabulary), eos_token_ids=frozenset(), text=text)


@pytest.mark.parametrize("word", ["cat", " cat", "zq", "  zq"])
def test_a_word_is_banned_with_a_leading_space_and_without(tiny_llm: Any, word: str) -> None:
    facts = facts_of(tiny_llm)
    forms = [word.lstrip(), " " + word.lstrip()]
    assert word_sequences(facts, word) == tuple(tuple(facts.encode(form)) for form in forms)


@pytest.mark.parametrize("word", ["\n", "\t", " ", "\nthe"])
def test_white_space_that_starts_a_word_is_part_of_it(tiny_llm: Any, word: str) -> None:
    facts = facts_of(tiny_llm)
    assert word_sequences(facts, word)[0] == tuple(facts.encode(word))
    assert tuple(facts.encode("the")) not in word_sequences(facts, word)


@pytest.mark.parametrize("step", ["normalizer", "first", "always"])
def test_a_word_counts_without_the_space_that_a_tokenizer_prepends(step: str) -> None:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"thecat", "th", "▁th"]
    backend = Tokenizer(
        models.BPE(
            vocab={piece: token_id for token_id, piece in enumerate(dict.fromkeys(pieces))},
            merges=[("t", "h"), ("▁", "th")],
            unk_token="<unk>",  # noqa: S106 - a vocabulary's word
            byte_fallback=True,
        )
    )
    if step == "normalizer":  # as in Llama 2
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=step, split=False)
    backend.decoder = decoders.Sequence([decoders.Metaspace(), decoders.ByteFallback(), decoders.Fuse()])
    text: Any = TextEdge.of(PreTrainedTokenizerFast(tokenizer_object=backend))
    facts = ModelFacts(vocab_size=len(text.vocabulary), eos_token_ids=frozenset(), text=text)
    ids = backend.token_to_id
    assert word_sequences(facts, "the") == ((ids("th"), ids("e")), (ids("▁th"), ids("e")))
    assert word_sequences(facts, "\n")[0] == (ids("<0x0A>"),)
