"""This measures a second model that drafts tokens against one token a step.

Two loaded models, one process: the larger one alone, and with the smaller one as its draft model. The same
requests run in turn: chats about everyday questions, greedy and sampled at temperature 1, one and four at
once. Tokens a second once the prompts are computed; the share of drafts that were accepted, by their place
among the drafts of a step, those of the lookup included. With `--draft NAME`, that model drafts for
`--model`, which needs the same tokenizer. Without it, a quantized `--model` drafts for its own weights in
float32, which is the best case: the same tokens, but several times the bytes to read.
"""

import argparse
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

from harness import OURS, Arena, Figure, Options, Target, alternate, parse_options, publish

from logprobe import LLM, SamplingParams
from logprobe.engine.protocol import EngineStats

PLAIN = "without drafts"
QUESTIONS = (
    "Explain why the sky is blue.",
    "Write a short letter to a landlord about a broken heater.",
    "List the planets of the solar system, with one fact about each.",
    "How do I make an omelette?",
)
BATCHES = (1, 4)


class Race:
    """The larger model, with and without its draft model in turn."""

    def __init__(self, options: Options, draft: str | None) -> None:
        large = options.model if draft else str(Arena(options).float_folder)
        self.llm = LLM(large, speculate=f"model:{draft or options.model}")
        self._engine = self.llm.engine.core.engine  # type: ignore[attr-defined]
        self._drafter = self._engine.scheduler.drafter
        self._num_tokens = 8 if options.is_smoke else 96
        self._texts: dict[tuple[float, int, int], list[list[int]]] = {}
        self.shares: dict[str, list[float]] = {}

    def measure(self, temperature: float, batch: int, speculate: bool, number: int) -> float:
        """Tokens a second of a batch, its prompts computed before."""
        self._switch(speculate)
        asked = [QUESTIONS[(number + place) % len(QUESTIONS)] for place in range(batch)]
        prompts = [f"Question: {one}\nAnswer:" for one in asked]
        params = SamplingParams(
            max_tokens=self._num_tokens, temperature=temperature, seed=number, ignore_eos=True
        )
        self.llm.engine.forget_prefixes()
        self.llm.generate(prompts, SamplingParams(max_tokens=1))
        before = self.llm.engine.stats()
        start = time.perf_counter()
        outputs = self.llm.generate(prompts, params)
        seconds = time.perf_counter() - start
        self._check(temperature, batch, number, [one.outputs[0].token_ids for one in outputs])
        if speculate:
            self._count(before, self.llm.engine.stats())
        return batch * self._num_tokens / seconds

    def _switch(self, speculate: bool) -> None:
        self._engine.config = replace(self._engine.config, speculate=speculate)
        self._engine.scheduler.drafter = self._drafter if speculate else None

    def _check(self, temperature: float, batch: int, number: int, token_ids: list[list[int]]) -> None:
        first = self._texts.setdefault((temperature, batch, number), token_ids)
        if first != token_ids:
            raise AssertionError(f"temperature {temperature}, batch {batch}, round {number}: texts differ")

    def _count(self, before: EngineStats, after: EngineStats) -> None:
        counts = zip(after.drafted_by_position, after.accepted_by_position, strict=False)
        for place, (drafted, accepted) in enumerate(counts):
            num_drafted = drafted - sum(before.drafted_by_position[place : place + 1])
            num_accepted = accepted - sum(before.accepted_by_position[place : place + 1])
            if num_drafted:
                self.shares.setdefault(f"draft {place + 1}", []).append(100 * num_accepted / num_drafted)


def figures(race: Race, options: Options) -> list[Figure]:
    """Greedy and sampled, at each batch size, and how many drafts were accepted."""
    found = []
    for temperature, name in ((0.0, "greedy"), (1.0, "temperature 1")):
        for batch in BATCHES[:1] if options.is_smoke else BATCHES:
            contestants = {
                OURS: partial(race.measure, temperature, batch, True),
                PLAIN: partial(race.measure, temperature, batch, False),
            }
            samples, notes = alternate(contestants, options.rounds)
            found.append(
                Figure(
                    name=f"{name}, {batch} at once",
                    unit="tokens/s",
                    better="higher",
                    samples=samples,
                    targets=[Target(against=PLAIN, at_least=1.0)] if batch == 1 else [],
                    notes=notes,
                )
            )
    if race.shares:
        found.append(Figure(name="accepted drafts by place", unit="%", better="higher", samples=race.shares))
    return found


def main() -> None:
    """Race with and without a draft model."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--draft")
    known, sys.argv[1:] = parser.parse_known_args()
    draft = known.draft
    options = parse_options(__doc__ or "")
    race = Race(options, draft)
    with race.llm:
        measured = figures(race, options)
    name = Path(__file__).stem + (f" --draft {Path(draft).name}" if draft else "")
    publish(name, measured, options)


if __name__ == "__main__":
    main()
