"""genlm-control, unchanged, on this library; run by `make test-genlm` in an environment that has it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

control = pytest.importorskip("genlm.control", reason="genlm-control is not installed (make test-genlm)")

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from logprobe.integrations.genlm import LogprobeLM

PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def lm() -> Iterator[LogprobeLM]:
    from logprobe.errors import ModelError
    from logprobe.integrations.genlm import LogprobeLM

    try:
        model = LogprobeLM.from_name("smollm2", kv_bytes=1 << 28)
    except ModelError as error:
        pytest.skip(f"smollm2 cannot be had: {error}")
    yield model
    model.cleanup()


@pytest.fixture(scope="module")
def prompted(lm: LogprobeLM) -> Any:
    potential = control.PromptedLLM(lm)
    potential.set_prompt_from_str(PROMPT)
    return potential


def plain_rows(folder: Path, prefixes: list[list[int]]) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    with torch.inference_mode():
        logits = [model(torch.tensor([ids])).logits[0, -1] for ids in prefixes]
    return torch.log_softmax(torch.stack(logits), -1)


def test_next_token_weights_and_scores_are_those_of_a_plain_forward_pass(
    lm: LogprobeLM, prompted: Any
) -> None:
    from logprobe.models import resolve

    ids = lm.tokenizer.encode(PROMPT)
    after = lm.tokenizer.encode(" Paris, of course")
    prefixes = [ids + after[:end] for end in range(len(after))]
    want = plain_rows(resolve("smollm2").folder, prefixes)
    context = [lm.byte_vocab[i] for i in after]
    score = asyncio.run(prompted.log_probability(context))
    assert score == pytest.approx(sum(float(row[i]) for row, i in zip(want, after, strict=True)), abs=2e-3)
    weights = asyncio.run(prompted.logw_next([])).weights
    tokens = prompted.token_maps.potential_vocab
    got = [weights[place] for place in range(0, len(tokens), 997)]
    named = [float(want[0][token.token_id]) for token in tokens[::997]]
    np.testing.assert_allclose(got, named, atol=2e-3)


def test_batches_are_consistent_with_single_asks(lm: LogprobeLM) -> None:
    prefixes = [lm.tokenizer.encode(text) for text in ("a", "a b", "a b c", PROMPT)]
    together = asyncio.run(lm.batch_next_token_logprobs(prefixes))
    lm.clear_cache()
    for ids, row in zip(prefixes, together, strict=True):
        np.testing.assert_allclose(lm.next_token_logprobs_sync(ids), row, atol=1e-4)
        row[:] = 0  # a caller's own tensor
        assert float(lm.next_token_logprobs_sync(ids).exp().sum()) == pytest.approx(1, abs=1e-5)


def test_length_constrained_sampling_gives_texts_of_that_length(prompted: Any) -> None:
    class AtMost(control.Potential):  # type: ignore[misc,name-defined]
        def __init__(self, vocabulary: list[Any], most: int) -> None:
            super().__init__(vocabulary)
            self.most = most

        async def complete(self, context: list[Any]) -> float:
            return 0.0 if len(context) == self.most else float("-inf")

        async def prefix(self, context: list[Any]) -> float:
            return 0.0 if len(context) <= self.most else float("-inf")

    sampler = control.AWRS(prompted, AtMost(prompted.vocab, 5))
    sequences = asyncio.run(sampler.smc(n_particles=4, ess_threshold=0.5, max_tokens=8))
    texts = sequences.decoded_posterior
    contexts = [context for context, weight in sequences if weight > float("-inf")]
    assert contexts
    assert all(len(context) == 6 for context in contexts), texts  # five tokens and the end


def test_regex_constrained_sampling_gives_texts_that_match(prompted: Any) -> None:
    import re

    fsa = control.BoolFSA.from_regex(r" (Paris|Lyon|Rome)[.,]").coerce(prompted, f=b"".join)
    sampler = control.AWRS(prompted, fsa)
    sequences = asyncio.run(sampler.smc(n_particles=6, ess_threshold=0.5, max_tokens=8))
    posterior = sequences.decoded_posterior
    assert posterior
    assert all(re.fullmatch(r" (Paris|Lyon|Rome)[.,]", text) for text in posterior), posterior
    assert max(posterior, key=posterior.get).startswith(" Paris")


def test_a_model_by_name_is_ours_while_served() -> None:
    from genlm.backend.llm import AsyncTransformer

    from logprobe.errors import ModelError, ParameterError
    from logprobe.integrations.genlm import LogprobeLM, serve_by_name

    with serve_by_name():
        try:
            potential = control.PromptedLLM.from_name(
                "smollm2", backend="hf", hf_opts={"torch_dtype": "float32", "device_map": "cpu"}
            )
        except ModelError as error:
            pytest.skip(f"smollm2 cannot be had: {error}")
        assert type(potential.model) is LogprobeLM
        potential.model.cleanup()
        with pytest.raises(ParameterError, match="quantization"):
            LogprobeLM.from_name("smollm2", hf_opts={"quantization": 4})
    import genlm.backend.llm

    assert genlm.backend.llm.AsyncTransformer is AsyncTransformer
