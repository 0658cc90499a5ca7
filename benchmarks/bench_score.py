"""This measures prompt scoring: tokens a second on 512-token prompts, with the top 20 of each position.

It also measures how far the resident memory grows over the loaded model while an 8,000-token prompt is
scored, and how long scoring the same prompt again takes. The engine's pool for keys and values is part of
the loaded model: it has just room for one such prompt, and an earlier one has been through it.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

from harness import OURS, Arena, Contestant, Figure, Target, alternate, parse_options, publish
from prompts import prompts

TOP = 20
PROMPTS, PROMPT_LEN, LONG_LEN = 4, 512, 8000
MIB = 1 << 20
WANTED = (OURS, "vllm", "transformers")


def rate_figure(arena: Arena) -> Figure:
    """Prompt tokens a second."""
    count, length = (1, 64) if arena.options.is_smoke else (PROMPTS, PROMPT_LEN)

    def inputs(seed: int) -> list[dict[str, Any]]:
        return [{"prompts": prompts(arena.model_folder, count, length, seed), "top": TOP}]

    def measure(contestant: Contestant, number: int) -> float:
        seconds: float = arena.ask_warm(contestant, "score", inputs, number)["timings_s"][0]
        return count * length / seconds

    contestants = {label: partial(measure, one) for label, one in arena.labels(*WANTED).items()}
    samples, notes = alternate(contestants, arena.options.rounds)
    return Figure(
        name=f"scoring, {length}-token prompts, top {TOP}",
        unit="tokens/s",
        better="higher",
        samples=samples,
        targets=[
            Target(against="vllm best", at_least=1.3),
            Target(against="transformers best", at_least=2.0),
            # Which of its two forms is the faster depends on the machine; the lean one is always the smaller.
            Target(against="transformers default", at_least=2.0),
        ],
        notes=[*notes, *arena.missing(*WANTED)],
    )


def pool_bytes(model_folder: Path, num_tokens: int) -> int:
    """Bytes that the keys, values and hidden rows of ``num_tokens`` tokens take in float32."""
    config = json.loads((model_folder / "config.json").read_text(encoding="utf-8"))
    of_keys = config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    return num_tokens * 4 * (2 * int(of_keys) + int(config["hidden_size"]))


def long_prompt_figures(arena: Arena) -> list[Figure]:
    """Memory of one long prompt, and the time of scoring it once more."""
    length = 256 if arena.options.is_smoke else LONG_LEN
    first, second = ({"prompts": prompts(arena.model_folder, 1, length, seed), "top": TOP} for seed in (1, 2))
    memory: dict[str, list[float]] = {}
    seconds: dict[str, list[float]] = {}

    def ask(contestant: Contestant, inputs: list[Any], **job: Any) -> dict[str, Any]:
        return arena.ask(contestant, "score", inputs, warm_up=len(inputs) - 1, **job)

    arena.close(OURS)  # its next job opens it with a pool of the right size
    for label, contestant in arena.labels(OURS, "transformers").items():
        options = {"kv_bytes": pool_bytes(arena.model_folder, length + 64)} if label == OURS else {}
        result = ask(contestant, [first, second], options=options)
        memory[label] = [result["peak_growth_bytes"] / MIB]
        seconds[label] = result["timings_s"]
    again = ask(arena.labels(OURS)[OURS], [second])["timings_s"]
    name = f"scoring a {length}-token prompt, top {TOP}"
    return [
        Figure(
            name=f"{name}: memory over the model",
            unit="MiB",
            better="lower",
            samples=memory,
            targets=[Target(at_most=100.0)],
        ),
        Figure(name=name, unit="s", better="lower", samples=seconds),
        Figure(
            name=f"{name}, once more",
            unit="s",
            better="lower",
            samples={OURS: again, "logprobe, first time": seconds[OURS]},
        ),
    ]


def main() -> None:
    """Run all figures."""
    options = parse_options(__doc__ or "")
    with Arena(options) as arena:
        figures = [rate_figure(arena)]
        arena.close("vllm")  # its reserved memory is wanted back
        figures += long_prompt_figures(arena)
    publish(Path(__file__).stem, figures, options)


if __name__ == "__main__":
    main()
