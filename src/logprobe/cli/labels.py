"""`logprobe classify`, `logprobe judge` and `logprobe rerank`: score labels, grades and documents."""

from __future__ import annotations

import math
import re
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from logprobe.analysis.datasets.settings import JudgeSettings, LabelSettings, RerankSettings
from logprobe.analysis.labels import RERANK_TASK, YES_NO
from logprobe.cli.command import naming
from logprobe.cli.data import DataFlags
from logprobe.cli.inputs import TextOption
from logprobe.cli.options import ModelFlags
from logprobe.cli.tables import print_facts, table
from logprobe.errors import require

if TYPE_CHECKING:
    from logprobe.analysis.classification import Classification
    from logprobe.analysis.labels import Judgement

_prompt = partial(typer.Option, rich_help_panel="Prompt")

PromptOption = Annotated[str, _prompt("--prompt", help="Prompt, in which each text replaces {text}.")]
ChatOption = Annotated[
    bool, _prompt("--chat", help="Send the prompt as a user message, through the model's chat template.")
]
_RANGE: Final = re.compile(r"\s*(-?\d+)\s*-\s*(-?\d+)\s*")
_LARGEST_RANGE: Final = 1000


def classify(
    *,
    data: DataFlags,
    text: TextOption = None,
    labels: Annotated[
        list[str] | None,
        _prompt(
            "--labels",
            help="Label as the model writes it (with a leading space where it continues a text); repeatable.",
        ),
    ] = None,
    prompt: PromptOption = "{text}",
    chat: ChatOption = False,
    correction: Annotated[
        str,
        _prompt(
            help="What the probabilities of labels are computed from: none (the probabilities as they "
            "are), length (their geometric mean per token) or calibrated (their ratio to the "
            "probabilities for a content-free text)."
        ),
    ] = "none",
    content_free: Annotated[
        str | None, _prompt(help="Content-free text for --correction calibrated; by default N/A.")
    ] = None,
    model: ModelFlags,
) -> None:
    """Classify texts by the probability of each label.

    Each label is scored as a whole text after the prompt, over all of its tokens. `logprobs` are the
    log-probabilities of the labels (nats), and `mass` is the probability that the answer begins with any of
    the labels. `probs` are the labels' probabilities (after --correction), normalized to sum to 1. A mass
    close to 0 means that the model would have answered something else.

    The results for --text are printed as a table. Files are read as by `logprobe dataset`: each input row
    gives one row of results, printed as a JSON line or, with -o, written to a file; lists are in the order of
    the labels. Bad rows are listed on standard error or in a second file, and the exit code is then 1.

    Examples:
        logprobe classify --text "I loved it." --prompt "{text} It was" --labels " good" --labels " bad"
        logprobe classify reviews.jsonl --labels " good" --labels " bad" -o labels.parquet
    """
    settings = LabelSettings(
        **data.columns,
        labels=tuple(labels or ()),
        prompt=prompt,
        chat=chat,
        correction=correction,  # type: ignore[arg-type]  # validated there
        content_free=content_free,
    )
    _check_source(data, text)
    if text is None:
        data.run(settings, model)
        return
    with model.open() as llm, naming(prompt="--text", prompts="--text"):
        [found] = llm.classify(
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
    from logprobe.analysis.io.files import json_line

    typer.echo(json_line(values))


def _print_shares(title: str, found: Classification) -> None:
    """Print the normalized probability and the log-probability of each answer, most likely first."""
    shares = sorted(found.probabilities.items(), key=lambda entry: -entry[1])
    logprobs = dict(zip(found.labels, found.logprobs, strict=True))
    lines = [[repr(label), f"{share:.4f}", f"{logprobs[label]:.4f}"] for label, share in shares]
    typer.echo(table([[title, "share", "logprob"], *lines], is_left=[True, False, False]))
    typer.echo()


def judge(
    *,
    data: DataFlags,
    text: TextOption = None,
    scale: Annotated[str, _prompt(help="Grades: a range such as 1-5, or numbers such as 0,0.5,1.")] = "1-5",
    prompt: PromptOption = "{text}",
    chat: ChatOption = False,
    model: ModelFlags,
) -> None:
    """Grade texts on a scale, by the probability of each grade.

    `expectation` and `spread` are the mean and the standard deviation of the grade. `logprobs` are the
    grades' log-probabilities (nats) under the model, in the order of the scale; `probs` are their
    probabilities, normalized to sum to 1. `off_scale` is the probability of any other answer. --prompt is the
    question about a text, including the scale; --chat sends it as a user message.

    The results for --text are printed as a table. Files are read as by `logprobe dataset`: each input row
    gives one row of results, printed as a JSON line or, with -o, written to a file. Bad rows are listed on
    standard error or in a second file, and the exit code is then 1.

    Examples:
        logprobe judge --chat --text "2 + 2 = 4" --prompt "Is this right, from 1 (no) to 5 (yes)? {text}"
        logprobe judge answers.txt --lines --scale 1-10 -o grades.jsonl
    """
    settings = JudgeSettings(**data.columns, scale=tuple(_scale(scale)), prompt=prompt, chat=chat)
    _check_source(data, text)
    if text is None:
        data.run(settings, model)
        return
    with model.open() as llm, naming(prompt="--text", prompts="--text"):
        [found] = llm.judge(settings.asked(text), settings.scale)
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


def rerank(
    *,
    data: DataFlags,
    query: Annotated[str | None, _prompt(help="Query for all documents.")] = None,
    query_column: Annotated[
        str | None, _prompt(help="Column with each document's own query, instead of --query.")
    ] = None,
    task: Annotated[str, _prompt(help="Instruction that says what makes a document relevant.")] = RERANK_TASK,
    template: Annotated[
        list[str] | None,
        _prompt(
            help="Three texts (repeat the flag): prefix, pair and suffix. The pair contains {query} and "
            "{document}, and optionally {task}. By default Qwen3-Reranker's template."
        ),
    ] = None,
    labels: Annotated[
        list[str],
        _prompt(help="The model's answers (repeat the flag) for a relevant and an irrelevant document."),
    ] = [*YES_NO],  # noqa: B006 - not modified
    top_n: Annotated[
        int | None, typer.Option("--top-n", min=1, help="Print only the N most relevant documents.")
    ] = None,
    model: ModelFlags,
) -> None:
    """Rank documents by their relevance to a query.

    The relevance is P(yes) / (P(yes) + P(no)) of the model's answer, in [0, 1]. Files are read as by
    `logprobe dataset`; each row is a document. With a single query, rows are printed as JSON lines, most
    relevant first. With a query per row, or with -o, rows keep their input order. Bad rows are listed on
    standard error or in a second file, and the exit code is then 1.

    Examples:
        logprobe rerank passages.txt --lines --query "What is the capital of China?" --top-n 3
    """
    settings = RerankSettings(
        **data.columns,
        query=query,
        query_column=query_column,
        task=task,
        template=tuple(template or ()),
        labels=tuple(labels),
    )
    if not data.files:
        raise typer.BadParameter("missing; give files with documents (-: standard input)", param_hint="FILE")
    if top_n is not None and query is None:
        raise typer.BadParameter("requires --query; set it, or leave --top-n out", param_hint="--top-n")
    if top_n is not None and data.output is not None:
        raise typer.BadParameter(
            "cannot be combined with --output; leave one of them out", param_hint="--top-n"
        )

    def best_first(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return sorted(rows, key=_place)[:top_n]

    data.run(settings, model, arrange=None if query is None else best_first)


def _place(row: dict[str, Any]) -> tuple[bool, float]:
    """Return a key that sorts the most relevant row first and NaN last."""
    relevance: float = row["relevance_score"]
    return math.isnan(relevance), -relevance
