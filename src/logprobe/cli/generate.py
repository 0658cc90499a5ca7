"""`logprobe generate`: a completion, and what the model gave each of its tokens."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from logprobe.cli.inputs import STDIN, read_text
from logprobe.cli.options import DEFAULT_MODEL, JsonOption, ModelOption, flags_for, open_llm
from logprobe.cli.tables import info_dict, token_rows, token_table, totals
from logprobe.sampling import SamplingParams

if TYPE_CHECKING:
    from logprobe.engine.request import RequestOutput
    from logprobe.llm import LLM

_DEFAULTS = SamplingParams()


_Prompt = Annotated[str, typer.Argument(help="The text to go on from; - is standard input.")]
_Logprobs = Annotated[
    int | None,
    typer.Option(help="Report each token with so many alternatives; 0: the token alone, -1: the vocabulary."),
]
_MaxTokens = Annotated[int, typer.Option(help="Most tokens to generate.")]
_Temperature = Annotated[float, typer.Option(help="0 picks the most likely token each time.")]
_Seed = Annotated[int | None, typer.Option(help="The same seed, prompt and flags give the same text.")]
_TopP = Annotated[float, typer.Option(help="Draw from the fewest tokens with this mass.")]
_TopK = Annotated[int, typer.Option(help="Draw from so many most likely tokens; 0: all.")]
_Stop = Annotated[list[str] | None, typer.Option(help="End before this text; may be given more than once.")]


def generate(  # noqa: PLR0913 - one argument a flag
    prompt: _Prompt,
    *,
    logprobs: _Logprobs = None,
    max_tokens: _MaxTokens = _DEFAULTS.max_tokens,
    temperature: _Temperature = _DEFAULTS.temperature,
    seed: _Seed = None,
    top_p: _TopP = _DEFAULTS.top_p,
    top_k: _TopK = _DEFAULTS.top_k,
    stop: _Stop = None,
    model: ModelOption = DEFAULT_MODEL,
    as_json: JsonOption = False,
) -> None:
    """Print what a model writes after a prompt; with --logprobs, every token's logprob and alternatives.

    Logprobs and entropies are in nats, of the model's own distribution, before temperature and truncation.
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
    text = read_text(prompt) if prompt == STDIN else prompt
    with open_llm(model) as llm:
        (output,) = llm.generate(text, params, progress=True)
        _print(llm, output, logprobs, as_json=as_json)


def _print(llm: LLM, output: RequestOutput, logprobs: int | None, *, as_json: bool) -> None:
    completion = output.outputs[0]
    found: dict[str, Any] = {
        "prompt": output.prompt,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "token_ids": completion.token_ids,
    }
    if completion.logprobs is not None:
        rows = token_rows(completion.token_ids, completion.logprobs, llm.text.vocabulary)
        num_bytes = sum(len(row["bytes"]) for row in rows)
        found |= {"tokens": rows, "totals": totals(rows, num_bytes, num_bytes)}
    if as_json:
        typer.echo(json.dumps(found | {"info": info_dict(llm, output.info)}))
        return
    typer.echo(completion.text)
    if completion.logprobs is not None and rows:
        typer.echo(f"\n{token_table(rows, logprobs or 0)}")
