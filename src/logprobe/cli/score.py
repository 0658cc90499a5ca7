"""`logprobe score`: what a model gives each token of a text, or each row of a data set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from logprobe.cli.dataset import DataRun, open_workers
from logprobe.cli.inputs import STDIN, TextSource
from logprobe.cli.options import (
    DEFAULT_MODEL,
    ENGINE_FLAGS,
    JsonOption,
    ModelOption,
    flags_for,
    open_llm,
    settings_from,
    takes_engine,
    takes_settings,
)
from logprobe.cli.rows import info_dict, token_rows, totals, totals_of
from logprobe.cli.shade import Shader, can_shade, legend
from logprobe.cli.tables import console, print_facts, print_tokens, refuse_vocabulary, totals_lines
from logprobe.errors import PromptTooLongError, require
from logprobe.sampling import SamplingParams
from logprobe.scoring.data.settings import DataSettings, RaySettings
from logprobe.scoring.data.sources import SUFFIXES, Format, find_sources

if TYPE_CHECKING:
    from collections.abc import Sequence

    from logprobe.cli.rows import TokenRow, Totals
    from logprobe.llm import LLM
    from logprobe.scoring.score import Score
    from logprobe.scoring.windows import TextTally, Window

_Files = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="FILE", help="A text, or data: txt, jsonl, csv, Parquet, folders, patterns; - is stdin."
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
_Engine = Annotated[
    Literal["native", "ray"],
    typer.Option("--engine", help="Score a data set here, or on a Ray cluster, a model on each actor."),
]
NOT_SCORED = "not scored"
_Force = Annotated[bool, typer.Option("--force", help="Write the output anew if it exists.")]


@takes_engine
@takes_settings(DataSettings, RaySettings)
def score(
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
    engine: _Engine = "native",
    model: ModelOption = DEFAULT_MODEL,
    as_json: JsonOption = False,
    **given: Any,
) -> None:
    """Print logprob, rank and entropy of every token of a text, and the totals.

    A terminal shows the text itself, each token in the shade of its surprisal; --tokens or --top show the
    table there, too. Files and pipes always get the table.

    Logprobs and entropies are in nats. The first token is predicted by nothing and not scored, unless
    the model's own tokenizer puts a BOS token before it, or --bos does. A text longer than the context
    is scored in windows: --stride says how far apart, --summary prints the totals alone.

    Several files, files of rows, and -o make it a data set: a row of numbers for each of its rows, bad
    rows in a side file, and a summary; exit code 1 where a row was bad.
    """
    names = files or []
    loading = {name: given.pop(name) for name in ENGINE_FLAGS}
    if given["truncation"] == "error" and (given["window"] or given["stride"]):
        given["truncation"] = "window"
    with flags_for(prompt_logprobs="--top"):
        settings, cluster = settings_from(DataSettings, given), settings_from(RaySettings, given)
        for name in cluster.given if engine != "ray" else ():
            require(False, name, "comes with --engine ray")
        params = SamplingParams(max_tokens=0, prompt_logprobs=top, entropy=True)
    if output is not None or lines or format is not None or _is_data(names, settings):
        if text is not None or not names:
            raise typer.BadParameter("a data set is in files", param_hint="FILE")
        sources = find_sources(names, kind=format, by_line=lines)
        pool = cluster if engine == "ray" else None
        with open_workers(model, sources, settings, pool, **loading) as workers:
            run = DataRun(workers, as_json=as_json, summary_only=summary)
            run.to_file(output, resume=resume, force=force) if output else run.print()
        return
    if engine == "ray":
        raise typer.BadParameter(
            "'ray' scores data sets; give -o, --lines, or files of rows", param_hint="--engine"
        )
    if (not names) == (text is None):
        raise typer.BadParameter("give either a file (- is standard input) or --text", param_hint="FILE")
    source = TextSource.of_file(names[0]) if names else TextSource.of_text("--text", text or "")
    asks_windows = summary or settings.window or settings.stride or settings.bos is not None
    screen = _Screen(top, as_json=as_json, is_table=settings.tokens or top != 0)
    with open_llm(model, **loading) as llm:
        found = None if asks_windows or source.is_long else _score_whole(llm, source.head, params)
        if found is None:
            _Windows(llm, settings, screen, summary_only=summary).print(source)
            return
    if as_json:
        typer.echo(json.dumps(found))
        return
    has_bos = found["first_token"] != NOT_SCORED
    screen.add(found["tokens"], num_added=int(has_bos), final=True)
    screen.end(found["totals"], f"first token: {found['first_token']}")


class _Screen:
    """Shows the tokens of one text as they come, shaded or as a table, and then the totals."""

    def __init__(self, top: int, *, as_json: bool, is_table: bool) -> None:
        refuse_vocabulary(top, "--top")
        self._console = console()
        self.as_json = as_json
        self.top = top
        self._shader = Shader(marks_line_ends=True) if can_shade(self._console) and not is_table else None
        self.num_tokens = 0  # so far

    def add(self, rows: Sequence[TokenRow], *, num_added: int, final: bool = False) -> None:
        """Show the next tokens, of which the text does not hold the first `num_added` (BOS)."""
        if self._shader is None:
            print_tokens(rows, self.top, first=self.num_tokens)
        else:
            tokens = [(bytes(row["bytes"]), row["logprob"]) for row in rows[num_added:]]
            self._console.print(self._shader.feed(tokens, final=final), end="", soft_wrap=True)
        self.num_tokens += len(rows)

    def end(self, sums: Totals, note: str) -> None:
        """Show the totals."""
        if self.num_tokens:
            typer.echo("\n" if self._shader is not None else "")
        if self._shader is not None and self.num_tokens:
            self._console.print(legend())
        print_facts(totals_lines(sums, note))


def _score_whole(llm: LLM, text: str, params: SamplingParams) -> dict[str, Any] | None:
    """A text in one piece; None where it does not fit."""
    try:
        return score_text(llm, text, params)
    except PromptTooLongError:
        return None


def score_text(llm: LLM, text: str, params: SamplingParams) -> dict[str, Any]:
    """The rows of a text, their totals, what became of the first token, and what the numbers are."""
    (output,) = llm.generate(text, params, progress=True)
    assert output.prompt_logprobs is not None
    rows = token_rows(output.prompt_token_ids, output.prompt_logprobs, llm.text.vocabulary)
    num_bytes = len(text.encode())
    has_bos = _starts_with_added_token(llm, text, output.prompt_token_ids)
    num_unscored = 0 if has_bos else len(rows[0]["bytes"])
    return {
        "first_token": f"{rows[0]['token']}, put first by the tokenizer" if has_bos else NOT_SCORED,
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
    asks_for_rows = any(columns.values()) or settings.unconditional
    return len(names) > 1 or asks_for_rows or any(map(_holds_rows, names))


def _holds_rows(name: str) -> bool:
    path = Path(name)
    is_of_rows = SUFFIXES.get(path.suffix.lower(), "txt") != "txt"
    return is_of_rows or path.is_dir() or (name != STDIN and not path.exists() and "*" in name)


class _Windows:
    """Prints a text of any length, window by window: nothing of it is kept."""

    def __init__(self, llm: LLM, settings: DataSettings, screen: _Screen, *, summary_only: bool) -> None:
        from logprobe.scoring.windows import WindowSettings

        self._llm = llm
        with flags_for():
            self._settings = WindowSettings.of(
                llm, window=settings.window, stride=settings.stride, bos=settings.bos
            )
        self._screen = screen
        self._as_json = screen.as_json
        self._summary_only = summary_only
        self._num_printed = 0  # as JSON

    def print(self, source: TextSource) -> None:
        from logprobe.scoring.progress import byte_bar
        from logprobe.scoring.windows import TextTally, score_windows

        tally = TextTally(self._llm, self._settings)
        self._puts_bos = tally.result().bos_token_id is not None
        pieces = tally.pieces(source.parts())
        info = None
        if self._as_json:
            typer.echo('{"tokens": [', nl=False)
        with byte_bar(source.num_bytes, shown=self._summary_only or self._as_json) as advance:
            for window, score in score_windows(
                self._llm, pieces, self._settings, entropy=True, logprobs=self._screen.top
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
        if window.start or self._num_printed or self._screen.num_tokens:
            return rows
        first = window.token_ids[: window.first_scored].tolist()
        return token_rows(first, FlatLogprobs([None] * len(first)), vocabulary) + rows

    def _print_rows(self, rows: list[TokenRow]) -> None:
        if self._as_json:
            separator = ", " if self._num_printed else ""
            typer.echo(separator + ", ".join(map(json.dumps, rows)), nl=False)
            self._num_printed += len(rows)
        else:
            is_first = not self._screen.num_tokens
            has_bos = is_first and rows[0]["logprob"] is None and self._puts_bos
            self._screen.add(rows, num_added=int(has_bos))

    def _print_totals(self, tally: TextTally, info: Any) -> None:
        found = tally.result()
        num_tokens = found.num_tokens + (found.bos_token_id is not None)
        counts = (num_tokens, found.num_scored, found.num_bytes, found.num_scored_bytes)
        sums = totals_of(found.logprob, *counts)
        bos = found.bos_token_id
        first = NOT_SCORED if bos is None else f"{self._llm.text.vocabulary.token_text(bos)}, put first"
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
        self._screen.end(sums, note)
