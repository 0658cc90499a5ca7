"""Unmodified processors of other engines, with a separate instance for each request."""

# ruff: noqa: ARG002 - an interface's arguments, used or not
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import torch

from logprobe.config import EngineConfig
from logprobe.errors import ParameterError, ProcessorError
from logprobe.processors import (
    BatchRow,
    Pipeline,
    adapt_callable,
    adapt_matcher,
    adapt_transformers,
    adapt_vllm,
)
from logprobe.processors.builtin.grammar import byte_tokenizer
from logprobe.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from logprobe.processors import LogitsProcessor, ModelFacts


class TargetArgs(msgspec.Struct):
    target: int = 0


@pytest.fixture
def play(facts: ModelFacts, logits: Callable[..., Any]) -> Callable[..., Any]:
    """Run requests of (arguments, prompt, tokens) step by step; return the rows of the last step."""

    def go(kind: type[LogitsProcessor], *requests: tuple[dict[str, Any], list[int], list[int]]) -> Any:
        pipeline = Pipeline(EngineConfig(logits_processors=[kind]), facts)
        outputs: list[list[int]] = [[] for _ in requests]
        samples = []
        for (args, prompt, _), output in zip(requests, outputs, strict=True):
            params = SamplingParams(logits_processors_args=args)
            row = BatchRow(
                request_id=str(len(samples)),
                args=None,
                prompt_token_ids=prompt,
                output_token_ids=output,
                params=params,
            )
            sample = pipeline.open(row, pipeline.admit(row.params))
            assert sample is not None
            samples.append(sample)
        for step in range(len(requests[0][2]) + 1):
            pipeline.prepare(samples)
            done = pipeline.apply(logits(len(requests)))
            assert not done.errors, done.errors
            for output, (_, _, said) in zip(outputs, requests, strict=True):
                output.extend(said[step : step + 1])
        return done.logits

    return go


def test_transformers_processors_see_prompt_and_completion(
    play: Callable[..., Any], logits: Callable[..., Any]
) -> None:
    from transformers import NoRepeatNGramLogitsProcessor

    kind = adapt_transformers(
        lambda args: NoRepeatNGramLogitsProcessor(args.no_repeat), name="NoRepeatLogitsProcessor"
    )
    assert kind.__name__ == "NoRepeatLogitsProcessor"
    after = play(kind, ({"no_repeat": 2}, [5, 6, 7], [5]), ({"no_repeat": 3}, [5, 6, 7], [5]))
    expected = logits(2)
    expected[0, 6] = -np.inf
    assert np.array_equal(after, expected)


def test_callables_of_two_and_of_three_parameters(
    play: Callable[..., Any], logits: Callable[..., Any]
) -> None:
    def two(output: list[int], scores: torch.Tensor) -> torch.Tensor:
        assert isinstance(output, list)
        scores[len(output)] = 100.0
        return scores

    def three(prompt: list[int], output: list[int], scores: torch.Tensor) -> torch.Tensor:
        scores[prompt[0]] = 100.0 + len(output)
        return scores

    kind = adapt_callable(lambda args: {2: two, 3: three}[args.arity], name="Callables")
    after = play(kind, ({"arity": 2}, [8], [1, 1, 1]), ({"arity": 3}, [8], [1, 1, 1]))
    expected = logits(2)
    expected[0, 3], expected[1, 8] = 100.0, 103.0
    assert np.array_equal(after, expected)


class VllmTarget:
    """A batch processor as in vLLM's documentation: limits requests with a `target` to that token."""

    @classmethod
    def validate_params(cls, params: Any) -> None:
        if params.extra_args.get("target", 0) < 0:
            raise ValueError("target must not be negative")

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.requests: dict[int, tuple[int, list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self.requests.pop(index, None)
        for index, params, prompt, output in batch_update.added:
            assert params.max_tokens == 16
            assert prompt == [3]
            self.requests[index] = (params.extra_args["target"], output)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for index, (target, output) in self.requests.items():
            kept = logits[index, target].clone() + len(output)
            logits[index] = -torch.inf
            logits[index, target] = kept
        return logits


def test_vllms_batch_processors_see_the_live_output(
    play: Callable[..., Any], logits: Callable[..., Any]
) -> None:
    kind = adapt_vllm(VllmTarget, args=TargetArgs)
    assert kind.__name__ == "VllmTarget"
    after = play(kind, ({"target": 2}, [3], [1, 1]), ({"target": 7}, [3], [1, 1]))
    raw = logits(2)
    assert after[0, 2] == raw[0, 2] + 2
    assert after[1, 7] == raw[1, 7] + 2
    assert np.isfinite(after).sum() == 2


def test_vllms_own_validation_refuses_at_admission(facts: ModelFacts) -> None:
    pipeline = Pipeline(EngineConfig(logits_processors=[adapt_vllm(VllmTarget)]), facts)
    with pytest.raises(ParameterError, match="VllmTarget: target must not be negative"):
        pipeline.admit(SamplingParams(logits_processors_args={"target": -1}))


class FakeXgrammarMatcher:
    """The interface of `xgrammar.GrammarMatcher`: allows only the letters a, b, a, b, … and then the end."""

    def __init__(self, length: int) -> None:
        self.left = length
        self.next = 0

    def accept_token(self, token_id: int) -> bool:
        is_right = token_id == self.next
        self.left, self.next = self.left - 1, 1 - self.next
        return is_right

    def is_terminated(self) -> bool:
        return self.left == 0

    def fill_next_token_bitmask(self, bitmask: torch.Tensor, index: int = 0) -> bool:
        bitmask[index].zero_()
        bitmask[index, 0] = 1 << self.next
        return True


def test_bitmask_matchers_of_xgrammars_form(play: Callable[..., Any], logits: Callable[..., Any]) -> None:
    kind = adapt_matcher(lambda args: FakeXgrammarMatcher(args.length), name="Abab")
    after = play(kind, ({"length": 3}, [5], [0, 1]), ({"length": 2}, [5], [0, 1]))
    raw = logits(2)
    assert np.flatnonzero(np.isfinite(after[0])).tolist() == [0]
    assert np.flatnonzero(np.isfinite(after[1])).tolist() == [9], "an ended text leaves its end"
    assert after[0, 0] == raw[0, 0]


def test_llguidances_matchers(play: Callable[..., Any], facts: ModelFacts) -> None:
    import llguidance

    tokenizer = byte_tokenizer(facts)
    grammar = llguidance.LLMatcher.grammar_from_regex("ab(c|d)")
    kind = adapt_matcher(lambda _: llguidance.LLMatcher(tokenizer, grammar), name="Regex")
    after = play(kind, ({"use": True}, [5], [0, 1]))
    assert np.flatnonzero(np.isfinite(after[0])).tolist() == [2, 3]


def test_a_token_that_a_matcher_does_not_accept_fails_its_request(facts: ModelFacts) -> None:
    kind = adapt_matcher(lambda args: FakeXgrammarMatcher(args.length), name="Abab")
    pipeline = Pipeline(EngineConfig(logits_processors=[kind]), facts)
    samples = []
    for name, output in (("good", [0]), ("bad", [4])):
        params = SamplingParams(logits_processors_args={"length": 3})
        row = BatchRow(
            request_id=name, args=None, prompt_token_ids=[1], output_token_ids=output, params=params
        )
        sample = pipeline.open(row, pipeline.admit(row.params))
        assert sample is not None
        samples.append(sample)
    pipeline.prepare(samples)
    done = pipeline.apply(np.zeros((2, 10), np.float32))
    assert list(done.errors) == [1]
    error: Any = done.errors[1]
    assert (type(error), error.processor) == (ProcessorError, "Abab")
    assert isinstance(error.__cause__, ValueError)
    assert np.flatnonzero(np.isfinite(done.logits[0])).tolist() == [1]


def test_what_is_no_matcher_is_refused() -> None:
    from logprobe.processors.builtin.matchers import as_matcher

    with pytest.raises(ParameterError, match="returned object, which is not a matcher"):
        as_matcher(object(), 10)
