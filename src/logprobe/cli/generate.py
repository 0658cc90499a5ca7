"""`logprobe generate`: generate a completion, with log-probabilities of its tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from logprobe.cli.inputs import STDIN, read_text
from logprobe.cli.options import JsonOption, ModelFlags
from logprobe.cli.rows import info_dict, token_rows, totals
from logprobe.cli.shade import CompletionPrinter, can_shade, legend
from logprobe.cli.tables import console, print_tokens, refuse_vocabulary
from logprobe.sampling import SamplingParams

if TYPE_CHECKING:
    from logprobe.engine.request import RequestOutput
    from logprobe.llm import LLM

DEFAULTS = SamplingParams()
_sampling = partial(typer.Option, rich_help_panel="Sampling")

PromptArgument = Annotated[str, typer.Argument(help="Text to continue; -: standard input.")]
TemperatureOption = Annotated[float, _sampling(help="Sampling temperature; 0: greedy decoding.")]
SeedOption = Annotated[int | None, _sampling(help="Seed for sampling, for reproducible results.")]


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """Sampling parameters, as in `SamplingParams`."""

    max_tokens: Annotated[int | None, _sampling(help="Maximum number of tokens to generate.")] = (
        DEFAULTS.max_tokens
    )
    temperature: TemperatureOption = DEFAULTS.temperature
    seed: SeedOption = None
    top_p: Annotated[
        float, _sampling(help="Sample from the smallest set of tokens with this total probability.")
    ] = DEFAULTS.top_p
    top_k: Annotated[int, _sampling(help="Sample from the k most likely tokens; 0: all.")] = DEFAULTS.top_k
    stop: Annotated[tuple[str, ...], _sampling(help="Stop before this text; repeatable.")] = ()


def generate(
    prompt: PromptArgument,
    *,
    logprobs: Annotated[
        int | None,
        typer.Option(help="Alternatives to print per token; 0: the token only, -1: the whole vocabulary."),
    ] = None,
    as_json: JsonOption = False,
    sampling: SamplingFlags,
    model: ModelFlags,
) -> None:
    """Generate a completion of a prompt.

    --logprobs also prints the logprob and the alternatives of each token. The text is printed as it is
    generated; Ctrl-C stops the generation and keeps the text so far (exit code 130). Logprobs and entropies
    are in nats, from the model's raw distribution, before temperature and truncation.

    Examples:
        logprobe generate "The capital of France is" --max-tokens 12 --temperature 0 --logprobs 5
        logprobe generate - --seed 1 --json < prompt.txt
    """
    params = SamplingParams(logprobs=logprobs, entropy=logprobs is not None, **vars(sampling))
    refuse_vocabulary(logprobs, "--logprobs")
    text = read_text(prompt) if prompt == STDIN else prompt
    screen = console()
    with model.open() as llm:
        is_shaded = logprobs is not None and can_shade(screen)
        printer = CompletionPrinter(llm, params, None if as_json else screen, is_shaded=is_shaded)
        printer.run(text)
        if printer.output is not None:
            _print(llm, printer.output, logprobs, as_json=as_json, is_shaded=is_shaded)
    if printer.is_interrupted:
        raise typer.Exit(130)


def _print(llm: LLM, output: RequestOutput, logprobs: int | None, *, as_json: bool, is_shaded: bool) -> None:
    """Print the token table below the text, or everything as JSON; called after an interrupt as well."""
    completion = output.outputs[0]
    fields: dict[str, Any] = {
        "prompt": output.prompt,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "token_ids": completion.token_ids,
    }
    rows = []
    if completion.logprobs is not None:
        rows = token_rows(completion.token_ids, completion.logprobs, llm.text.vocabulary)
        num_bytes = sum(len(row["bytes"]) for row in rows)
        fields |= {"tokens": rows, "totals": totals(rows, num_bytes, num_bytes)}
    if as_json:
        typer.echo(json.dumps(fields | {"info": info_dict(llm, output.info)}))
    elif rows:
        typer.echo()
        print_tokens(rows, logprobs or 0)
        if is_shaded:
            console().print(legend())
