"""Print the table of docs/deploy.md, Sizing: KV cache memory per token, and tokens per second per core."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from report import newest_results

FLOAT32_BYTES: Final = 4
OURS: Final = "logprobe"


class Model(NamedTuple):
    """Configuration of a model, and the names of its figures in the results."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    bench: str = ""  # of benchmarks/results
    prefix: str = ""  # of its figures there

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in the KV cache: keys and values of each layer, and the final hidden state."""
        keys_and_values = 2 * self.num_layers * self.num_kv_heads * self.head_dim
        return (keys_and_values + self.hidden_size) * FLOAT32_BYTES


LLAMA_1B: Final = "bench_real --model llama-1b"
MODELS: Final = (
    Model("smollm2 (135 million)", 30, 3, 64, 576, "bench_decode"),
    Model("gemma3-270m", 18, 1, 256, 640, "bench_decode --model gemma3-270m"),
    Model("Llama 3.2 1B (random weights), bfloat16", 16, 8, 64, 2048, LLAMA_1B, "bfloat16, 2,472 MB: "),
    Model("Llama 3.2 1B (random weights), Q8_0", 16, 8, 64, 2048, LLAMA_1B, "q8_0, 1,317 MB: "),
    Model("Llama 3.1 8B", 32, 8, 128, 4096),
)
ASKED: Final = {
    "one at a time": "decode, batch 1, logprobs 20",
    "32 at once": "decode, batch 32, logprobs 20",
    "prompts of 512": "prompts of 512 tokens, top 20",
}


def per_core(results: Mapping[str, Mapping[str, Any]], model: Model, figure: str) -> str:
    """Return the tokens per second per core of the newest run, or - if they were not measured."""
    found = results.get(model.bench)
    if found is None:
        return "-"
    spreads = {one["name"]: one["spreads"] for one in found["figures"]}.get(model.prefix + figure)
    return "-" if spreads is None else f"{spreads[OURS]['median'] / found['machine']['cores']:.0f}"


def table() -> str:
    """Return the table, with one row per model."""
    results = newest_results()
    heads = ["model", "KV cache per token", "tokens per GiB of KV cache", *ASKED]
    rows = [
        [
            model.name,
            f"{model.token_bytes / 1000:.0f} kB",
            f"{2**30 // model.token_bytes:,}",
            *(per_core(results, model, figure) for figure in ASKED.values()),
        ]
        for model in MODELS
    ]
    lines = [f"| {' | '.join(row)} |" for row in (heads, *rows)]
    return "\n".join([lines[0], "|---" * len(heads) + "|", *lines[1:]]) + "\n"


if __name__ == "__main__":
    sys.stdout.write(table())
