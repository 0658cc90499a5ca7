"""This measures what asking for logprobs costs generation at 32 requests at once: k = none, 0, 20, 1000, all.

Scoring is measured with further columns, too: entropy, varentropy and margin beside it, and the 64 likeliest
ids of each position, named by whoever asks.

Each figure is the whole call's tokens a second; ours is held against ours without logprobs, and vLLM's own
fall in its best form stands beside it. A few hundredths are sought, so ours runs four times the rounds.
"""

from functools import partial
from pathlib import Path
from typing import Any

from harness import OURS, Arena, Contestant, Figure, Target, alternate, parse_options, publish
from prompts import prompts

PROMPT_LEN = 32
# k -> the least share of the rate without logprobs; -1 is the whole vocabulary.
AT_LEAST = {0: 0.98, 20: 0.97, 1000: 0.90, -1: 0.75}
KS = (None, *AT_LEAST)
WANTED = (OURS, "vllm")
ROUNDS_OF_OURS = 4  # for each one asked for
# Further columns of scoring -> the least share of the rate without any.
NAMED_IDS = "named ids"
NUM_NAMED = 64
COLUMNS = {(): 1.0, ("entropy",): 0.97, ("entropy", "varentropy", "margin"): 0.97, (NAMED_IDS,): 0.97}


def name_of(k: int | None) -> str:
    """Give k's name in the table."""
    return {None: "none", -1: "whole vocabulary"}.get(k, str(k))


def sizes(arena: Arena) -> tuple[int, int]:
    """Requests at once, and new tokens of each."""
    return (2, 4) if arena.options.is_smoke else (32, 24)


def measure_all(arena: Arena) -> tuple[dict[str, list[float]], list[str]]:
    """Tokens a second of each contestant at each k; the ks take turns."""
    batch, new_tokens = sizes(arena)

    def inputs(k: int | None, seed: int) -> list[dict[str, Any]]:
        # Each k has prompts of its own, which no cache has seen.
        texts = prompts(arena.model_folder, batch, PROMPT_LEN, 10 * seed + KS.index(k))
        return [{"prompts": texts, "new_tokens": new_tokens, "logprobs": k}]

    inputs_of = {k: partial(inputs, k) for k in KS}

    def measure(contestant: Contestant, k: int | None, number: int) -> float:
        seconds: float = arena.ask_warm(contestant, "decode", inputs_of[k], number)["timings_s"][0]
        return batch * new_tokens / seconds

    samples: dict[str, list[float]] = {}
    notes: list[str] = []
    for name, contestant in arena.labels(*WANTED).items():
        if name == "vllm default":
            continue
        racing = {f"{name}, k = {name_of(k)}": partial(measure, contestant, k) for k in KS}
        rounds = arena.options.rounds * (ROUNDS_OF_OURS if name == OURS else 1)
        taken, told = alternate(racing, rounds)
        samples |= taken
        notes += told
    return samples, notes


def figures(arena: Arena) -> list[Figure]:
    """One figure a k."""
    samples, notes = measure_all(arena)
    none = f"{OURS}, k = none"

    def of_k(k: int) -> Figure:
        ending = f", k = {name_of(k)}"
        rivals = {
            name: values
            for name, values in samples.items()
            if not name.startswith(OURS) and name.endswith((ending, "k = none"))
        }
        return Figure(
            name=f"generation, batch {sizes(arena)[0]}, logprobs = {name_of(k)}",
            unit="tokens/s",
            better="higher",
            samples={OURS: samples[OURS + ending], none: samples[none], **rivals},
            targets=[Target(against=none, at_least=AT_LEAST[k])],
            notes=[*notes, *arena.missing(*WANTED)],
        )

    return [of_k(k) for k in AT_LEAST]


def column_figures(arena: Arena) -> list[Figure]:
    """Tokens a second of scoring, one figure for each set of further columns; the sets take turns."""
    count, length = (1, 64) if arena.options.is_smoke else (4, 512)

    (ours,) = arena.labels(OURS).values()

    def inputs(columns: tuple[str, ...], seed: int) -> list[dict[str, Any]]:
        texts = prompts(arena.model_folder, count, length, 10 * seed + list(COLUMNS).index(columns))
        if columns != (NAMED_IDS,):
            return [{"prompts": texts, "top": 0, "columns": columns}]
        named = arena.ask(ours, "likely_ids", [{"prompts": texts, "count": NUM_NAMED}])["output"]
        return [{"prompts": texts, "top": 0, "token_ids": named}]

    def measure(contestant: Contestant, columns: tuple[str, ...], number: int) -> float:
        result = arena.ask_warm(contestant, "score", partial(inputs, columns), number)
        return count * length / float(result["timings_s"][0])

    names = {columns: " and ".join(columns) or "no column" for columns in COLUMNS}
    racing = {names[columns]: partial(measure, ours, columns) for columns in COLUMNS}
    samples, notes = alternate(racing, ROUNDS_OF_OURS * arena.options.rounds)
    return [
        Figure(
            name=f"scoring, {length}-token prompts, with {names[columns]}",
            unit="tokens/s",
            better="higher",
            samples={OURS: samples[names[columns]], names[()]: samples[names[()]]},
            targets=[Target(against=names[()], at_least=share)],
            notes=notes,
        )
        for columns, share in COLUMNS.items()
        if columns
    ]


def main() -> None:
    """Run all figures."""
    options = parse_options(__doc__ or "")
    with Arena(options) as arena:
        measured = figures(arena) + column_figures(arena)
    publish(Path(__file__).stem, measured, options)


if __name__ == "__main__":
    main()
