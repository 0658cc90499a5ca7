"""What the tests of evaluation tools compare with, and the files that they read."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    """A file of JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@cache
def _loaded(folder: Path) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    return model, AutoTokenizer.from_pretrained(folder)


def surprisals(folder: Path, text: str, *, before: str = "") -> list[float]:
    """Of a text's tokens but the first, by transformers in float64; nats.

    After another text it is that text's white space at the end, and each token of its own.
    """
    import torch

    model, tokenizer = _loaded(folder)
    stripped = before.rstrip()
    own = tokenizer.encode(before[len(stripped) :] + text)
    context = tokenizer.encode(stripped) if stripped else own[:1]
    ids = torch.tensor([[*context, *(own if stripped else own[1:])]])
    with torch.inference_mode():
        logprobs = model(ids).logits[0, :-1].log_softmax(-1)
    chosen = logprobs.gather(-1, ids[0, 1:, None])[:, 0]
    return [-float(value) for value in chosen[len(context) - 1 :]]
