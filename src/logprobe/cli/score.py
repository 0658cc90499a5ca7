"""`logprobe score`: what a model gives each token of a text, or each row of a data set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from logprobe.cli.dataset import DataRun
from logprobe.cli.inputs import STDIN, checked_text, read_text, text_parts
from logprobe.cli.options import (
    DEFAULT_MODEL,
    JsonOption,
    ModelOption,
    flags_for,
    open_llm,
    settings_from,
    takes_settings,
)
from logprobe.cli.tables import (
    info_dict,
    token_rows,
    token_table,
    totals,
    totals_of,
    totals_table,
)
from logprobe.sampling import SamplingParams
from logprobe.scoring.data.settings import DataSettings
from logprobe.scoring.data.sources import SUFFIXES, Format, find_sources

if TYPE_CHECKING:
    from logprobe.cli.tables import TokenRow
    from logprobe.llm import LLM
    from logprobe.scoring.score import Score
    from logprobe.scoring.windows import TextTally, Window

_Files = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[FILE]...", help="A text, or data: txt, jsonl, csv, Parquet, folders, patterns; - is stdin."
    ),
]
_Text = Annotated[str | None, typer.Option("--text", help="The text itself, instead of a file.")]
_Top = Annotated[
    int, typer.Option("--top", help="Show so many alternatives a token; -1: the whole vocabulary.")
]
_Output = Annotated[
    str | None, typer.Option("--output", "-o", help="Write each row's numbers to a .parquet or .jsonl file.")
]
_Summary = Annotated[bool, typer.Option("--summary", help="Print the totals alone.")]
_Lines = Annotated[bool, typer.Option("--lines", help="Each line of a text file is a row.")]
_Format = Annotated[Format | None, typer.Option("--format", help="What the files are, whatever their names.")]
_Resume = Annotated[bool, typer.Option("--resume", help="Go on with a run that was stopped, even killed.")]
_Force = Annotated[bool, typer.Option("--force", help="Write the output anew if it exists.")]


@takes_settings(DataSettings, without=frozenset({"lora"}))
def score(  # noqa: PLR0913 - one argument a flag
    files: _Files = None,
    *,
    text: _Text = None,
    top: _Top = 0,
    output: _Output = None,
    summary: _Summary = False,
    lines: _Lines = False,
    format: _Format = None,  # noqa: A002 - the flag's name
    resume: _Resume = False,
    force: _Force = False,
    model: ModelOption = DEFAULT_MODEL,
    as_json: JsonOption = False,
    **given: Any,
) -> None:
    """Print logprob, rank and entropy of every token of a text, and the totals.

    Logprobs and entropies are in nats. The first token is predicted by nothing and not scored, unless
    the model's own tokenizer puts a BOS token before it, or --bos does. A text longer than the context
    is scored in windows: --stride says how far apart, --summary prints the totals alone.

    Several files, files of rows, and -o make it a data set: a row of numbers for each of its rows, bad
    rows in a side file, and a summary; exit code 1 where a row was bad.
    """
    names = files or []
    if given["truncation"] == "error" and (given["window"] or given["stride"]):
        given["truncation"] = "window"
    with flags_for(prompt_logprobs="--top"):
        settings = settings_from(DataSettings, given)
        params = SamplingParams(max_tokens=0, prompt_logprobs=top, entropy=True)
    if output is not None or lines or format is not None or _is_data(names, settings):
        if text is not None or not names:
            raise typer.BadParameter("a data set is in files", param_hint="FILE")
        sources = find_sources(names, kind=format, by_line=lines)
        with open_llm(model) as llm:
            run = DataRun(llm, sources, settings, as_json=as_json, summary_only=summary)
            run.to_file(output, resume=resume, force=force) if output else run.print()
        return
    if (not names) == (text is None):
        raise typer.BadParameter("give either a file (- is standard input) or --text", param_hint="FILE")
    if summary or settings.window or settings.stride or settings.bos is not None:
        checked = None if text is None else checked_text("--text", text)
        with open_llm(model) as llm:
            _Windows(llm, settings, top, as_json=as_json, summary_only=summary).print(checked, names)
        return
    content = read_text(names[0]) if names else checked_text("--text", text or "")
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


def _starts_with_added_token(llm: LLM, text: str, token_ids: list[int]) -> bool:
    """Whether the first token is not the text's own but the tokenizer's (BOS)."""
    bare = llm.text.encode(text, add_special_tokens=False)
    return len(token_ids) > len(bare) and token_ids[:1] != bare[:1].tolist()


def _is_data(names: list[str], settings: DataSettings) -> bool:
    """Whether the files are rows: by their number, their names, or what is asked of them."""
    columns = {name: getattr(settings, name) for name in ("context_column", "choices_column", "keep_columns")}
    asks_for_rows = any(columns.values()) or settings.tokens or settings.unconditional
    return len(names) > 1 or asks_for_rows or any(map(_holds_rows, names))


def _holds_rows(name: str) -> bool:
    path = Path(name)
    is_of_rows = SUFFIXES.get(path.suffix.lower(), "txt") != "txt"
    return is_of_rows or path.is_dir() or (name != STDIN and not path.exists() and "*" in name)


class _Windows:
    """Prints a text of any length, window by window: nothing of it is kept."""

    def __init__(
        self, llm: LLM, settings: DataSettings, top: int, *, as_json: bool, summary_only: bool
    ) -> None:
        from logprobe.scoring.windows import WindowSettings

        self._llm = llm
        with flags_for():
            self._settings = WindowSettings.of(
                llm, window=settings.window, stride=settings.stride, bos=settings.bos
            )
        self._top = top
        self._as_json = as_json
        self._summary_only = summary_only
        self._num_printed = 0

    def print(self, text: str | None, names: list[str]) -> None:
        from logprobe.scoring.progress import byte_bar
        from logprobe.scoring.windows import TextTally, score_windows

        tally = TextTally(self._llm, self._settings)
        pieces = tally.pieces([text] if text is not None else text_parts(names[0]))
        is_file = text is None and names[0] != STDIN
        num_bytes = Path(names[0]).stat().st_size if is_file and Path(names[0]).is_file() else None
        info = None
        if self._as_json:
            typer.echo('{"tokens": [', nl=False)
        with byte_bar(num_bytes, shown=self._summary_only or self._as_json) as advance:
            for window, score in score_windows(
                self._llm, pieces, self._settings, entropy=True, logprobs=self._top
            ):
                tally.add(score)
                info = score.record.info if score.record is not None else None
                if advance is not None:
                    advance(score.num_bytes, score.num_tokens)
                if not self._summary_only:
                    self._print_rows(self._rows(window, score))
        self._print_totals(tally, info)

    def _rows(self, window: Window, score: Score) -> list[TokenRow]:
        from logprobe.records import FlatLogprobs

        vocabulary = self._llm.text.vocabulary
        assert score.record is not None
        rows = token_rows(score.token_ids, score.record, vocabulary)
        if window.start or self._num_printed:
            return rows
        first = window.token_ids[: window.first_scored].tolist()
        return token_rows(first, FlatLogprobs([None] * len(first)), vocabulary) + rows

    def _print_rows(self, rows: list[TokenRow]) -> None:
        if self._as_json:
            separator = ", " if self._num_printed else ""
            typer.echo(separator + ", ".join(map(json.dumps, rows)), nl=False)
        else:
            typer.echo(token_table(rows, self._top, first=self._num_printed))
        self._num_printed += len(rows)

    def _print_totals(self, tally: TextTally, info: Any) -> None:
        found = tally.result()
        num_tokens = found.num_tokens + (found.bos_token_id is not None)
        counts = (num_tokens, found.num_scored, found.num_bytes, found.num_scored_bytes)
        sums = totals_of(found.logprob, *counts)
        bos = found.bos_token_id
        first = "not scored" if bos is None else f"{self._llm.text.vocabulary.token_text(bos)}, put first"
        if self._as_json:
            more = {
                "first_token": first,
                "window": found.window,
                "stride": found.stride,
                "totals": sums | {"num_words": found.num_words, "word_perplexity": found.word_perplexity},
                "info": info_dict(self._llm, info),
            }
            typer.echo(f"], {json.dumps(more)[1:]}")
            return
        note = f"first token: {first}; windows of {found.window}, {found.stride} apart"
        typer.echo(("" if self._summary_only else "\n") + totals_table(sums, note))
