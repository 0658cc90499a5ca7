"""Masks that together leave no token: refused at admission, or reported during generation."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from logprobe import SamplingParams
from logprobe.config import EngineConfig
from logprobe.errors import ConflictingParametersError
from logprobe.processors import BatchRow, BatchState, LogitsProcessor, Pipeline
from logprobe.processors.conflicts import can_end, possible_tokens
from logprobe.processors.stages import Stages
from logprobe.transport.messages import Request
from refusals import raises

if TYPE_CHECKING:
    from collections.abc import Callable

    from logprobe import LLM
    from logprobe.processors import ModelFacts

EOS = 9
SERIALS = itertools.count()
KINDS = {
    "allowed_token_ids": "AllowedTokensLogitsProcessor",
    "bad_words": "BannedWordsLogitsProcessor",
    "min_tokens": "MinTokensLogitsProcessor",
    "response_format": "GrammarLogitsProcessor",
}


def choice(*texts: str) -> dict[str, Any]:
    return {"type": "choice", "choice": list(texts)}


@pytest.fixture
def stages(facts: ModelFacts) -> Stages:
    """Stages for the ten letters a to j, of which j is EOS."""
    return Stages.build(EngineConfig(), facts)


@pytest.mark.parametrize(
    ("fields", "at_fault"),
    [
        ({"allowed_token_ids": [3], "bad_words": ["d"]}, ["allowed_token_ids", "bad_words"]),
        ({"allowed_token_ids": [EOS], "min_tokens": 2}, ["allowed_token_ids", "min_tokens"]),
        (
            {"allowed_token_ids": [3], "response_format": choice("a")},
            ["allowed_token_ids", "response_format"],
        ),
        ({"bad_words": ["b"], "response_format": choice("ab")}, ["bad_words", "response_format"]),
        ({"bad_words": ["ab"], "response_format": choice("ab")}, ["bad_words", "response_format"]),
        ({"min_tokens": 3, "response_format": choice("ab", "c")}, ["min_tokens", "response_format"]),
        # The text is complete, but EOS is not allowed.
        (
            {"allowed_token_ids": [0], "response_format": choice("a")},
            ["allowed_token_ids", "response_format"],
        ),
        # Any two of these can be satisfied.
        (
            {"allowed_token_ids": [0, 1, EOS], "bad_words": ["b"], "response_format": choice("b", "c")},
            ["allowed_token_ids", "bad_words", "response_format"],
        ),
        # The third field is not involved.
        ({"allowed_token_ids": [3], "bad_words": ["d"], "min_tokens": 1}, ["allowed_token_ids", "bad_words"]),
    ],
)
def test_masks_that_leave_no_text_are_refused_by_the_names_of_their_fields(
    stages: Stages, fields: dict[str, Any], at_fault: list[str]
) -> None:
    with raises(ConflictingParametersError, parameter=at_fault[0]) as refused:
        stages.admit(SamplingParams(**fields))
    assert list(refused.value.parameters) == at_fault
    assert list(refused.value.processors) == [KINDS[name] for name in at_fault]
    assert all(name in str(refused.value) for name in at_fault)


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [3, 4], "bad_words": ["d"]},
        {"allowed_token_ids": [3, EOS], "min_tokens": 2},
        {"allowed_token_ids": [0], "response_format": choice("a"), "max_tokens": 1},  # ends by max_tokens
        {"allowed_token_ids": [0], "response_format": choice("a"), "stop": ["a"]},  # ends by a stop string
        {"allowed_token_ids": [0, 1], "response_format": choice("ab"), "stop_token_ids": [1]},
        {"bad_words": ["ab"], "response_format": choice("ab", "c")},
        {"min_tokens": 2, "response_format": choice("ab", "c")},
        {"min_tokens": 12, "response_format": {"type": "regex", "regex": "[ab]*"}},
        {"allowed_token_ids": [EOS], "response_format": choice("a"), "max_tokens": 0},
    ],
)
def test_masks_that_leave_a_text_are_admitted(stages: Stages, fields: dict[str, Any]) -> None:
    assert stages.admit(SamplingParams(**fields))


def test_the_search_agrees_with_all_texts_tried_one_by_one(stages: Stages, facts: ModelFacts) -> None:
    rng = random.Random(5)  # noqa: S311 - samples, no secret
    outcomes = []
    for _ in range(150):
        fields: dict[str, Any] = {
            "allowed_token_ids": rng.sample([0, 1, 2, EOS], rng.randint(1, 3)),
            "bad_words": rng.sample(["a", "b", "ab", "bb", "aba"], rng.randint(0, 3)),
            "min_tokens": rng.randint(0, 2),
            "max_tokens": rng.randint(2, 3),
        }
        if rng.random() < 0.5:
            fields["response_format"] = choice(*rng.sample(["a", "ab", "ba", "bc", "aab"], 2))
        params = SamplingParams(**fields)
        args = {index: args for index, args, _ in stages._asked(params)}
        masks: Any = [(stages.ordered[index].processor, new_row(args[index], params)) for index in args]
        found = can_end(masks, params, facts.eos_token_ids, facts.vocab_size)
        assert found == any_text_ends(masks, params), fields
        outcomes.append(found)
    assert 20 < sum(outcomes) < 130, "both answers come"


def new_row(args: Any, params: SamplingParams, output: tuple[int, ...] = ()) -> BatchRow:
    return BatchRow(
        request_id="x",
        args=args,
        prompt_token_ids=[1],
        output_token_ids=output,
        params=params,
        serial=next(SERIALS),  # no state shared between rows
    )


def any_text_ends(masks: Any, params: SamplingParams) -> bool:
    """Return True if any text can end, searching with the processors' logits instead of `forbid`."""

    def left(output: tuple[int, ...]) -> list[int]:
        logits = np.zeros((1, 10), np.float32)
        for processor, row in masks:
            processor.update_state(BatchState([new_row(row.args, params, output)]))
            logits = processor.apply(logits)
        by_logits = np.flatnonzero(np.isfinite(logits[0])).tolist()
        rows = [(processor, new_row(row.args, params, output)) for processor, row in masks]
        assert possible_tokens(rows, 10).tolist() == by_logits, (params, output)
        return by_logits

    live: list[tuple[int, ...]] = [()]
    for _ in range(params.max_tokens):
        following = [(output, left(output)) for output in live]
        if any(EOS in ids for _, ids in following):
            return True
        live = [(*output, token_id) for output, ids in following for token_id in ids]
    return bool(live)


class Unmask(LogitsProcessor):
    """Allow one token again."""

    arg_names = ("unmask",)

    def __init__(self) -> None:
        self.rows: tuple[BatchRow, ...] = ()

    def update_state(self, batch: BatchState) -> None:
        self.rows = batch.rows

    def apply(self, logits: Any) -> Any:
        for index, row in enumerate(self.rows):
            logits[index, row.args.unmask] = 0.0
        return logits


class Forbid(Unmask):
    """Mask some tokens."""

    arg_names = ("forbid",)

    def apply(self, logits: Any) -> Any:
        for index, row in enumerate(self.rows):
            logits[index, row.args.forbid] = -np.inf
        return logits


@pytest.fixture
def step(facts: ModelFacts, logits: Callable[..., Any]) -> Callable[..., Any]:
    """Run a pipeline on one row and return the result."""

    def run(kinds: list[type], output: list[int], **fields: Any) -> Any:
        pipeline = Pipeline(EngineConfig(logits_processors=kinds), facts)
        params = SamplingParams(**fields)
        sample = pipeline.open(new_row(None, params, tuple(output)), pipeline.admit(params))
        assert sample is not None
        pipeline.prepare([sample])
        return pipeline.apply(logits(1))

    return run


def test_masks_that_another_processor_undoes_are_admitted(step: Callable[..., Any]) -> None:
    done = step([Unmask], [], allowed_token_ids=[3], bad_words=["d"], logits_processors_args={"unmask": 4})
    assert not done.errors
    assert np.flatnonzero(np.isfinite(done.logits[0])).tolist() == [4]


def test_a_registered_processor_that_leaves_no_token_with_a_mask_is_a_conflict(
    step: Callable[..., Any],
) -> None:
    error = step([Forbid], [], allowed_token_ids=[3], logits_processors_args={"forbid": [3]}).errors[0]
    assert isinstance(error, ConflictingParametersError)
    assert error.parameters == ("allowed_token_ids", "logits_processors_args")
    assert error.processors == ("AllowedTokensLogitsProcessor", "Forbid")


def test_a_grammar_that_a_later_processor_overrules_is_a_conflict(step: Callable[..., Any]) -> None:
    error = step([Unmask], [0, 4], response_format=choice("ab"), logits_processors_args={"unmask": 4}).errors[
        0
    ]
    assert isinstance(error, ConflictingParametersError)
    assert error.parameters == ("response_format", "logits_processors_args")
    assert error.processors == ("GrammarLogitsProcessor", "Unmask")


@pytest.fixture
def dead_end(tiny_llm: LLM) -> tuple[list[int], dict[str, Any]]:
    """Return a token, and request parameters for which it leads to a dead end (other tokens do not)."""
    (token_id,) = tiny_llm.text.encode("cat", add_special_tokens=False).tolist()
    fields = {"response_format": choice("cat", "cow"), "min_tokens": 3, "logit_bias": {token_id: 100.0}}
    return [token_id], {**fields, "temperature": 0.0}


def test_a_conflict_met_while_generating_ends_the_request_and_no_other(
    tiny_llm: LLM, dead_end: tuple[list[int], dict[str, Any]]
) -> None:
    drawn, fields = dead_end
    alike = {name: value for name, value in fields.items() if name != "min_tokens"}
    asked = [SamplingParams(**alike), SamplingParams(**fields), SamplingParams(**alike)]
    outs = tiny_llm.generate([[5, 6]] * 3, asked, on_error="return")
    assert [out.outputs[0].finish_reason for out in outs] == ["stop", "error", "stop"]
    check_dead_end(outs[1].error)
    assert outs[1].outputs[0].token_ids == drawn


def test_a_conflict_met_in_a_stream_ends_it_after_the_tokens_drawn(
    tiny_llm: LLM, dead_end: tuple[list[int], dict[str, Any]]
) -> None:
    drawn, fields = dead_end

    async def streamed() -> Any:
        prompt = np.array([5, 6], dtype=np.int32)
        request = Request(request_id="dead end", prompt_token_ids=prompt, params=SamplingParams(**fields))
        tiny_llm.engine.submit([tiny_llm.engine.admit(request)])
        return [out async for out in tiny_llm.engine.stream("dead end")][-1]

    out = asyncio.run(streamed())
    check_dead_end(out.error)
    assert out.outputs[0].token_ids == drawn


def check_dead_end(error: Any) -> None:
    assert isinstance(error, ConflictingParametersError)
    assert error.parameter == "min_tokens"
    assert error.parameters == ("min_tokens", "response_format")
    assert error.processors == ("MinTokensLogitsProcessor", "GrammarLogitsProcessor")
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - as engine processes send it
    assert (str(again), again.parameters, again.processors) == (
        str(error),
        error.parameters,
        error.processors,
    )
