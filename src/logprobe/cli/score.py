"""`logprobe score`: what a model gives each token of a text."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from logprobe.cli.inputs import checked_text, read_text
from logprobe.cli.options import DEFAULT_MODEL, JsonOption, ModelOption, flags_for, open_llm
from logprobe.cli.tables import info_dict, token_rows, token_table, totals, totals_table
from logprobe.sampling import SamplingParams

if TYPE_CHECKING:
    from logprobe.llm import LLM


def score(
    file: Annotated[str | None, typer.Argument(help="A UTF-8 text file; - is standard input.")] = None,
    *,
    text: Annotated[str | None, typer.Option("--text", help="The text itself, instead of a file.")] = None,
    top: Annotated[
        int, typer.Option("--top", help="Show so many alternatives a token; -1: the whole vocabulary.")
    ] = 0,
    model: ModelOption = DEFAULT_MODEL,
    as_json: JsonOption = False,
) -> None:
    """Print logprob, rank and entropy of every token of a text, and the totals.

    Logprobs and entropies are in nats. The first token is predicted by nothing and not scored, unless
    the model's own tokenizer puts a BOS token before it.
    """
    with flags_for(prompt_logprobs="--top"):
        params = SamplingParams(max_tokens=0, prompt_logprobs=top, entropy=True)
    content = _content(file, text)
    with open_llm(model) as llm:
        found = score_text(llm, content, params)
    if as_json:
        typer.echo(json.dumps(found))
    else:
        sums = totals_table(found["totals"], f"first token: {found['first_token']}")
        typer.echo(f"{token_table(found['tokens'], top)}\n\n{sums}")


def score_text(llm: LLM, text: str, params: SamplingParams) -> dict[str, Any]:
    """The rows of a text, their totals, what became of the first token, and what the numbers are."""
    (output,) = llm.generate(text, params, progress=True)
    assert output.prompt_logprobs is not None
    rows = token_rows(output.prompt_token_ids, output.prompt_logprobs, llm.text.vocabulary)
    num_bytes = len(text.encode())
    has_bos = _starts_with_added_token(llm, text, output.prompt_token_ids)
    num_unscored = 0 if has_bos else len(rows[0]["bytes"])
    return {
        "first_token": f"{rows[0]['token']}, put first by the tokenizer" if has_bos else "not scored",
        "tokens": rows,
        "totals": totals(rows, num_bytes, num_bytes - num_unscored),
        "info": info_dict(llm, output.info),
    }


def _content(file: str | None, text: str | None) -> str:
    if (file is None) == (text is None):
        raise typer.BadParameter("give either a file (- is standard input) or --text", param_hint="FILE")
    return read_text(file) if file is not None else checked_text("--text", text or "")


def _starts_with_added_token(llm: LLM, text: str, token_ids: list[int]) -> bool:
    """Whether the first token is not the text's own but the tokenizer's (BOS)."""
    bare = llm.text.encode(text, add_special_tokens=False)
    return len(token_ids) > len(bare) and token_ids[:1] != bare[:1].tolist()
