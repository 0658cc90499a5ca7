"""`logprobe classify`, `logprobe judge` and `logprobe rerank`: labels, grades, documents for a query."""

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

_Text = Annotated[str | None, typer.Option("--text", help="The text itself, instead of files.")]
_Top = Annotated[int | None, typer.Option("--top", min=1, help="Print so many documents, the best.")]
_Scale = Annotated[
    str,
    typer.Option("--scale", help="The grades: a range, 1-5, or numbers, 0,0.5,1.", envvar="LOGPROBE_SCALE"),
]
_RANGE: Final = re.compile(r"\s*(-?\d+)\s*-\s*(-?\d+)\s*")
_LARGEST_RANGE: Final = 1000


@takes_engine
@takes_settings(LabelSettings)
@takes_data
def classify(*, text: _Text = None, **flags: Any) -> None:
    """Say how likely each label is after each text, whole, and which is the likeliest.

    `logprobs` are the labels' own (nats), `mass` is the probability that the model says any of them, and
    `probs` are their shares of it. A mass near nothing says that the model would not have answered so.

    A text by --text gets a table. Files are read as `logprobe score` reads data sets: a row of numbers for
    each of their rows, as JSON lines or by -o to a file, lists in the order of the labels, bad rows in a
    side file; exit code 1 where a row was bad.
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
    """Refuse files beside a text, or neither, and an output file for the one text."""
    if bool(data.files) == (text is not None):
        raise typer.BadParameter("give either files (- is standard input) or --text", param_hint="FILE")
    if text is not None and data.output is not None:
        raise typer.BadParameter("is for files of texts", param_hint="--output")


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
    """Each answer's share and its own log-probability, the most likely first."""
    shares = sorted(found.probabilities.items(), key=lambda entry: -entry[1])
    logprobs = dict(zip(found.labels, found.logprobs, strict=True))
    lines = [[repr(label), f"{share:.4f}", f"{logprobs[label]:.4f}"] for label, share in shares]
    typer.echo(table([[title, "share", "logprob"], *lines], is_left=[True, False, False]))
    typer.echo()


@takes_engine
@takes_settings(JudgeSettings, without=frozenset({"scale"}))
@takes_data
def judge(*, text: _Text = None, scale: _Scale = "1-5", **flags: Any) -> None:
    """Say which grade a model gives each text: the mean, the spread, and how likely each grade is.

    `expectation` and `spread` are the mean and the standard deviation of the grade, `probs` each grade's
    share, in the order of the scale, and `logprobs` their own (nats); `off_scale` is the probability of any
    other answer. --prompt says what is asked of a text, the scale too; --chat asks it as a user's message.

    A text by --text gets a table. Files are read as `logprobe score` reads data sets: a row of numbers for
    each of their rows, as JSON lines or by -o to a file, bad rows in a side file; exit code 1 where a row
    was bad.
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
    """The grades that a flag names, as a range of whole numbers with both ends or one by one."""
    ends = _RANGE.fullmatch(text)
    if ends is not None:
        first, last = int(ends[1]), int(ends[2])
        require(
            0 < last - first < _LARGEST_RANGE, "scale", f"goes up by less than {_LARGEST_RANGE}", got=text
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
    """Say how relevant each document is to a query, in [0, 1], by a model that answers yes or no.

    Documents are rows of files, as `logprobe score` reads data sets. For one query their rows are printed as
    JSON lines, the best first; with a query of their own, or by -o to a file, in their order. Bad rows are
    told, or go to a side file; exit code 1 where a row was bad.
    """
    data, loading = DataFlags.taken(flags)
    with flags_for():
        settings = settings_from(RerankSettings, flags)
    if not data.files:
        raise typer.BadParameter("documents are in files (- is standard input)", param_hint="FILE")
    if top is not None and (data.output is not None or settings.query is None):
        raise typer.BadParameter("is for the rows of one query that are printed", param_hint="--top")

    def best_first(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return sorted(rows, key=_place)[:top]

    data.run(settings, arrange=None if settings.query is None else best_first, **loading)


def _place(row: dict[str, Any]) -> tuple[bool, float]:
    """By which rows are sorted, the best first; what is no number comes last."""
    relevance: float = row["relevance_score"]
    return math.isnan(relevance), -relevance
