"""This measures scoring four continuations to one 256-token context, as a multiple-choice question does."""

from functools import partial
from pathlib import Path
from typing import Any

from harness import OURS, Arena, Contestant, Figure, Target, alternate, parse_options, publish
from prompts import prompts

CONTEXT_LEN, CONTINUATIONS, CONTINUATION_LEN = 256, 4, 8
WANTED = (OURS, "lm_eval", "vllm", "transformers")


def context_len(arena: Arena) -> int:
    """Tokens of the context."""
    return 32 if arena.options.is_smoke else CONTEXT_LEN


def question(arena: Arena, seed: int) -> list[dict[str, Any]]:
    """One call: a context and the continuations to it."""
    [context] = prompts(arena.model_folder, 1, context_len(arena), seed)
    tails = prompts(arena.model_folder, CONTINUATIONS, CONTINUATION_LEN, seed + 500)
    return [{"context": context, "continuations": tails}]


def figure(arena: Arena) -> Figure:
    """Seconds a question, and the largest difference between the contestants' sums."""
    sums: dict[str, list[float]] = {}
    inputs = partial(question, arena)

    def measure(label: str, contestant: Contestant, number: int) -> float:
        result = arena.ask_warm(contestant, "shared_prefix", inputs, number)
        sums[label] = result["output"]
        seconds: float = result["timings_s"][0]
        return seconds

    contestants = {label: partial(measure, label, one) for label, one in arena.labels(*WANTED).items()}
    samples, notes = alternate(contestants, arena.options.rounds)
    apart = max(abs(a - b) for label in samples for a, b in zip(sums[label], sums[OURS], strict=True))
    return Figure(
        name=f"{CONTINUATIONS} continuations to one {context_len(arena)}-token context",
        unit="s",
        better="lower",
        samples=samples,
        targets=[Target(against="lm_eval best", at_least=3.0)],
        notes=[*notes, *arena.missing(*WANTED), f"continuation sums agree within {apart:.1e} nats"],
    )


def main() -> None:
    """Run the figure."""
    options = parse_options(__doc__ or "")
    with Arena(options) as arena:
        figures = [figure(arena)]
    publish(Path(__file__).stem, figures, options)


if __name__ == "__main__":
    main()
