"""Prompts of exact lengths, made of real text, no two of which share a first token."""

import random
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@cache
def corpus(model_folder: Path) -> list[int]:
    """Token ids of this repository's licence and readme, in the model's own vocabulary."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    text = "\n".join((ROOT / name).read_text(encoding="utf-8") for name in ("LICENSE", "README.md"))
    token_ids: list[int] = tokenizer.encode(text).ids
    return token_ids


def prompts(model_folder: Path, count: int, length: int, seed: int) -> list[list[int]]:
    """Stretches of the corpus, each after a first token of its own, so that no cache can help."""
    text = corpus(model_folder)
    generator = random.Random(seed)  # noqa: S311 - no secrets are made here
    first_ids = generator.sample(sorted(set(text)), count)
    starts = [generator.randrange(len(text)) for _ in range(count)]
    repeated = text * (2 + length // len(text))
    return [[first, *repeated[at : at + length - 1]] for first, at in zip(first_ids, starts, strict=True)]
