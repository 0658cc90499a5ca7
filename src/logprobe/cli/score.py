"""`logprobe score`: score the tokens of a text, or the rows of a data set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import typer

from logprobe.analysis.datasets.settings import DataSettings, RaySettings
from logprobe.analysis.io.sources import SUFFIXES
from logprobe.cli.data import DataFlags, takes_data
from logprobe.cli.inputs import STDIN, TextSource
from logprobe.cli.options import flags_for, open_llm, settings_from, takes_engine, takes_settings
from logprobe.cli.rows import info_dict, token_rows, totals, totals_of
from logprobe.cli.shade import Shader, can_shade, legend
from logprobe.cli.tables import (
    console,
    number_lines,
    print_facts,
    print_tokens,
    refuse_vocabulary,
    totals_lines,
)
from logprobe.cli.words import BoundaryOption, ByOption, CsvOption, UnitOption, print_units
from logprobe.errors import PromptTooLongError, require
from logprobe.records.forms.finite import finite_value
from logprobe.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logprobe.analysis.detection import Detector
    from logprobe.cli.rows import TokenRow
    from logprobe.llm import LLM
    from logprobe.records import FlatLogprobs, LogprobsInfo

_Text = Annotated[str | None, typer.Option("--text", help="Text to score, instead of a file.")]
_Top = Annotated[
    int, typer.Option("--top", help="Alternatives to print per token; -1: the whole vocabulary.")
]
_Engine = Annotated[
    Literal["native", "ray"],
    typer.Option(
        "--engine",
        help="Score a data set in this process, or on a Ray cluster with a model on each actor.",
    ),
]
NOT_SCORED = "not scored"


@takes_engine
@takes_settings(DataSettings, RaySettings, without=frozenset({"boundary"}))
@takes_data
def score(
    *,
    text: _Text = None,
    top: _Top = 0,
    by: ByOption = None,
    as_csv: CsvOption = False,
    boundary: BoundaryOption = None,
    unit: UnitOption = "nats",
    engine: _Engine = "native",
    **flags: Any,
) -> None:
    """Score the tokens of a text, or the rows of a data set.

    Prints logprob, rank and entropy of every token, and the totals. On a terminal, the text is printed with
    each token shaded by its surprisal; --tokens or --top print a table instead. Files and pipes always get
    the table.

    Logprobs and entropies are in nats. The first token is not scored, unless the model's tokenizer or --bos
    puts a BOS token before it. A text longer than the context is scored in overlapping windows; --stride
    sets their distance, and --summary prints only the totals.

    Several files, files with rows (such as .jsonl), or -o select data set mode: one row of results per input
    row, bad rows in a side file, and a summary. Exit code 1 if a row was bad.

    --by word prints surprisal, entropy and tokens of each word of a text or of each row; --csv prints them
    as CSV.
    """
    data, loading = DataFlags.taken(flags)
    names = data.files or []
    if flags["truncation"] == "error" and (flags["window"] or flags["stride"]):
        flags["truncation"] = "window"
    flags["boundary"] = "token" if boundary == "token" else "auto"
    with flags_for(prompt_logprobs="--top"):
        settings, cluster = settings_from(DataSettings, flags), settings_from(RaySettings, flags)
        for name in cluster.given if engine != "ray" else ():
            require(False, name, "requires --engine ray")
        detects = settings.detect
        params = SamplingParams(max_tokens=0, prompt_logprobs=top, entropy=True, varentropy=detects)
    if by is not None:
        _check_one_source(text, names)
        if top or engine == "ray":
            raise typer.BadParameter("cannot be combined with --top or --engine ray", param_hint="--by")
        is_data = data.lines or data.format is not None or _is_data(names, settings)
        if is_data and text is not None:
            raise typer.BadParameter("a data set must be in files", param_hint="FILE")
        source = None if is_data else _source_of(text, names)
        asked = {"by": by, "boundary": boundary, "unit": unit}
        print_units(data, settings, source, as_csv=as_csv, loading=loading, **asked)
        return
    if as_csv or boundary == "end" or unit != "nats":
        raise typer.BadParameter("requires --by", param_hint="--csv, --boundary or --unit")
    asks_for_rows = data.output is not None or data.lines or data.format is not None
    if asks_for_rows or _is_data(names, settings):
        if text is not None or not names:
            raise typer.BadParameter("a data set must be in files", param_hint="FILE")
        data.run(settings, cluster if engine == "ray" else None, **loading)
        return
    if engine == "ray":
        raise typer.BadParameter(
            "'ray' scores only data sets; use -o, --lines, or files with rows", param_hint="--engine"
        )
    _check_one_source(text, names)
    source = _source_of(text, names)
    asks_windows = data.summary or settings.window or settings.stride or settings.bos is not None
    refuse_vocabulary(top, "--top")
    with open_llm(data.model, **loading) as llm:
        whole = None if asks_windows or source.is_long else _fitting(llm, source.head, params)
        has_rows, has_bar = not data.summary, data.summary or data.as_json
        scored = whole or TextInWindows(llm, source, settings, top, has_rows=has_rows, has_bar=has_bar)
        if data.as_json:
            _print_json(scored)
        else:
            _print_text(scored, top, is_table=settings.tokens or top != 0)


def _check_one_source(text: str | None, names: list[str]) -> None:
    if (not names) == (text is None):
        raise typer.BadParameter("give either a file (-: standard input) or --text", param_hint="FILE")


def _source_of(text: str | None, names: list[str]) -> TextSource:
    return TextSource.of_file(names[0]) if names else TextSource.of_text("--text", text or "")


def _is_data(names: list[str], settings: DataSettings) -> bool:
    """Return True if the files are a data set, judging by their number and names and by the settings."""
    columns = (settings.context_column, settings.choices_column, settings.keep_columns, settings.label_column)
    asks_for_rows = any(columns) or settings.unconditional
    return len(names) > 1 or asks_for_rows or any(map(_holds_rows, names))


def _holds_rows(name: str) -> bool:
    path = Path(name)
    is_of_rows = SUFFIXES.get(path.suffix.lower(), "txt") != "txt"
    return is_of_rows or path.is_dir() or (name != STDIN and not path.exists() and "*" in name)


# -- a text --------------------------------------------------------------------------------------------------


def _fitting(llm: LLM, text: str, params: SamplingParams) -> WholeText | None:
    """Score a text in one piece, or return None if it does not fit into the context."""
    try:
        return WholeText(llm, text, params)
    except PromptTooLongError:
        return None


class WholeText:
    """A text scored in one piece."""

    def __init__(self, llm: LLM, text: str, params: SamplingParams) -> None:
        (output,) = llm.generate(text, params, progress=True)
        assert output.prompt_logprobs is not None
        self._rows = rows = token_rows(output.prompt_token_ids, output.prompt_logprobs, llm.text.vocabulary)
        bare, spans = llm.text.encode_with_spans(text)
        ids = output.prompt_token_ids
        has_bos = len(ids) > len(bare) and ids[:1] != bare[:1].tolist()
        self.num_added = int(has_bos)  # number of rows that are not part of the text: 1 if there is a BOS
        first = f"{rows[0]['token']}, put first by the tokenizer" if has_bos else NOT_SCORED
        self.before: dict[str, Any] = {"first_token": first}  # JSON fields before the tokens
        num_bytes = len(text.encode())
        num_unscored = 0 if has_bos else int(spans[0, 1])
        self._after = {
            "totals": totals(rows, num_bytes, num_bytes - num_unscored),
            **({"detect": _detected(text, output.prompt_logprobs)} if params.varentropy else {}),
            "info": info_dict(llm, output.info),
        }

    def rows(self) -> Iterator[list[TokenRow]]:
        """Yield all rows at once."""
        yield self._rows

    def after(self) -> dict[str, Any]:
        """Return the JSON fields after the tokens: totals and information on the numbers."""
        return self._after


def _detected(text: str, record: FlatLogprobs) -> dict[str, float | None]:
    """Return the detection measures of a text.

    `record` has one position per token, of which the first is not scored.
    """
    from logprobe.analysis.detection import Detector

    detector = Detector()
    own = record[1:]
    columns = (own.chosen_entries().logprobs, own.extras["entropy"], own.extras["varentropy"])
    detector.add_tokens(*(column.tolist() for column in columns))
    detector.add_text(text)
    return _finite(detector)


def _finite(detector: Detector) -> dict[str, float | None]:
    return {name: finite_value(value) for name, value in detector.result().items()}


class TextInWindows:
    """A text of any length, which is scored window by window while its rows are read; no rows are kept."""

    def __init__(
        self,
        llm: LLM,
        source: TextSource,
        settings: DataSettings,
        num_top: int,
        *,
        has_rows: bool,
        has_bar: bool,
    ) -> None:
        from logprobe.analysis.windows import TextTally, WindowSettings

        self._llm, self._source = llm, source
        self._num_top, self._has_rows, self._has_bar = num_top, has_rows, has_bar
        with flags_for():
            self._settings = WindowSettings.of(
                llm, window=settings.window, stride=settings.stride, bos=settings.bos
            )
        self._tally = TextTally(llm, self._settings)
        self._info: LogprobsInfo | None = None
        self._detector: Detector | None = None
        if settings.detect:
            from logprobe.analysis.detection import Detector

            self._detector = Detector()
        self.num_added = int(self._tally.result().bos_token_id is not None)
        self.before: dict[str, Any] = {}

    def rows(self) -> Iterator[list[TokenRow]]:
        """Score the text window by window, and yield the rows of each window if `has_rows` is set."""
        from logprobe.analysis.progress import byte_bar
        from logprobe.analysis.windows import score_windows
        from logprobe.records import FlatLogprobs

        vocabulary = self._llm.text.vocabulary
        detector = self._detector
        pieces = self._tally.pieces(self._parts())
        scored = score_windows(
            self._llm,
            pieces,
            self._settings,
            entropy=True,
            varentropy=detector is not None,
            logprobs=self._num_top,
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
        for part in self._source.parts():
            if self._detector is not None:
                self._detector.add_text(part)
            yield part

    def after(self) -> dict[str, Any]:
        """Return the JSON fields after the tokens: windows, totals and information on the numbers."""
        result = self._tally.result()
        bos = result.bos_token_id
        num_tokens = result.num_tokens + (bos is not None)
        counts = (num_tokens, result.num_scored, result.num_bytes, result.num_scored_bytes)
        words = {"num_words": result.num_words, "word_perplexity": result.word_perplexity}
        vocabulary = self._llm.text.vocabulary
        return {
            "first_token": NOT_SCORED if bos is None else f"{vocabulary.token_text(bos)}, put first",
            "window": result.window,
            "stride": result.stride,
            "totals": totals_of(result.logprob, *counts) | words,
            **({} if self._detector is None else {"detect": _finite(self._detector)}),
            "info": info_dict(self._llm, self._info),
        }


ScoredText: TypeAlias = WholeText | TextInWindows


def _print_json(text: ScoredText) -> None:
    """Print one JSON object; tokens are written as soon as they are scored."""
    typer.echo(json.dumps(text.before | {"tokens": []})[:-2], nl=False)
    separator = ""
    for rows in text.rows():
        typer.echo(separator + ", ".join(map(json.dumps, rows)), nl=False)
        separator = ", "
    typer.echo(f"], {json.dumps(text.after())[1:]}")


def _print_text(text: ScoredText, num_top: int, *, is_table: bool) -> None:
    """Print tokens as soon as they are scored, shaded or as a table, and then the totals."""
    screen = console()
    shader = Shader(marks_line_ends=True) if can_shade(screen) and not is_table else None
    num_tokens = 0
    for rows in text.rows():
        if shader is None:
            print_tokens(rows, num_top, first=num_tokens)
        else:
            own = rows if num_tokens else rows[text.num_added :]
            tokens = [(bytes(row["bytes"]), row["logprob"]) for row in own]
            screen.print(shader.feed(tokens), end="", soft_wrap=True)
        num_tokens += len(rows)
    if num_tokens and shader is not None:
        screen.print(shader.feed([], final=True), end="", soft_wrap=True)
        typer.echo("\n")
        screen.print(legend())
    elif num_tokens:
        typer.echo()
    facts = text.before | text.after()
    note = f"first token: {facts['first_token']}"
    if "window" in facts:
        note += f"; windows of {facts['window']}, stride {facts['stride']}"
    print_facts([*totals_lines(facts["totals"], note), *number_lines(facts.get("detect", {}))])
