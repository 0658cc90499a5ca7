"""`logprobe chat`: talk with a model in the terminal, and see how sure it is of each word."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from logprobe.cli.options import DEFAULT_MODEL, ModelOption, flags_for, open_llm
from logprobe.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from logprobe.engine.request import CompletionOutput, CompletionPiece
    from logprobe.llm import LLM

BOLD, RESET = "\x1b[1m", "\x1b[0m"
# Colours that tell apart with any eyesight: blue for sure, through white, to orange for surprised.
SHADES = ((0.1, "\x1b[38;5;33m"), (0.7, "\x1b[38;5;117m"), (1.6, ""), (3.0, "\x1b[38;5;222m"))
SURPRISED = "\x1b[38;5;208m"

_System = Annotated[str | None, typer.Option(help="What the model is told before the conversation.")]
_MaxTokens = Annotated[int, typer.Option(help="Most tokens of one answer.")]
_Temperature = Annotated[float, typer.Option(help="0 picks the most likely token each time.")]
_Seed = Annotated[int | None, typer.Option(help="The same seed and words give the same answers.")]
_Shade = Annotated[
    bool | None,
    typer.Option("--shade/--plain", help="Colour each token by its surprisal; by default on a terminal."),
]


def chat(
    *,
    model: ModelOption = DEFAULT_MODEL,
    system: _System = None,
    max_tokens: _MaxTokens = 256,
    temperature: _Temperature = 0.7,
    seed: _Seed = None,
    shade: _Shade = None,
) -> None:
    """Talk with a model; tokens are shaded from blue (expected) to orange (surprising).

    Each line of standard input is a turn; an empty line, Ctrl-D or /quit ends. After each answer stands its
    mean surprisal in nats and its perplexity, of the model's own distribution.
    """
    with flags_for():
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed, logprobs=0)
    is_shaded = sys.stdout.isatty() if shade is None else shade
    with open_llm(model) as llm:
        talk(llm, params, [{"role": "system", "content": system}] if system else [], is_shaded=is_shaded)


def talk(llm: LLM, params: SamplingParams, said: list[dict[str, Any]], *, is_shaded: bool) -> None:
    """Answer each line of standard input until it ends; `said` grows with the conversation."""
    while (line := _next_line()) is not None:
        said.append({"role": "user", "content": line})
        answer = asyncio.run(_answer(llm, params, said, _shown if is_shaded else _plain))
        said.append({"role": "assistant", "content": answer})


async def _answer(
    llm: LLM, params: SamplingParams, said: list[dict[str, Any]], show: Callable[[CompletionPiece, LLM], str]
) -> str:
    from logprobe.text.pieces import Cutter

    cutter: Cutter[CompletionOutput] = Cutter(llm.text.bytes_of, params.stop, params.min_tokens)
    text = ""
    async for output in llm.client.stream_chat(said, params):
        if piece := cutter.take(output.outputs[0]):
            text += piece.text
            sys.stdout.write(show(piece, llm))
            sys.stdout.flush()
    total = output.outputs[0].cumulative_logprob or 0.0
    typer.echo(f"\n{_summary(total, len(output.outputs[0].token_ids))}")
    return text


def _summary(total: float, count: int) -> str:
    from math import exp

    mean = -total / max(count, 1)
    return f"[{count} tokens, {mean:.2f} nats a token, perplexity {exp(mean):.2f}]"


def _plain(piece: CompletionPiece, _: LLM) -> str:
    return piece.text


def _shown(piece: CompletionPiece, llm: LLM) -> str:
    """Each token in the colour of its surprisal; a run that ends inside a character keeps its text."""
    record = piece.completion.logprobs
    assert record is not None
    rows = record[piece.start : piece.stop].chosen_entries().logprobs.tolist()
    ids = piece.completion.token_ids[piece.start : piece.stop]
    parts = [llm.text.bytes_of([token_id]) for token_id in ids]
    try:
        texts = [part.decode() for part in parts]
    except UnicodeDecodeError:
        return f"{_shade(-min(rows))}{piece.text}{RESET}"
    if "".join(texts) != piece.text:
        return piece.text
    return "".join(f"{_shade(-row)}{text}{RESET}" for row, text in zip(rows, texts, strict=True))


def _shade(surprisal: float) -> str:
    return next((colour for limit, colour in SHADES if surprisal < limit), SURPRISED)


def _next_line() -> str | None:
    if sys.stdin.isatty():
        sys.stdout.write(f"{BOLD}you> {RESET}")
        sys.stdout.flush()
    line = sys.stdin.readline().strip()
    return None if line in {"", "/quit"} else line
