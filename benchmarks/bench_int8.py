"""This measures what 8-bit weights gain in speed over float32 and what they cost in nats.

Speed: tokens generated a second by one request (llama.cpp's 8-bit file beside it), and tokens a second of
512-token prompts that are scored. Cost: how far the next-token distributions of `examples/lighthouse.txt`
are from those in float32. ``logprobe`` is the 8-bit form throughout; both forms stay loaded and take turns.
"""

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from harness import (
    OURS,
    ROOT,
    WARM_UP_SEED,
    Arena,
    Figure,
    Measure,
    Target,
    alternate,
    parse_options,
    publish,
)
from process import ENVIRONMENTS, RIVALS, RivalProcess
from prompts import prompts

TOP = 20
DECODE_LEN, PROMPTS, PROMPT_LEN = 32, 2, 512
FLOAT = "logprobe float32"
LAYOUTS = {OURS: "int8", FLOAT: "auto"}
LARGEST_MEAN_KL = 0.01
LEAST_SCORING_GAIN = 1.5
TEXT = ROOT / "examples" / "lighthouse.txt"


class Layouts:
    """This project in a process a layout of the weights, since a model has one layout for good."""

    def __init__(self, arena: Arena, stack: ExitStack) -> None:
        self._arena = arena
        self._running = {
            label: stack.enter_context(
                RivalProcess(RIVALS[OURS], log_folder=ENVIRONMENTS / f"logprobe-{layout}")
            )
            for label, layout in LAYOUTS.items()
        }
        self._warm: set[tuple[str, str]] = set()

    def timings_s(self, label: str, verb: str, calls: list[Any], warm_up: list[Any]) -> list[float]:
        """Seconds of each call; a layout's first job of a kind runs the warm-up before."""
        before = [] if (label, verb) in self._warm else warm_up
        self._warm.add((label, verb))
        job = {"verb": verb, "variant": "default", "model_folder": str(self._arena.model_folder)}
        options = {"weights": LAYOUTS[label]}
        inputs = [*before, *calls]
        result = self._running[label].ask(
            {**job, "options": options, "inputs": inputs, "warm_up": len(before)}
        )
        seconds: list[float] = result["timings_s"]
        return seconds


def decode_calls(arena: Arena, new_tokens: int, seed: int) -> list[dict[str, Any]]:
    """Two calls on prompts of their own: one new token, then all."""
    texts = prompts(arena.model_folder, 2, DECODE_LEN, seed)
    return [
        {"prompts": [text], "new_tokens": count, "logprobs": TOP}
        for text, count in zip(texts, (1, new_tokens), strict=True)
    ]


def decode_figure(arena: Arena, layouts: Layouts) -> Figure:
    """Tokens a second of one request in the steady state."""
    new_tokens = 4 if arena.options.is_smoke else 48
    calls = partial(decode_calls, arena, new_tokens)

    def rate(timings_s: list[float]) -> float:
        first_s, all_s = timings_s
        return (new_tokens - 1) / (all_s - first_s)

    def measure_ours(label: str, number: int) -> float:
        return rate(layouts.timings_s(label, "decode", calls(number), calls(WARM_UP_SEED)))

    def measure_theirs(contestant: Any, number: int) -> float:
        return rate(arena.ask_warm(contestant, "decode", calls, number)["timings_s"])

    racing: dict[str, Measure] = {label: partial(measure_ours, label) for label in LAYOUTS}
    racing |= {name: partial(measure_theirs, one) for name, one in arena.labels("llama_cpp").items()}
    samples, notes = alternate(racing, arena.options.rounds)
    return Figure(
        name=f"decode, batch 1, logprobs {TOP}, 8-bit weights",
        unit="tokens/s",
        better="higher",
        samples=samples,
        notes=[*notes, *arena.missing("llama_cpp")],
    )


def score_figure(arena: Arena, layouts: Layouts) -> Figure:
    """Prompt tokens a second."""
    count, length = (1, 64) if arena.options.is_smoke else (PROMPTS, PROMPT_LEN)

    def calls(seed: int) -> list[dict[str, Any]]:
        return [{"prompts": prompts(arena.model_folder, count, length, seed), "top": TOP}]

    def measure(label: str, number: int) -> float:
        return count * length / layouts.timings_s(label, "score", calls(number), calls(WARM_UP_SEED))[0]

    samples, notes = alternate({label: partial(measure, label) for label in LAYOUTS}, arena.options.rounds)
    return Figure(
        name=f"scoring, {length}-token prompts, top {TOP}, 8-bit weights",
        unit="tokens/s",
        better="higher",
        samples=samples,
        targets=[Target(against=FLOAT, at_least=LEAST_SCORING_GAIN)],
        notes=notes,
    )


def cost_figures(arena: Arena) -> list[Figure]:
    """Distances of the 8-bit distributions from the float32 ones, as `logprobe compare` states them."""
    from logprobe import LLM
    from logprobe.scoring import compare

    text = TEXT.read_text(encoding="utf-8")[: 200 if arena.options.is_smoke else None]
    with ExitStack() as stack:
        exact, rough = (
            stack.enter_context(LLM(str(arena.model_folder), weights=LAYOUTS[label], kv_bytes=1 << 28))
            for label in (FLOAT, OURS)
        )
        found = compare(exact, rough, [text])
    of = f"8-bit against float32 over {found.num_positions} positions"
    target = Target(at_most=LARGEST_MEAN_KL)
    common = {"unit": "nats", "better": "lower"}
    return [
        Figure(name=f"mean KL, {of}", samples={OURS: [found.kl.mean]}, targets=[target], **common),
        Figure(name=f"largest KL, {of}", samples={OURS: [found.kl.max]}, **common),
        Figure(
            name=f"mean change of the text's own logprobs, {of}", samples={OURS: [found.delta.mean]}, **common
        ),
        Figure(
            name=f"same likeliest token, {of}",
            unit="%",
            better="higher",
            samples={OURS: [100 * found.agreement]},
        ),
    ]


def main() -> None:
    """Run all figures."""
    options = parse_options(__doc__ or "")
    with Arena(options) as arena, ExitStack() as stack:
        figures = cost_figures(arena)
        layouts = Layouts(arena, stack)
        figures += [decode_figure(arena, layouts), score_figure(arena, layouts)]
    publish(Path(__file__).stem, figures, options)


if __name__ == "__main__":
    main()
