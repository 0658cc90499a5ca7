"""This measures scoring four continuations to one 256-token context, as a multiple-choice question does.

Ours in process (`LLM.score`) and over HTTP (`POST /v1/loglikelihood`), beside the harness's `hf` model.
"""

import time
from functools import partial
from pathlib import Path
from typing import Any

from harness import OURS, WARM_UP_SEED, Arena, Contestant, Figure, Target, alternate, parse_options, publish
from prompts import prompts
from servers import Served, our_program, serving

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


def figure(arena: Arena, server: Served | None = None) -> Figure:
    """Seconds a question, ours in process or by a server, and the largest difference between the sums."""
    sums: dict[str, list[float]] = {}
    inputs = partial(question, arena)

    def measure(label: str, contestant: Contestant, number: int) -> float:
        result = arena.ask_warm(contestant, "shared_prefix", inputs, number)
        sums[label] = result["output"]
        seconds: float = result["timings_s"][0]
        return seconds

    def measure_served(url: Served, number: int) -> float:
        for seed in (WARM_UP_SEED + number, number):
            [body] = inputs(seed)
            began = time.perf_counter()
            reply = url.post("/v1/loglikelihood", body)
            seconds = time.perf_counter() - began
        sums[OURS] = [float(one["logprob"]) for one in reply["data"]]
        return seconds

    contestants = {label: partial(measure, label, one) for label, one in arena.labels(*WANTED).items()}
    if server is not None:
        contestants[OURS] = partial(measure_served, server)
    samples, notes = alternate(contestants, arena.options.rounds)
    apart = max(abs(a - b) for label in samples for a, b in zip(sums[label], sums[OURS], strict=True))
    return Figure(
        name=f"{CONTINUATIONS} continuations to one {context_len(arena)}-token context"
        + (", ours in process" if server is None else ", ours over HTTP"),
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
        arena.close(OURS)  # one of ours at a time
        with serving(our_program(arena.model_folder)) as server:
            figures.append(figure(arena, server))
    publish(Path(__file__).stem, figures, options)


if __name__ == "__main__":
    main()
