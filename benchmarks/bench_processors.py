"""This measures what logits processors add to one step of 32 rows: each built-in, one of one's own, and none.

A step is the update before the forward pass and the change of the logits after it; every row is concerned
and one token longer at each step. One copy of the same rows stands beside as the yardstick.
"""

import itertools
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import OURS, Figure, Measure, Options, alternate, parse_options, publish

from logprobe import SamplingParams
from logprobe.config import EngineConfig
from logprobe.models import load_tokenizer, resolve
from logprobe.processors import BatchRow, LogitsProcessor, ModelFacts, Pipeline
from logprobe.text.edge import TextEdge

COPY = "one copy of the rows"
HISTORY = 200  # tokens of prompt, and tokens generated before the first step
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}
OPENING = '{"a": "'  # within a string of that schema


class OwnLogitsProcessor(LogitsProcessor):
    """A registered rule that does nothing: what is left is the private copy and the check of its rows."""

    def __init__(self, config: EngineConfig) -> None:
        """Nothing to set up."""
        del config

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Give the rows back."""
        return logits


def asked() -> dict[str, dict[str, Any]]:
    """Processor -> what each request asks of it."""
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    return {
        "none": {},
        "LogitBias, 20 tokens": {"logit_bias": {7 * token_id: 1.0 for token_id in range(20)}},
        "AllowedTokens, 100 tokens": {"allowed_token_ids": list(range(100))},
        "BannedWords, 7 words": {"bad_words": ["one", "two", "three", "four", "five", "six", "seven"]},
        "MinTokens": {"min_tokens": 100_000, "max_tokens": 100_000},
        "Penalties, 200 + 200 tokens": {"repetition_penalty": 1.2, "frequency_penalty": 0.1},
        "Grammar, within a JSON string": {"response_format": form},
        "ThinkingBudget": {"logits_processors_args": {"thinking_budget": 100_000}},
        "Capture": {"logits_processors_args": {"capture": True}},
        "one of one's own": {"logits_processors_args": {"own": True}},
    }


def facts_of(model: str) -> ModelFacts:
    """What processors know of a model, without its weights."""
    tokenizer = load_tokenizer(resolve(model))
    return ModelFacts(
        vocab_size=len(tokenizer),
        eos_token_ids=frozenset({tokenizer.eos_token_id}),
        text=TextEdge.of(tokenizer),
    )


def stepper(facts: ModelFacts, name: str, params: dict[str, Any], logits: torch.Tensor) -> Callable[[], None]:
    """One step of as many rows as there are logits, all of which ask for the same."""
    registered: list[str | type] = [
        OwnLogitsProcessor, "ThinkingBudgetLogitsProcessor", "CaptureLogitsProcessor",
    ]  # fmt: skip
    pipeline = Pipeline(EngineConfig(logits_processors=registered), facts)
    history = facts.encode(OPENING) if name.startswith("Grammar") else range(facts.vocab_size)[-HISTORY:]
    (next_id, *_) = facts.encode("word")
    outputs = [list(history) for _ in logits]
    rows = [
        BatchRow(
            request_id=str(place),
            args=None,
            prompt_token_ids=list(range(HISTORY)),
            output_token_ids=output,
            params=SamplingParams(**params),
        )
        for place, output in enumerate(outputs)
    ]
    opened = [pipeline.open(row, pipeline.admit(row.params)) for row in rows]
    samples = [sample for sample in opened if sample is not None]

    def step() -> None:
        pipeline.prepare(samples)
        if samples:
            done = pipeline.apply(logits)
            assert not done.errors, done.errors
        for output in outputs:
            output.append(next_id)

    return step


def ms_of(call: Callable[[], object], num_calls: int, _number: int) -> float:
    """Milliseconds a call, after one that is not counted."""
    call()
    started = time.perf_counter()
    for _ in itertools.repeat(None, num_calls):
        call()
    return 1e3 * (time.perf_counter() - started) / num_calls


def figures(options: Options) -> list[Figure]:
    """One figure a processor."""
    num_rows, num_calls = (4, 2) if options.is_smoke else (32, 20)
    facts = facts_of(options.model)
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(num_rows, facts.vocab_size, generator=generator)
    made = []
    with torch.inference_mode():
        for name, params in asked().items():
            contestants: dict[str, Measure] = {
                OURS: partial(ms_of, stepper(facts, name, params, logits), num_calls),
                COPY: partial(ms_of, logits.clone, num_calls),
            }
            samples, notes = alternate(contestants, options.rounds)
            made.append(
                Figure(
                    name=f"{name}, {num_rows} rows of {facts.vocab_size}",
                    unit="ms/step",
                    better="lower",
                    samples=samples,
                    notes=notes,
                )
            )
    return made


def main() -> None:
    """Run all figures."""
    options = parse_options(__doc__ or "")
    publish(Path(__file__).stem, figures(options), options)


if __name__ == "__main__":
    main()
