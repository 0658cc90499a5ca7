"""`logprobe uncertainty`: sample answers to a prompt and measure their agreement."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from logprobe.cli.generate import (
    DEFAULTS,
    MaxTokensOption,
    PromptArgument,
    SeedOption,
    StopOption,
    TemperatureOption,
    TopKOption,
    TopPOption,
)
from logprobe.cli.inputs import STDIN, read_text
from logprobe.cli.options import DEFAULT_MODEL, JsonOption, ModelOption, flags_for, open_llm, takes_engine
from logprobe.cli.tables import print_facts, table
from logprobe.sampling import SamplingParams

if TYPE_CHECKING:
    from logprobe.analysis import Uncertainty

_N = Annotated[int, typer.Option("--n", help="Number of answers to sample.")]
_Window = Annotated[
    int | None, typer.Option(help="Tokens per group for group confidences; by default 2,048.")
]
_K = Annotated[
    int | None, typer.Option("--k", help="Most likely tokens per token confidence; by default 20.")
]
_StopBelow = Annotated[
    float | None, typer.Option(help="Stop an answer once its group confidence falls below this, in nats.")
]
_SelfCertainty = Annotated[
    bool,
    typer.Option("--self-certainty", help="Also compute self-certainty; scores each answer a second time."),
]


@takes_engine
def uncertainty(
    prompt: PromptArgument,
    *,
    n: _N = 10,
    max_tokens: MaxTokensOption = DEFAULTS.max_tokens,
    temperature: TemperatureOption = DEFAULTS.temperature,
    seed: SeedOption = None,
    top_p: TopPOption = DEFAULTS.top_p,
    top_k: TopKOption = DEFAULTS.top_k,
    stop: StopOption = None,
    window: _Window = None,
    k: _K = None,
    stop_below: _StopBelow = None,
    self_certainty: _SelfCertainty = False,
    model: ModelOption = DEFAULT_MODEL,
    as_json: JsonOption = False,
    **engine: Any,
) -> None:
    """Sample answers to a prompt and measure their agreement.

    The measures use the exact probabilities of the answers. Answers with the same text, up to surrounding
    whitespace, are one line: their share of the total probability of the sampled answers, how often they
    were sampled, and their most likely form with its logprob. Entropies are in nats, of the sampling
    distribution. --json includes the values of every answer.
    """
    from logprobe.analysis.uncertainty import WINDOW, K, LowConfidence, draw_plan

    with flags_for(threshold="--stop-below"):
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            top_p=top_p,
            top_k=top_k,
            stop=tuple(stop or ()),
        )
        rule = None
        if stop_below is not None:
            given = {"window": WINDOW if window is None else window, "k": K if k is None else k}
            rule = LowConfidence(threshold=stop_below, **given)
        asked: dict[str, Any] = {
            "stop_when": rule,
            "window": window,
            "k": k,
            "self_certainty": self_certainty,
        }
        draw_plan(n, params, **asked)  # validate before loading a model
    text = read_text(prompt) if prompt == STDIN else prompt
    with open_llm(model, **engine) as llm, flags_for(prompt="PROMPT"):
        found = llm.uncertainty(text, n, params, progress=True, **asked)
    if as_json:
        typer.echo(json.dumps({"prompt": text, **found.to_dict()}, ensure_ascii=False))
    else:
        _print(found)


def _print(found: Uncertainty) -> None:
    lines = [["answer", "share", "draws", "logprob"]]
    for places, share in zip(found.semantic_sets, found.shares, strict=True):
        best = max((found.answers[place] for place in places), key=lambda answer: answer.drawn_logprob)
        lines.append([f"{best.text!r:.60}", f"{share:.4f}", str(len(places)), f"{best.logprob:.4f}"])
    typer.echo(table(lines, is_left=[True, False, False, False]))
    typer.echo()
    ended = [
        ["semantic entropy", f"{found.semantic_entropy:.4f} nats"],
        ["by counts", f"{found.discrete_semantic_entropy:.4f} nats"],
        ["sequence entropy", f"{found.monte_carlo_sequence_entropy:.4f} nats"],
        ["per token", f"{found.monte_carlo_normalized_sequence_entropy:.4f} nats"],
        ["probability mass", f"{found.mass:.4g}"],
    ]
    early = sum(answer.stopped_early for answer in found.answers)
    stopped = [["stopped early", f"{early} of {len(found.answers)}"]]
    print_facts([*(ended if found.semantic_sets else []), *(stopped if early else [])])
