"""This measures whole next-token rows a second: 64 prefixes of 32 tokens sharing 24, extended token by token.

Each round asks every prefix for its row and then extends it by a token of its own. A default form that takes
seconds a row runs fewer rounds. The floor is one reading of the weights a round. Beside it: over HTTP,
`AsyncVirtualLM` beside vLLM's own forms, and how long single asks keep the event loop from another task.
"""

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

from harness import (
    FLOOR,
    OURS,
    WARM_UP_SEED,
    Arena,
    Contestant,
    Figure,
    Measure,
    Target,
    alternate,
    parse_options,
    publish,
)
from prompts import prompts
from protocol import ask_rounds
from servers import our_program, serving

from logprobe import RemoteLLM

NUM_PREFIXES, PREFIX_LEN, SHARED_LEN, NUM_ROUNDS = 64, 32, 24, 16
FEWER_ROUNDS = {"genlm default": 4, "vllm default": 1}
HTTP, VIRTUAL = f"{OURS} over HTTP", f"{OURS} in vLLM"
ON_VLLM = ("vllm", "virtual_lm", "genlm_vllm")
WANTED = (OURS, "genlm", *ON_VLLM)
VLLM_TARGETS = [Target(against="vllm best", at_least=4.0)]
TARGETS = [
    Target(against="genlm best", at_least=10.0),
    Target(against="vllm best", at_least=4.0),
    Target(against="vllm default", at_least=20.0),
]
WEIGHTS = "checkpoint"  # the same in process and served


def num_prefixes(arena: Arena) -> int:
    """Prefixes asked at once."""
    return 4 if arena.options.is_smoke else NUM_PREFIXES


def asked(arena: Arena, num_rounds: int, seed: int) -> dict[str, Any]:
    """One call: prefixes that nobody has seen, and the tokens that extend them after each round."""
    count = num_prefixes(arena)
    own_len = PREFIX_LEN - SHARED_LEN
    [shared] = prompts(arena.model_folder, 1, SHARED_LEN, seed)
    tails = prompts(arena.model_folder, count, own_len + num_rounds, seed + 500)
    rounds = [[tail[own_len + number] for tail in tails] for number in range(num_rounds)]
    return {"prefixes": [[*shared, *tail[:own_len]] for tail in tails], "rounds": rounds}


class InProcess:
    """A contestant that is asked in its own process."""

    def __init__(self, arena: Arena, contestant: Contestant, num_rounds: int) -> None:
        self._arena, self._contestant, self._num_rounds = arena, contestant, num_rounds
        self._job = {"options": {"weights": WEIGHTS}} if contestant[0] == OURS else {}

    def inputs(self, seed: int) -> list[dict[str, Any]]:
        """One call; a warm-up is short."""
        num_rounds = min(2, self._num_rounds) if seed == WARM_UP_SEED else self._num_rounds
        return [asked(self._arena, num_rounds, seed)]

    def rate(self, number: int) -> float:
        """Rows a second."""
        job = self._arena.ask_warm(self._contestant, "next_token", self.inputs, number, **self._job)
        num_rows = self._num_rounds * len(job["output"])
        return num_rows / float(job["timings_s"][0])

    def stall(self, number: int) -> float:
        """Milliseconds for which the event loop was stopped at most, in one call beside a task that ticks."""
        if number == 0:
            self._arena.ask(self._contestant, "event_loop_stall", self.inputs(WARM_UP_SEED), **self._job)
        job = self._arena.ask(self._contestant, "event_loop_stall", self.inputs(100 + number), **self._job)
        return float(job["output"])


class OverHttp:
    """Our server, asked by `RemoteLLM`; it has one thread of this process beside the server's two."""

    def __init__(self, arena: Arena, lm: RemoteLLM, num_rounds: int) -> None:
        self._arena, self._lm, self._num_rounds = arena, lm, num_rounds
        asyncio.run(ask_rounds(self._lm, **asked(arena, min(2, num_rounds), WARM_UP_SEED)))

    def rate(self, number: int) -> float:
        """Rows a second."""
        inputs = asked(self._arena, self._num_rounds, number)
        started = time.perf_counter()
        asyncio.run(ask_rounds(self._lm, **inputs))
        return self._num_rounds * len(inputs["prefixes"]) / (time.perf_counter() - started)


def rate_figures(arena: Arena, remote: RemoteLLM, num_rounds: int) -> list[Figure]:
    """Rows a second of all, and of those that run in vLLM, from one race."""
    fewer = {label: min(count, num_rounds) for label, count in FEWER_ROUNDS.items()}
    contestants: dict[str, Measure] = {FLOOR: arena.floor(num_prefixes(arena))}
    contestants |= {
        VIRTUAL if one[0] == "virtual_lm" else label: InProcess(arena, one, fewer.get(label, num_rounds)).rate
        for label, one in arena.labels(*WANTED).items()
    }
    contestants[HTTP] = OverHttp(arena, remote, num_rounds).rate
    samples, notes = alternate(contestants, arena.options.rounds)
    told = [f"{label} ran {count} of the {num_rounds} rounds" for label, count in fewer.items()]
    notes += arena.missing(*WANTED)
    notes += [one for one in told if one.partition(" ran")[0] in samples]
    return split(
        samples, notes, f"{num_prefixes(arena)} prefixes of {PREFIX_LEN} tokens sharing {SHARED_LEN}"
    )


def split(samples: dict[str, list[float]], notes: list[str], asked_for: str) -> list[Figure]:
    """The race as a figure of the native engine, and one of `AsyncVirtualLM` where it ran."""
    in_vllm = {label: samples[label] for label in samples if label.partition(" ")[0] in ON_VLLM}
    native = {label: samples[label] for label in samples if label not in {VIRTUAL, "genlm_vllm default"}}
    raced = [("next-token rows", native, TARGETS)]
    if VIRTUAL in samples:
        raced.append(("next-token rows in vLLM", {OURS: samples[VIRTUAL], **in_vllm}, VLLM_TARGETS))
    return [
        Figure(
            name=f"{name}, {asked_for}",
            unit="rows/s",
            better="higher",
            samples=of_figure,
            targets=targets,
            notes=notes,
        )
        for name, of_figure, targets in raced
    ]


def stall_figure(arena: Arena, num_rounds: int) -> Figure:
    """How long the event loop was stopped while each prefix was asked by a task of its own."""
    ours = InProcess(arena, (OURS, "default"), num_rounds)
    samples, _ = alternate({OURS: ours.stall}, arena.options.rounds)
    return Figure(
        name="longest stall of the event loop in all rounds",
        unit="ms",
        better="lower",
        samples=samples,
        targets=[Target(at_most=10.0)],
    )


def main() -> None:
    """Run the race, and ours alone for the stall."""
    options = parse_options(__doc__ or "")
    num_rounds = 2 if options.is_smoke else NUM_ROUNDS
    with Arena(options) as arena, contextlib.ExitStack() as stack:
        stall = stall_figure(arena, num_rounds)
        served = stack.enter_context(serving(our_program(arena.model_folder, "--weights", WEIGHTS)))
        remote = stack.enter_context(RemoteLLM(served.url))
        rates = rate_figures(arena, remote, num_rounds)
    publish(Path(__file__).stem, [*rates, stall], options)


if __name__ == "__main__":
    main()
