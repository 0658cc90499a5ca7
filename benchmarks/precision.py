"""How far log-probabilities of a long text, and their sum, are from float64: ours and transformers' own.

The default model scores some tokens of a text in windows, each token once. The reference is transformers'
model in float64 over the same windows, so that what a window cannot see is no part of the difference. Beside
it are transformers' model in float32, its logits with other log-sum-exps, and ours; the second table is the
largest difference by the token's position.

Rotary angles are float32 in transformers' model whatever its dtype: the product of a position and a float32
frequency, rounded to float32. Our decoder uses the same ones. The last line of each table replaces these
alone by exact ones, in float64: what that convention changes is no rounding error of an engine.
docs/scoring.md shows the tables; the reference takes minutes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from machine import machine_facts
from transformers import AutoModelForCausalLM

from logprobe import LLM
from logprobe.kernels import extract
from logprobe.models import resolve
from logprobe.models.export import export_model
from logprobe.models.known import DEFAULT_MODEL
from logprobe.text.windows import windows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from logprobe.text.windows import Window

    Array = np.ndarray[Any, np.dtype[np.float64]]
    Normalise = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

DOCS = Path(__file__).resolve().parents[1] / "docs"
NUM_TOKENS, WINDOW = 8192, 8192
RANGE = 1024  # positions of a column of the second table
ROWS = 256  # of logits that are held at once
KV_BYTES = 1 << 29
EXACT = "transformers, float64, exact angles"


def log_softmax(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """As a program that calls torch's on the logits as they are."""
    return logits.log_softmax(-1).gather(1, chosen[:, None])[:, 0]


def in_float64(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """The same logits, all else in float64."""
    return log_softmax(logits.double(), chosen)


def extracted(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """The same logits through our kernel."""
    return extract(logits, chosen.to(torch.int32), 0).logprobs[:, 0]


def rows_of(model: Any, window: Window) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Logits of some scored tokens after the other, and the tokens."""
    ids = torch.from_numpy(window.token_ids.astype(np.int64))
    hidden = model.model(ids[None]).last_hidden_state[0, window.first_scored - 1 : -1]
    for rows, chosen in zip(hidden.split(ROWS), ids[window.first_scored :].split(ROWS), strict=True):
        yield model.lm_head(rows), chosen


def exact_angles(rotary: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cosines and sines of a position times a float32 frequency, all in float64."""
    angles = position_ids[..., None].double() * rotary.inv_freq.double()
    angles = torch.cat((angles, angles), dim=-1)
    return tuple((part * rotary.attention_scaling).to(x.dtype) for part in (angles.cos(), angles.sin()))


@torch.inference_mode()
def of_transformers(
    folder: Path,
    dtype: torch.dtype,
    cut: list[Window],
    ways: dict[str, Normalise],
    *,
    has_exact_angles: bool = False,
) -> dict[str, Array]:
    """The log-probabilities of all scored tokens, nats, each way."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    if has_exact_angles:
        rotary = model.model.rotary_emb
        rotary.forward = partial(exact_angles, rotary)
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in ways}
    for window in cut:
        for logits, chosen in rows_of(model, window):
            for name, normalise in ways.items():
                parts[name].append(normalise(logits, chosen).double())
    return {name: torch.cat(values).numpy() for name, values in parts.items()}


def of_ours(cut: list[Window], **settings: Any) -> Array:
    """The same by this library."""
    with LLM(DEFAULT_MODEL, kv_bytes=KV_BYTES, **settings) as llm:
        scores = llm.score([window.pair for window in cut])
    return np.concatenate([np.asarray(score.token_logprobs, np.float64) for score in scores])


def measure(text: str, num_tokens: int, window: int) -> dict[str, Any]:
    """What each way's numbers differ by from the reference, nats."""
    with LLM(DEFAULT_MODEL, kv_bytes=KV_BYTES) as llm:
        ids = llm.text.encode(text, add_special_tokens=False)[:num_tokens]
    cut = list(windows([ids], window, window // 2))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "float32"
        export_model(resolve(DEFAULT_MODEL), folder, dtype=torch.float32)
        (reference,) = of_transformers(folder, torch.float64, cut, {"": log_softmax}).values()
        ways = {
            "transformers, float32": log_softmax,
            "… its logits, the rest in float64": in_float64,
            "… its logits, the rest by our kernel": extracted,
        }
        found = of_transformers(folder, torch.float32, cut, ways)
        exact = of_transformers(folder, torch.float64, cut, {EXACT: log_softmax}, has_exact_angles=True)
    found["logprobe"] = of_ours(cut)
    found["logprobe, weights plain"] = of_ours(cut, weights="plain")
    found |= exact
    positions = np.concatenate([np.arange(one.first_scored, len(one.token_ids)) for one in cut])
    return {
        "num_scored": len(reference),
        "logprob": float(reference.sum()),
        "range": RANGE,
        "differences": {name: figures(values - reference, positions) for name, values in found.items()},
    }


def figures(differences: Array, positions: np.ndarray[Any, np.dtype[np.int64]]) -> dict[str, Any]:
    """Of the sum, of a token, and the largest by position."""
    ranges = positions // RANGE
    worst = [float(np.abs(differences[ranges == one]).max(initial=0.0)) for one in range(ranges.max() + 1)]
    return {
        "worst_by_position": worst,
        "sum": float(differences.sum()),
        "mean": float(differences.mean()),
        "deviation": float(differences.std()),
        "worst": float(np.abs(differences).max()),
    }


def lines(measured: dict[str, Any]) -> Iterator[str]:
    """The table."""
    yield f"{measured['num_scored']:,} tokens, {measured['logprob']:,.1f} nats; from float64, nats:"
    yield f"{'':40}{'sum':>10}{'mean':>10}{'deviation':>11}{'worst':>10}"
    for name, values in measured["differences"].items():
        yield (
            f"{name:40}{values['sum']:>+10.1e}{values['mean']:>+10.1e}{values['deviation']:>11.1e}"
            f"{values['worst']:>10.1e}"
        )
    num_ranges = max(len(values["worst_by_position"]) for values in measured["differences"].values())
    starts = "".join(f"{RANGE * one:>9,}" for one in range(num_ranges))
    yield f"\n{'largest of the positions from':40}{starts}"
    for name, values in measured["differences"].items():
        yield f"{name:40}" + "".join(f"{worst:>9.1e}" for worst in values["worst_by_position"])


def main() -> None:
    """Measure, and print the table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("text", nargs="*", type=Path, help="files; the pages of docs/ by default")
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS)
    parser.add_argument("--window", type=int, default=WINDOW)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    text = "\n".join(path.read_text(encoding="utf-8") for path in given.text or sorted(DOCS.glob("*.md")))
    measured = measure(text, given.tokens, given.window)
    if given.json:
        print(json.dumps(measured | {"machine": machine_facts()}))
    else:
        print(*lines(measured), sep="\n")


if __name__ == "__main__":
    main()
