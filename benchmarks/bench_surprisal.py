"""This measures the surprisals of many sentences at once, as studies of reading times ask for them."""

import random
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from harness import OURS, Arena, Contestant, Figure, Target, alternate, parse_options, publish

NUM_SENTENCES = 64
WANTED = (OURS, "minicons", "surprisal")
SUBJECTS = (
    "The keys to the cabinet",
    "A sailor on the pier",
    "The authors that the critic praised",
    "Nobody",
)
VERBS = ("were lying", "was found", "had been seen", "have often been mentioned", "stood")
PLACES = ("on the old table", "near the lighthouse at night", "in a letter from the north", "by the window")
ENDS = ("before anyone noticed.", "while it rained.", "and that was all.", "as the paper said on Monday.")


def sentences(arena: Arena, seed: int) -> list[dict[str, Any]]:
    """One call: sentences of which no two are the same, and none is another call's."""
    chance = random.Random(seed)  # noqa: S311 - no secrets are made here
    count = 4 if arena.options.is_smoke else NUM_SENTENCES
    parts = (SUBJECTS, VERBS, PLACES, ENDS)
    texts = [
        f"{chance.randrange(10_000)} times: {' '.join(chance.choice(part) for part in parts)}"
        for _ in range(count)
    ]
    return [{"texts": texts}]


def gpt2_shaped(folder: Path, arena: Arena) -> Path:
    """GPT-2's smallest shape with weights drawn at random, and the default model's vocabulary."""
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, set_seed

    tokenizer = AutoTokenizer.from_pretrained(arena.model_folder)
    set_seed(0)
    small = {"n_layer": 2, "n_head": 2, "n_embd": 64} if arena.options.is_smoke else {}
    special = {"bos_token_id": tokenizer.eos_token_id, "eos_token_id": tokenizer.eos_token_id}
    GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **special, **small)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def figure(arena: Arena, shape: str) -> Figure:
    """Sentences a second, and the largest difference between the contestants' sums."""
    sums: dict[str, list[float]] = {}
    inputs = partial(sentences, arena)

    def measure(label: str, contestant: Contestant, number: int) -> float:
        result = arena.ask_warm(contestant, "surprisals", inputs, number)
        sums[label] = result["output"]
        return len(result["output"]) / float(result["timings_s"][0])

    contestants = {label: partial(measure, label, one) for label, one in arena.labels(*WANTED).items()}
    samples, notes = alternate(contestants, arena.options.rounds)
    apart = {
        label: max(abs(a - b) for a, b in zip(sums[label], sums[OURS], strict=True))
        for label in samples
        if label != OURS
    }
    told = [f"{label}: sentence sums within {value:.1e} nats of ours" for label, value in apart.items()]
    return Figure(
        name=f"surprisals of {len(sums[OURS])} sentences, {shape}",
        unit="sentences/s",
        better="higher",
        samples=samples,
        targets=[Target(against=f"{name} best", at_least=3.0) for name in WANTED[1:]],
        notes=[*notes, *arena.missing(*WANTED), *told],
    )


def main() -> None:
    """Run the figure on both models."""
    options = parse_options(__doc__ or "")
    with Arena(options) as arena, tempfile.TemporaryDirectory() as folder:
        figures = [figure(arena, options.model)]
        shaped = gpt2_shaped(Path(folder), arena)
        with Arena(replace(options, model=str(shaped))) as other:
            figures.append(figure(other, "GPT-2's shape"))
    publish(Path(__file__).stem, figures, options)


if __name__ == "__main__":
    main()
