"""`logprobe score`: score the tokens of a text."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from logprobe.cli.command import naming
from logprobe.cli.inputs import TextOption, holds_rows, source_of
from logprobe.cli.options import BosOption, JsonOption, ModelFlags
from logprobe.cli.rows import info_dict, token_rows, totals_of
from logprobe.cli.shade import Shader, can_shade, legend
from logprobe.cli.tables import (
    console,
    number_lines,
    print_facts,
    print_tokens,
    refuse_vocabulary,
    totals_lines,
)
from logprobe.records.forms.finite import finite_value
from logprobe.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logprobe.analysis.detection import Detector
    from logprobe.cli.inputs import TextSource
    from logprobe.cli.rows import TokenRow
    from logprobe.llm import LLM
    from logprobe.records import LogprobsInfo

_output = partial(typer.Option, rich_help_panel="Output")
_windows = partial(typer.Option, rich_help_panel="Long texts")


def score(
    file: Annotated[str | None, typer.Argument(help="Text file; -: standard input.")] = None,
    *,
    text: TextOption = None,
    context: Annotated[
        str | None,
        typer.Option(
            help="Context before the text: only the text is scored, given this context.",
            rich_help_panel="Input",
        ),
    ] = None,
    logprobs: Annotated[
        int, _output("--logprobs", help="Alternatives to print per token; -1: the whole vocabulary.")
    ] = 0,
    tokens: Annotated[
        bool, _output("--tokens", help="Print a table of the tokens instead of the shaded text.")
    ] = False,
    summary: Annotated[bool, _output("--summary", help="Print only the totals.")] = False,
    detect: Annotated[
        bool,
        _output(
            "--detect",
            help="Print measures of whether the text was in the training data or written by a machine.",
        ),
    ] = False,
    as_json: JsonOption = False,
    bos: BosOption = None,
    window: Annotated[int | None, _windows(help="Tokens per window; by default the model's context.")] = None,
    stride: Annotated[
        int | None,
        _windows(
            help="Tokens from one window's start to the next; by default half a window. A stride of a full "
            "window makes windows disjoint; the first token of each then has no logprob."
        ),
    ] = None,
    model: ModelFlags,
) -> None:
    """Score the tokens of a text.

    Prints logprob, rank and entropy of every token, and the totals. On a terminal, the text is printed with
    each token shaded by its surprisal; --tokens or --logprobs print a table instead. Files and pipes always
    get the table.

    Logprobs and entropies are in nats. The first token is not scored, unless the model's tokenizer or --bos
    puts a BOS token before it. With --context, only the tokens after the context are scored. A text longer
    than the model's context is scored in overlapping windows.

    `logprobe words` prints the surprisal of words, and `logprobe dataset` scores the rows of files.

    Examples:
        echo "The cat sat on the mat." | logprobe score - --logprobs 3
        logprobe score --context "The capital of France is" --text " Paris"
        logprobe score book.txt --stride 1024 --summary
    """
    if file is not None and holds_rows(file):
        raise typer.BadParameter(f"{file} holds rows; use `logprobe dataset`", param_hint="FILE")
    has_windows = any(option is not None for option in (window, stride, bos))
    if context is not None and (detect or has_windows):
        what = "cannot be combined with --detect, --window, --stride or --bos"
        raise typer.BadParameter(what, param_hint="--context")
    with naming(prompt_logprobs="--logprobs"):
        params = SamplingParams(max_tokens=0, prompt_logprobs=logprobs, entropy=True, varentropy=detect)
    source = source_of(file, text)
    refuse_vocabulary(logprobs, "--logprobs")
    with model.open() as llm:
        scored: ScoredText
        if context is not None:
            continuation = "".join(source.parts)
            with naming(pairs="--context"):
                scored = Continuation(llm, context, continuation, logprobs)
        else:
            scored = TextInWindows(
                llm,
                source,
                params,
                window=window,
                stride=stride,
                bos=bos,
                has_rows=not summary,
                has_bar=summary or as_json,
            )
        rows = iter(()) if summary and context is not None else scored.rows()
        if as_json:
            _print_json(scored, rows)
        else:
            _print_text(scored, rows, logprobs, is_table=tokens or logprobs != 0)


class Continuation:
    """A text scored after a context."""

    num_added = 0  # number of rows that are not part of the text

    def __init__(self, llm: LLM, context: str, text: str, num_logprobs: int) -> None:
        (score,) = llm.score([(context, text)], entropy=True, logprobs=num_logprobs)
        assert score.record is not None
        self.before: dict[str, Any] = {"context": context, "boundary": score.boundary}
        self._rows = token_rows(score.token_ids, score.record, llm.text.vocabulary)
        counts = (score.num_tokens, score.num_tokens, score.num_bytes, score.num_bytes)
        self._after = {"totals": totals_of(score.logprob, *counts), "info": info_dict(llm, score.record.info)}

    def rows(self) -> Iterator[list[TokenRow]]:
        """Yield all rows at once."""
        yield self._rows

    def after(self) -> dict[str, Any]:
        """Return the JSON fields after the tokens: totals and information on the numbers."""
        return self._after


def _finite(detector: Detector) -> dict[str, float | None]:
    return {name: finite_value(value) for name, value in detector.result().items()}


class TextInWindows:
    """A text of any length, which is scored window by window while its rows are read; no rows are kept.

    Without `has_rows`, `rows` scores the text but yields nothing; `has_bar` shows a progress bar.
    """

    def __init__(
        self,
        llm: LLM,
        source: TextSource,
        params: SamplingParams,
        *,
        window: int | None,
        stride: int | None,
        bos: bool | None,
        has_rows: bool,
        has_bar: bool,
    ) -> None:
        from logprobe.analysis.windows import TextTally, WindowSettings

        self._llm, self._source, self._params = llm, source, params
        self._has_rows, self._has_bar = has_rows, has_bar
        self._settings = WindowSettings.of(llm, window=window, stride=stride, bos=bos)
        self._tally = TextTally(llm, self._settings)
        self._info: LogprobsInfo | None = None
        self._detector: Detector | None = None
        if params.varentropy:
            from logprobe.analysis.detection import Detector

            self._detector = Detector()
        bos_id = self._tally.result().bos_token_id
        self.num_added = int(bos_id is not None)
        self.before: dict[str, Any] = {
            "bos_token": None if bos_id is None else llm.text.vocabulary.token_text(bos_id),
            "window": self._settings.window,
            "stride": self._settings.stride,
        }

    def rows(self) -> Iterator[list[TokenRow]]:
        """Score the text window by window, and yield the rows of each window if `has_rows` is set."""
        from logprobe.analysis.progress import byte_bar
        from logprobe.analysis.windows import score_windows
        from logprobe.records import FlatLogprobs

        vocabulary = self._llm.text.vocabulary
        detector = self._detector
        scored = score_windows(
            self._llm,
            self._tally.pieces(self._parts()),
            self._settings,
            entropy=True,
            varentropy=detector is not None,
            logprobs=self._params.prompt_logprobs or 0,
        )
        with byte_bar(self._source.num_bytes, shown=self._has_bar) as advance:
            for window, score in scored:
                assert score.record is not None
                self._tally.add(score)
                if detector is not None:
                    detector.add_tokens(score.token_logprobs, score.entropy or (), score.varentropy or ())
                self._info = score.record.info or self._info
                if advance is not None:
                    advance(score.num_bytes, score.num_tokens)
                if self._has_rows:
                    # If a window has unscored tokens, they come first.
                    first = window.token_ids[: window.num_unscored].tolist()
                    unscored = token_rows(first, FlatLogprobs([None] * len(first)), vocabulary)
                    yield unscored + token_rows(score.token_ids, score.record, vocabulary)

    def _parts(self) -> Iterator[str]:
        for part in self._source.parts:
            if self._detector is not None:
                self._detector.add_text(part)
            yield part

    def after(self) -> dict[str, Any]:
        """Return the JSON fields after the tokens: totals and information on the numbers."""
        result = self._tally.result()
        num_tokens = result.num_tokens + self.num_added
        counts = (num_tokens, result.num_scored, result.num_bytes, result.num_scored_bytes)
        words = {"num_words": result.num_words, "word_perplexity": result.word_perplexity}
        return {
            "totals": totals_of(result.logprob, *counts) | words,
            **({} if self._detector is None else {"detect": _finite(self._detector)}),
            "info": info_dict(self._llm, self._info),
        }


ScoredText: TypeAlias = Continuation | TextInWindows


def _print_json(text: ScoredText, rows: Iterator[list[TokenRow]]) -> None:
    """Print one JSON object; tokens are written as soon as they are scored."""
    typer.echo(json.dumps(text.before | {"tokens": []})[:-2], nl=False)
    separator = ""
    for some in rows:
        typer.echo(separator + ", ".join(map(json.dumps, some)), nl=False)
        separator = ", "
    typer.echo(f"], {json.dumps(text.after())[1:]}")


def _print_text(
    text: ScoredText, rows: Iterator[list[TokenRow]], num_logprobs: int, *, is_table: bool
) -> None:
    """Print tokens as soon as they are scored, shaded or as a table, and then the totals."""
    screen = console()
    shader = Shader(marks_line_ends=True) if can_shade(screen) and not is_table else None
    num_tokens = 0
    for some in rows:
        if shader is None:
            print_tokens(some, num_logprobs, first=num_tokens)
        else:
            own = some if num_tokens else some[text.num_added :]
            tokens = [(bytes(row["bytes"]), row["logprob"]) for row in own]
            screen.print(shader.feed(tokens), end="", soft_wrap=True)
        num_tokens += len(some)
    if num_tokens and shader is not None:
        screen.print(shader.feed([], final=True), end="", soft_wrap=True)
        typer.echo("\n")
        screen.print(legend())
    elif num_tokens:
        typer.echo()
    after = text.after()
    note = _note(text.before, after["totals"]["num_tokens"])
    print_facts([*totals_lines(after["totals"], note), *number_lines(after.get("detect", {}))])


def _note(facts: dict[str, Any], num_tokens: int) -> str:
    """Describe which tokens are scored, and how."""
    if "boundary" in facts:
        return f"after the context; boundary: {facts['boundary']}"
    note = f"first token: {facts['bos_token'] or 'not scored'}"
    has_windows = num_tokens > facts["window"]
    return f"{note}; windows of {facts['window']}, stride {facts['stride']}" if has_windows else note
