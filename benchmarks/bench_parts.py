"""This measures the parts of a step beside torch's: products and norm of a layer, and the ways of attention.

The products of one decoder layer on panels of weights (ours) and on plain ones, and the layer's norm.
Attention: a span of new tokens on its context in one layer, by the way that the engine takes (ours) and by
each of the three that there are. All take turns in this process.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_processors import ms_of
from harness import OURS, Figure, Measure, Options, alternate, parse_options, publish

from logprobe.engine.forward.cpu.attention import Chunk, is_short
from logprobe.engine.forward.cpu.linear import Linear
from logprobe.engine.forward.kv_cache import KVPool
from logprobe.engine.forward.torch.transformers_attention import TensorPlan, attend
from logprobe.kernels.attention.api import RowPlanBuilder, ScoreRule
from logprobe.kernels.layers.forms import pack_floats
from logprobe.kernels.layers.rows import norm_stage
from logprobe.models import load_model, resolve

PLAIN = "plain torch"
ROWS = (1, 8, 32, 512)  # of one product
SPANS = ((1, 50), (8, 50), (32, 50), (1, 500), (8, 500), (16, 500), (32, 500), (512, 2000))
CALLS = 20


def figure(name: str, contestants: dict[str, Measure], rounds: int) -> Figure:
    """Milliseconds of each contestant."""
    samples, notes = alternate(contestants, rounds)
    return Figure(name=name, unit="ms", better="lower", samples=samples, notes=notes)


def layer_figures(model: Any, options: Options) -> list[Figure]:
    """The products of a decoder layer, and its norm, by number of rows."""
    layer = model.get_decoder().layers[0]
    plain = [module for module in layer.modules() if type(module) is torch.nn.Linear]
    panels = [Linear([pack_floats(linear.weight)]) for linear in plain]
    norm = layer.input_layernorm
    figures = []
    for rows in ROWS[:2] if options.is_smoke else ROWS:
        inputs = [torch.randn(rows, linear.in_features) for linear in plain]

        def products(linears: Sequence[Any], inputs: list[torch.Tensor] = inputs) -> None:
            for linear, x in zip(linears, inputs, strict=True):
                linear(x)

        measures = {OURS: partial(products, panels), PLAIN: partial(products, plain)}
        x = torch.randn(rows, model.config.hidden_size)
        norms = {
            OURS: norm_stage(x, norm.weight, torch.empty_like(x), model.config.rms_norm_eps).run,
            PLAIN: partial(norm, x),
        }
        for part, calls in (("products", measures), ("norm", norms)):
            timed: dict[str, Measure] = {name: partial(ms_of, call, CALLS) for name, call in calls.items()}
            figures.append(figure(f"{part} of one decoder layer, {rows} rows", timed, options.rounds))
    return figures


def ways(config: Any, num_tokens: int, context: int) -> dict[str, Measure]:
    """One layer's attention of the last tokens of a context, by each way."""
    kv_heads, heads = config.num_key_value_heads, config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    pool, slots = KVPool(context), torch.arange(context)
    pool.store(0, slots, torch.randn(context, kv_heads, width), torch.randn(context, kv_heads, width))
    query, rule = torch.randn(num_tokens, heads, width), ScoreRule(width**-0.5)
    rows = RowPlanBuilder()
    rows.add(0, context - num_tokens, slots.int().numpy())
    chunks = [Chunk(0, num_tokens, slots)]
    plans = {
        "row kernel": TensorPlan(pool, slots, [], rows.build(), uses_kernels=True),
        "chunk kernel": TensorPlan(pool, slots, chunks, None, uses_kernels=True),
        "torch's fused attention": TensorPlan(pool, slots, chunks, None, uses_kernels=False),
    }
    plans = {OURS: plans["row kernel" if is_short(num_tokens, context) else "chunk kernel"], **plans}
    return {
        name: partial(ms_of, partial(attend, plan, 0, query, rule), CALLS) for name, plan in plans.items()
    }


def main() -> None:
    """Run all figures."""
    options = parse_options(__doc__ or "")
    model = load_model(resolve(options.model), dtype=torch.float32)
    with torch.inference_mode():
        figures = layer_figures(model, options)
        for num_tokens, context in SPANS[:2] if options.is_smoke else SPANS:
            name = f"attention of {num_tokens} tokens on a context of {context}"
            figures.append(figure(name, ways(model.config, num_tokens, context), options.rounds))
    publish(Path(__file__).stem, figures, options)


if __name__ == "__main__":
    main()
