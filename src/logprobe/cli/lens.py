"""`logprobe lens`: what each layer of a model predicts after each token of a text."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from logprobe.cli.command import naming
from logprobe.cli.inputs import TextOption, source_of
from logprobe.cli.options import JsonOption, ModelFlags
from logprobe.cli.rows import info_dict, visible
from logprobe.cli.tables import print_facts, refuse_vocabulary, table
from logprobe.errors import require

if TYPE_CHECKING:
    from logprobe.analysis.lens import LogitLens
    from logprobe.llm import LLM

_lens = partial(typer.Option, rich_help_panel="Logit lens")
DEFAULT_COLUMNS: Final = 7  # layers of the printed table, if none are named


def lens(
    file: Annotated[str | None, typer.Argument(help="Text file; -: standard input.")] = None,
    *,
    text: TextOption = None,
    layers: Annotated[
        str | None,
        _lens(
            help="Layer numbers separated by commas: 0 is the embedding, n the output of layer n, -1 the "
            "last; or `last`. Default: all in JSON and plots, some in the table."
        ),
    ] = None,
    top: Annotated[
        int, _lens(help="Most likely tokens per layer, after the last token (with --json, after each).")
    ] = 5,
    plot: Annotated[Path | None, _lens(help="Save a plot (.png, .svg or .pdf; extra plot).")] = None,
    as_json: JsonOption = False,
    model: ModelFlags,
) -> None:
    """Print what each layer of the model predicts after each token of a text (logit lens).

    A layer's prediction is the output head applied to the final norm of the layer's hidden state; the last
    layer's prediction is the model's own. The table has a line per token and a column per layer, with the
    layer's most likely next token. Below it, each layer's predictions after the last token are listed, with
    probabilities, entropies in nats, and the rank of the model's own choice.

    Examples:
        logprobe lens --text "The capital of France is"
        logprobe lens story.txt --layers 0,10,20,-1 --json
        logprobe lens --text "The capital of France is" --plot lens.png
    """
    refuse_vocabulary(top, "--top")
    require(top >= 1 or top == -1, "top", f"must be 1 or more, or -1 (whole vocabulary), got {top}")
    numbers = None if layers is None else _numbers(layers)
    source = source_of(file, text)
    with model.open() as llm:
        if numbers is None and not (as_json or plot):
            numbers = _spread(llm)
        with naming(text="--text", layers="--layers", prompt_logprobs="--top"):
            result = llm.logit_lens("".join(source.parts), numbers, logprobs=top)
        if plot is not None:
            result.plot().save(plot)
        if as_json:
            typer.echo(json.dumps(result.to_dict() | {"info": info_dict(llm, result.info)}))
        elif plot is None:
            _print_table(result)


def _numbers(layers: str) -> list[int] | Literal["last"]:
    if layers == "last":
        return "last"
    try:
        return [int(layer) for layer in layers.split(",")]
    except ValueError as error:
        raise typer.BadParameter(
            f"must be 'last' or layer numbers separated by commas, got {layers!r}", param_hint="--layers"
        ) from error


def _spread(llm: LLM) -> list[int] | None:
    """Return evenly spaced layers for the table; None if the engine has no layers."""
    shape = llm.engine.capabilities().shape
    if shape is None:
        return None
    last = shape.num_layers
    return sorted({round(last * step / (DEFAULT_COLUMNS - 1)) for step in range(DEFAULT_COLUMNS)})


def _print_table(result: LogitLens) -> None:
    def shown(token_id: int) -> str:
        return visible([*result.table.token_bytes(token_id)])

    tops = [record.top_entries() for record in result.records]
    header = ["#", "token", *(f"layer {layer}" for layer in result.layers)]
    lines = [
        [str(position), shown(token_id), *(shown(int(top.token_ids[top.offsets[position]])) for top in tops)]
        for position, token_id in enumerate(result.token_ids)
    ]
    typer.echo(table([header, *lines], is_left=[False, *[True] * (len(header) - 1)]))
    typer.echo()
    own = shown(result.targets[-1])
    details = [["layer", f"rank of {own}", "entropy", "most likely after the last token"]]
    for index, layer in enumerate(result.layers):
        likely = "  ".join(
            f"{json.dumps(text, ensure_ascii=False)} {share:.3f}" for text, share in _shares(result, layer)
        )
        rank, entropy = result.ranks[index, -1], result.entropy[index, -1]
        details.append([str(layer), str(rank), f"{entropy:.3f}", likely])
    print_facts(details)


def _shares(result: LogitLens, layer: int) -> list[tuple[str, float]]:
    return [(text, math.exp(logprob)) for text, logprob in result.top(layer, -1)]
