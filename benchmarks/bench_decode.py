"""This measures generated tokens a second at 1, 8 and 32 requests at once, with 20 logprobs a token.

Steady state is (tokens after the first) / (time of all tokens - time of the first alone), so that the
prompts' cost drops out; the whole call is shown beside it. The floor is one reading of the weights a step,
at the speed that memory has in the same round. On processors with AMX, or with `--bfloat16`, our arithmetic
`bf16x3` and the others in bfloat16 take part too; `bench_score.py` shows how exact each is.
"""

from functools import partial
from pathlib import Path
from typing import Any

from harness import (
    FLOOR,
    OURS,
    Arena,
    Contestant,
    Figure,
    Target,
    alternate,
    parse_options,
    publish,
)
from prompts import prompts

TOP = 20
PROMPT_LEN = 32
TARGETS = {
    1: [
        Target(against="vllm best", at_least=2.5),
        Target(against="transformers best", at_least=4.0),
        Target(against=FLOOR, at_least=0.7),
        Target(against="llama_cpp q8_0", at_least=0.7),  # whose activations are of 8 bits
    ],
    8: [Target(against="vllm best", at_least=1.6), Target(against="transformers best", at_least=3.0)],
    32: [Target(against="vllm best", at_least=1.2), Target(against="transformers best", at_least=2.0)],
}
WANTED = (OURS, "vllm", "transformers", "llama_cpp")


class DecodeRace:
    """Times one batch size for every contestant; keeps the whole calls' rates beside the steady ones."""

    def __init__(self, arena: Arena, batch: int, new_tokens: int) -> None:
        self._arena, self._batch, self._new_tokens = arena, batch, new_tokens
        self.whole: dict[str, list[float]] = {}

    def inputs(self, seed: int) -> list[dict[str, Any]]:
        """Two calls on prompts of their own: one new token, then all."""
        texts = prompts(self._arena.model_folder, 2 * self._batch, PROMPT_LEN, seed)
        calls = (texts[: self._batch], 1), (texts[self._batch :], self._new_tokens)
        return [{"prompts": half, "new_tokens": count, "logprobs": TOP} for half, count in calls]

    def measure(self, label: str, contestant: Contestant, number: int) -> float:
        """One sample: tokens a second in the steady state."""
        first_s, all_s = self._arena.ask_warm(contestant, "decode", self.inputs, number)["timings_s"]
        self.whole.setdefault(label, []).append(self._batch * self._new_tokens / all_s)
        rate: float = self._batch * (self._new_tokens - 1) / (all_s - first_s)
        return rate


def decode_figures(arena: Arena, batch: int) -> list[Figure]:
    """Steady state and whole call at one batch size."""
    race = DecodeRace(arena, batch, new_tokens=4 if arena.options.is_smoke else 48)
    wanted = WANTED if batch == 1 else WANTED[:-1]
    labels = arena.labels(*wanted, bfloat16=True)
    racing = {label: partial(race.measure, label, one) for label, one in labels.items()}
    contestants = {FLOOR: arena.floor(batch), **racing}
    samples, notes = alternate(contestants, arena.options.rounds)
    common: dict[str, Any] = {"unit": "tokens/s", "better": "higher"}
    common["notes"] = [*notes, *arena.missing(*wanted)]
    name = f"decode, batch {batch}, logprobs {TOP}"
    whole = {label: race.whole[label] for label in samples if label != FLOOR}
    return [
        Figure(name=name, samples=samples, targets=TARGETS.get(batch, ()), **common),
        Figure(name=f"{name}, whole call with {PROMPT_LEN}-token prompts", samples=whole, **common),
    ]


def main() -> None:
    """Run all batch sizes."""
    options = parse_options(__doc__ or "")
    with Arena(options) as arena:
        batches = (1, 2) if options.is_smoke else (1, 8, 32)
        figures = [figure for batch in batches for figure in decode_figures(arena, batch)]
    publish(Path(__file__).stem, figures, options)


if __name__ == "__main__":
    main()
