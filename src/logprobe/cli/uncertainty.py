"""`logprobe uncertainty`: sample answers to a prompt and measure their agreement."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from logprobe.cli.command import naming
from logprobe.cli.generate import PromptArgument, SamplingFlags
from logprobe.cli.inputs import STDIN, read_text
from logprobe.cli.options import JsonOption, ModelFlags
from logprobe.cli.tables import print_facts, table
from logprobe.sampling import SamplingParams

if TYPE_CHECKING:
    from logprobe.analysis import Uncertainty

_measure = partial(typer.Option, rich_help_panel="Confidence")


def uncertainty(
    prompt: PromptArgument,
    *,
    n: Annotated[int, _measure("--n", help="Number of answers to sample.")] = 10,
    window: Annotated[
        int | None, _measure(help="Tokens per group for the group confidence; by default 2,048.")
    ] = None,
    k: Annotated[
        int | None,
        _measure("--k", help="Number of likeliest tokens for a token's confidence; by default 20."),
    ] = None,
    stop_below: Annotated[
        float | None, _measure(help="Stop an answer once its group confidence falls below this, in nats.")
    ] = None,
    self_certainty: Annotated[
        bool,
        _measure("--self-certainty", help="Also compute self-certainty; scores each answer a second time."),
    ] = False,
    as_json: JsonOption = False,
    sampling: SamplingFlags,
    model: ModelFlags,
) -> None:
    """Sample answers to a prompt and measure their agreement.

    The measures use the exact probabilities of the answers. Answers whose texts are equal up to surrounding
    whitespace share one line, with their most likely form, their part of the probability of all sampled
    answers, how often they were sampled, and the logprob of the most likely form. Entropies (nats) are those
    of the sampling distribution. --json includes the values of every answer.

    Examples:
        logprobe uncertainty "Q: What is the capital of France? A:" --n 20 --max-tokens 8 --stop .
    """
    from logprobe.analysis.uncertainty import WINDOW, K, LowConfidence, draw_plan

    params = SamplingParams(**vars(sampling))
    rule = None
    if stop_below is not None:
        with naming(threshold="--stop-below"):
            rule = LowConfidence(
                threshold=stop_below, window=WINDOW if window is None else window, k=K if k is None else k
            )
    asked: dict[str, Any] = {"stop_when": rule, "window": window, "k": k, "self_certainty": self_certainty}
    draw_plan(n, params, **asked)  # validate before loading a model
    text = read_text(prompt) if prompt == STDIN else prompt
    with model.open() as llm:
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
