"""Measure how far log-probabilities of a long text, and their sum, are from float64.

The default model scores a text in windows, each token once. The reference is transformers' model in float64
over the same windows, so that what lies outside a window causes no difference. Rows of the tables:
- transformers' model in float32, and its logits with other log-softmaxes;
- this library, also with the arithmetic `bf16x3`, which is emulated on processors without AMX;
- transformers' model in float64 with float32 storage: the output of each module is rounded to float32, with
  all arithmetic exact. An engine that stores its values in float32 cannot be expected to be more accurate;
- transformers' model in float64 with exact rotary angles. Its angles are float32 whatever its dtype (the
  product of a position and a float32 frequency, rounded to float32), and this library uses the same ones. The
  row shows what that convention changes, which is no rounding error of an engine.
The second table is the largest error by the token's position. docs/scoring.md shows both; a run takes about
10 minutes. The text is the beginning of Shakespeare's Coriolanus (public domain).
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

TEXT = Path(__file__).resolve().parent / "texts" / "coriolanus.txt"
NUM_TOKENS, WINDOW = 8192, 8192
RANGE = 1024  # positions of a column of the second table
ROWS = 256  # of logits that are held at once
KV_BYTES = 1 << 29
STORING = ("layernorm", "norm", "_proj", "act_fn", "self_attn", "mlp", "lm_head")  # and each layer
EXACT = "transformers, float64, exact angles"
STORED = "transformers, float64, float32 storage"


def log_softmax(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """As a program that calls torch's on the logits as they are."""
    return logits.log_softmax(-1).gather(1, chosen[:, None])[:, 0]


def in_float64(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """The same logits, all else in float64."""
    return log_softmax(logits.double(), chosen)


def extracted(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """The same logits through our kernel."""
    return torch.from_numpy(extract(logits, chosen.to(torch.int32), 0).logprobs[:, 0])


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


def use_exact_angles(model: Any) -> None:
    """Make a model compute rotary angles in float64."""
    rotary = model.model.rotary_emb
    rotary.forward = partial(exact_angles, rotary)


def store_in_float32(model: Any) -> None:
    """Round the output of each module of a model to float32."""

    def round_output(_module: Any, _inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (output[0].float().double(), *output[1:])
        return output.float().double()

    for name, module in model.named_modules():
        if name.endswith(STORING) or name.rpartition(".")[2].isdigit():
            module.register_forward_hook(round_output)


@torch.inference_mode()
def of_transformers(
    folder: Path,
    dtype: torch.dtype,
    cut: list[Window],
    ways: dict[str, Normalise],
    *,
    change: Callable[[Any], None] | None = None,
) -> dict[str, Array]:
    """Return the log-probabilities of all scored tokens, in nats, by each log-softmax of `ways`."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    if change is not None:
        change(model)
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in ways}
    for window in cut:
        for logits, chosen in rows_of(model, window):
            for name, normalise in ways.items():
                parts[name].append(normalise(logits, chosen).double())
    return {name: torch.cat(values).numpy() for name, values in parts.items()}


def of_ours(cut: list[Window], **settings: Any) -> Array:
    """The same by this library."""
    with LLM(DEFAULT_MODEL, kv_cache_memory_bytes=KV_BYTES, **settings) as llm:
        scores = llm.score([window.pair for window in cut])
    return np.concatenate([np.asarray(score.token_logprobs, np.float64) for score in scores])


def measure(text: str, num_tokens: int, window: int) -> dict[str, Any]:
    """What each way's numbers differ by from the reference, nats."""
    with LLM(DEFAULT_MODEL, kv_cache_memory_bytes=KV_BYTES) as llm:
        ids = llm.text.encode(text, add_special_tokens=False)[:num_tokens]
    cut = list(windows([ids], window, window // 2))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "float32"
        export_model(resolve(DEFAULT_MODEL), folder, dtype="float32")
        (reference,) = of_transformers(folder, torch.float64, cut, {"": log_softmax}).values()
        ways = {
            "transformers, float32": log_softmax,
            "… its logits, the rest in float64": in_float64,
            "… its logits, the rest by our kernel": extracted,
        }
        found = of_transformers(folder, torch.float32, cut, ways)
        changed = {}
        for name, change in ((STORED, store_in_float32), (EXACT, use_exact_angles)):
            changed |= of_transformers(folder, torch.float64, cut, {name: log_softmax}, change=change)
    found["logprobe"] = of_ours(cut)
    found["logprobe, bf16x3"] = of_ours(cut, arithmetic="bf16x3")
    found["logprobe, weights plain"] = of_ours(cut, weights="plain")
    found |= changed
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
    parser.add_argument("text", nargs="?", type=Path, default=TEXT)
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS)
    parser.add_argument("--window", type=int, default=WINDOW)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    measured = measure(given.text.read_text(encoding="utf-8"), given.tokens, given.window)
    if given.json:
        print(json.dumps(measured | {"machine": machine_facts()}))
    else:
        print(*lines(measured), sep="\n")


if __name__ == "__main__":
    main()
