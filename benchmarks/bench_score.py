"""This measures prompt scoring: tokens a second on 512-token prompts, with the top 20 of each position.

Beside each contestant's rate stands the largest error of the log-probabilities that it gave the tokens of the
first round's prompts, against transformers' model in float64 (`precision.py`). On processors with AMX, or
with `--bfloat16`, our arithmetic `bf16x3` and the others in bfloat16, weights included, take part too.

It also measures what four labels to each of many texts cost beside scoring the texts once, and how far the
resident memory grows over the loaded model while an 8,000-token prompt is scored, and how long scoring the
same prompt again takes. The engine's pool for keys and values is part of the loaded model: it has just room
for one such prompt, and an earlier one has been through it.
"""

import json
import random
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import OURS, ROOT, Arena, Contestant, Figure, Options, Target, alternate, parse_options, publish
from precision import log_softmax, of_transformers
from prompts import prompts

from logprobe import LLM
from logprobe.text.windows import Window

TOP = 20
PROMPTS, PROMPT_LEN, LONG_LEN = 4, 512, 8000
NUM_TEXTS, TEXT_CHARS, MAX_ROUNDS = 1000, 200, 3
LABELS = (" positive", " negative", " neutral", " mixed")
MAX_TIMES = 1.15  # that labels may take, of what scoring the texts takes
MIB = 1 << 20
WANTED = (OURS, "vllm", "transformers")
SCORED = "scoring the texts once"


def rate_figures(arena: Arena) -> list[Figure]:
    """Prompt tokens a second, and the largest error of their log-probabilities."""
    count, length = (1, 64) if arena.options.is_smoke else (PROMPTS, PROMPT_LEN)

    def inputs(seed: int) -> list[dict[str, Any]]:
        return [{"prompts": prompts(arena.model_folder, count, length, seed), "top": TOP}]

    logprobs: dict[str, list[list[float]]] = {}  # of the first round's prompts

    def measure(label: str, contestant: Contestant, number: int) -> float:
        result = arena.ask_warm(contestant, "score", inputs, number)
        logprobs.setdefault(label, result["output"])
        seconds: float = result["timings_s"][0]
        return count * length / seconds

    labels = arena.labels(*WANTED, bfloat16=True)
    contestants = {label: partial(measure, label, one) for label, one in labels.items()}
    samples, notes = alternate(contestants, arena.options.rounds)
    cut = [Window(np.asarray(ids), 0, 1) for ids in inputs(0)[0]["prompts"]]
    (reference,) = of_transformers(arena.float_folder, torch.float64, cut, {"": log_softmax}).values()
    errors = {label: [float(np.abs(np.concatenate(logprobs[label]) - reference).max())] for label in samples}
    name = f"scoring, {length}-token prompts, top {TOP}"
    return [
        Figure(
            name=name,
            unit="tokens/s",
            better="higher",
            samples=samples,
            targets=[
                Target(against="vllm best", at_least=1.3),
                Target(against="transformers best", at_least=2.0),
                # Which of its two forms is faster depends on the machine; the lean one is always smaller.
                Target(against="transformers default", at_least=2.0),
            ],
            notes=[*notes, *arena.missing(*WANTED)],
        ),
        Figure(name=f"{name}: largest error", unit="nats", better="lower", samples=errors),
    ]


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
        options = (
            {"kv_cache_memory_bytes": pool_bytes(arena.model_folder, length + 64)} if label == OURS else {}
        )
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


def texts_of(count: int, name: str) -> list[str]:
    """Stretches of this repository's licence, none the beginning of another, each as a question."""
    chance = random.Random(name)  # noqa: S311 - no secrets are made here
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    starts = [chance.randrange(len(text) - TEXT_CHARS) for _ in range(count)]
    return [
        f"{name}.{row}: {text[start : start + TEXT_CHARS]}\nSentiment:" for row, start in enumerate(starts)
    ]


def labels_figure(options: Options) -> Figure:
    """Seconds for as many texts, labelled and scored; both begin with nothing cached."""
    count = 8 if options.is_smoke else NUM_TEXTS
    with LLM(options.model) as llm:

        def classify(texts: Sequence[str]) -> None:
            llm.classify(texts, LABELS)

        def score(texts: Sequence[str]) -> None:
            llm.score([("", text) for text in texts])

        def measure(call: Any, name: str, number: int) -> float:
            texts = texts_of(count, f"{name}{number}")
            llm.engine.forget_prefixes()
            began = time.perf_counter()
            call(texts)
            return time.perf_counter() - began

        for call in (classify, score):
            call(texts_of(8, "warm-up"))
        contestants = {OURS: partial(measure, classify, "a"), SCORED: partial(measure, score, "b")}
        samples, notes = alternate(contestants, min(options.rounds, MAX_ROUNDS))
    return Figure(
        name=f"{len(LABELS)} labels to each of {count} texts, classify beside score",
        unit="s",
        better="lower",
        samples=samples,
        targets=[Target(against=SCORED, at_least=round(1 / MAX_TIMES, 2))],
        notes=notes,
    )


def main() -> None:
    """Run all figures."""
    options = parse_options(__doc__ or "")
    with Arena(options) as arena:
        figures = rate_figures(arena)
        arena.close("vllm")  # its reserved memory is wanted back
        figures += long_prompt_figures(arena)
    figures.append(labels_figure(options))
    publish(Path(__file__).stem, figures, options)


if __name__ == "__main__":
    main()
