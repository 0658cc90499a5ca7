"""`logprobe generate`: a completion, and what the model gave each of its tokens."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from logprobe.cli.inputs import STDIN, read_text
from logprobe.cli.options import DEFAULT_MODEL, JsonOption, ModelOption, flags_for, open_llm, takes_engine
from logprobe.cli.rows import info_dict, token_rows, totals
from logprobe.cli.shade import CompletionPrinter, can_shade, legend
from logprobe.cli.tables import console, print_tokens, refuse_vocabulary
from logprobe.sampling import SamplingParams

if TYPE_CHECKING:
    from logprobe.engine.request import RequestOutput
    from logprobe.llm import LLM

DEFAULTS = SamplingParams()


PromptArgument = Annotated[str, typer.Argument(help="The text to go on from; - is standard input.")]
_Logprobs = Annotated[
    int | None,
    typer.Option(help="Report each token with so many alternatives; 0: the token alone, -1: the vocabulary."),
]
MaxTokensOption = Annotated[int, typer.Option(help="Most tokens to generate.")]
TemperatureOption = Annotated[float, typer.Option(help="0 picks the most likely token each time.")]
SeedOption = Annotated[int | None, typer.Option(help="The same seed, prompt and flags give the same text.")]
TopPOption = Annotated[float, typer.Option(help="Draw from the fewest tokens with this mass.")]
TopKOption = Annotated[int, typer.Option(help="Draw from so many most likely tokens; 0: all.")]
StopOption = Annotated[
    list[str] | None, typer.Option(help="End before this text; may be given more than once.")
]


@takes_engine
def generate(
    prompt: PromptArgument,
    *,
    logprobs: _Logprobs = None,
    max_tokens: MaxTokensOption = DEFAULTS.max_tokens,
    temperature: TemperatureOption = DEFAULTS.temperature,
    seed: SeedOption = None,
    top_p: TopPOption = DEFAULTS.top_p,
    top_k: TopKOption = DEFAULTS.top_k,
    stop: StopOption = None,
    model: ModelOption = DEFAULT_MODEL,
    as_json: JsonOption = False,
    **engine: Any,
) -> None:
    """Print what a model writes after a prompt; with --logprobs, every token's logprob and alternatives.

    The text comes as it is written; Ctrl-C ends it and keeps what came (exit code 130). Logprobs and
    entropies are in nats, of the model's own distribution, before temperature and truncation.
    """
    with flags_for():
        params = SamplingParams(
            logprobs=logprobs,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            top_p=top_p,
            top_k=top_k,
            stop=tuple(stop or ()),
            entropy=logprobs is not None,
        )
    refuse_vocabulary(logprobs, "--logprobs")
    text = read_text(prompt) if prompt == STDIN else prompt
    screen = console()
    with open_llm(model, **engine) as llm:
        is_shaded = logprobs is not None and can_shade(screen)
        printer = CompletionPrinter(llm, params, None if as_json else screen, is_shaded=is_shaded)
        printer.run(text)
        if printer.output is not None:
            _print(llm, printer.output, logprobs, as_json=as_json, is_shaded=is_shaded)
    if printer.is_interrupted:
        raise typer.Exit(130)


def _print(llm: LLM, output: RequestOutput, logprobs: int | None, *, as_json: bool, is_shaded: bool) -> None:
    """What stands below the text, or all of it as JSON; of an interrupted one, what came."""
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
