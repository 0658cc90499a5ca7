"""`logprobe classify`, `logprobe judge` and `logprobe rerank`: score labels, grades and documents."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from logprobe.analysis.datasets.settings import JudgeSettings, LabelSettings, RerankSettings
from logprobe.cli.data import DataFlags, takes_data
from logprobe.cli.options import flags_for, open_llm, settings_from, takes_engine, takes_settings
from logprobe.cli.tables import print_facts, table
from logprobe.errors import require

if TYPE_CHECKING:
    from logprobe.analysis.labels import Classification, Judgement

_Text = Annotated[str | None, typer.Option("--text", help="Text to use instead of files.")]
_Top = Annotated[int | None, typer.Option("--top", min=1, help="Print only this many best documents.")]
_Scale = Annotated[
    str, typer.Option("--scale", help="Grades: a range such as 1-5, or numbers such as 0,0.5,1.")
]
_RANGE: Final = re.compile(r"\s*(-?\d+)\s*-\s*(-?\d+)\s*")
_LARGEST_RANGE: Final = 1000


@takes_engine
@takes_settings(LabelSettings)
@takes_data
def classify(*, text: _Text = None, **flags: Any) -> None:
    """Classify texts by the probability of each label.

    Each label is scored as a whole text after the prompt, over all of its tokens. `logprobs` are the
    log-probabilities of the labels (nats), `mass` is the probability that the model answers with any of
    them, and `probs` are their shares of it. A mass close to 0 means that the model would have answered
    something else.

    A text given with --text is printed as a table. Files are read as data sets, as by `logprobe score`: one
    row of results per input row, as JSON lines or with -o in a file, lists in the order of the labels, bad
    rows in a side file. Exit code 1 if a row was bad.
    """
    data, loading = DataFlags.taken(flags)
    with flags_for():
        settings = settings_from(LabelSettings, flags)
    _check_source(data, text)
    if text is None:
        data.run(settings, **loading)
        return
    with open_llm(data.model, **loading) as llm, flags_for(prompt="--text", prompts="--text"):
        found: Any = llm.classify(
            settings.asked(text), settings.labels, correction=settings.correction, content_free=settings.empty
        )
    _print_labels(found, as_json=data.as_json)


def _check_source(data: DataFlags, text: str | None) -> None:
    """Check that the user gave either files or a text, and no output file for a text."""
    if bool(data.files) == (text is not None):
        raise typer.BadParameter("give either files (-: standard input) or --text", param_hint="FILE")
    if text is not None and data.output is not None:
        raise typer.BadParameter("cannot be combined with --text", param_hint="--output")


def _print_labels(found: Classification, *, as_json: bool) -> None:
    from logprobe.analysis.datasets.tasks import label_values

    if as_json:
        _print_json({"labels": list(found.labels), **label_values(found)})
        return
    _print_shares("label", found)
    print_facts([["mass", f"{found.mass:.4g}"], ["margin", f"{found.margin:.4f} nats"]])


def _print_json(values: dict[str, Any]) -> None:
    from logprobe.analysis.io.tables import json_line

    typer.echo(json_line(values))


def _print_shares(title: str, found: Classification) -> None:
    """Print the share and the log-probability of each answer, the most likely answer first."""
    shares = sorted(found.probabilities.items(), key=lambda entry: -entry[1])
    logprobs = dict(zip(found.labels, found.logprobs, strict=True))
    lines = [[repr(label), f"{share:.4f}", f"{logprobs[label]:.4f}"] for label, share in shares]
    typer.echo(table([[title, "share", "logprob"], *lines], is_left=[True, False, False]))
    typer.echo()


@takes_engine
@takes_settings(JudgeSettings, without=frozenset({"scale"}))
@takes_data
def judge(*, text: _Text = None, scale: _Scale = "1-5", **flags: Any) -> None:
    """Grade texts on a scale, by the probability of each grade.

    `expectation` and `spread` are the mean and the standard deviation of the grade, `probs` the share of
    each grade in the order of the scale, and `logprobs` their log-probabilities (nats); `off_scale` is the
    probability of any other answer. --prompt is the question about a text, including the scale; --chat asks
    it as a user message.

    A text given with --text is printed as a table. Files are read as data sets, as by `logprobe score`: one
    row of results per input row, as JSON lines or with -o in a file, bad rows in a side file. Exit code 1 if
    a row was bad.
    """
    data, loading = DataFlags.taken(flags)
    with flags_for():
        settings = settings_from(JudgeSettings, flags | {"scale": _scale(scale)})
    _check_source(data, text)
    if text is None:
        data.run(settings, **loading)
        return
    with open_llm(data.model, **loading) as llm, flags_for(prompt="--text", prompts="--text"):
        found: Any = llm.judge(settings.asked(text), settings.scale)
    _print_grade(found, as_json=data.as_json)


def _scale(text: str) -> list[float]:
    """Parse the value of --scale: a range of integers, including both ends, or a list of numbers."""
    ends = _RANGE.fullmatch(text)
    if ends is not None:
        first, last = int(ends[1]), int(ends[2])
        require(
            0 < last - first < _LARGEST_RANGE,
            "scale",
            f"must be an increasing range of at most {_LARGEST_RANGE} grades",
            got=text,
        )
        return [*map(float, range(first, last + 1))]
    try:
        return [float(word) for word in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(
            f"must be a range, such as 1-5, or numbers, such as 0,0.5,1, got {text!r}", param_hint="--scale"
        ) from error


def _print_grade(found: Judgement, *, as_json: bool) -> None:
    from logprobe.analysis.datasets.tasks import grade_values

    if as_json:
        _print_json({"scale": list(found.scale), **grade_values(found)})
        return
    _print_shares("grade", found.grades)
    print_facts(
        [
            ["expectation", f"{found.expectation:.4f}"],
            ["spread", f"{found.spread:.4f}"],
            ["off scale", f"{found.off_scale:.4g}"],
        ]
    )


@takes_engine
@takes_settings(RerankSettings)
@takes_data
def rerank(*, top: _Top = None, **flags: Any) -> None:
    """Rank documents by their relevance to a query.

    The relevance is P(yes) / (P(yes) + P(no)) of the model's answer, in [0, 1]. Documents are rows of files,
    which are read as data sets, as by `logprobe score`. With a single query, rows are printed as JSON lines,
    most relevant first; with a query per row, or with -o to a file, in their input order. Bad rows are
    printed on standard error, or written to a side file. Exit code 1 if a row was bad.
    """
    data, loading = DataFlags.taken(flags)
    with flags_for():
        settings = settings_from(RerankSettings, flags)
    if not data.files:
        raise typer.BadParameter("missing; give files with documents (-: standard input)", param_hint="FILE")
    if top is not None and (data.output is not None or settings.query is None):
        raise typer.BadParameter("requires --query, and cannot be combined with --output", param_hint="--top")

    def best_first(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return sorted(rows, key=_place)[:top]

    data.run(settings, arrange=None if settings.query is None else best_first, **loading)


def _place(row: dict[str, Any]) -> tuple[bool, float]:
    """Return a sort key that puts the most relevant row first and NaN last."""
    relevance: float = row["relevance_score"]
    return math.isnan(relevance), -relevance
