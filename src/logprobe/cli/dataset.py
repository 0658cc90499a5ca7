"""`logprobe dataset`: score the rows of files, on one machine or on a Ray cluster."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Literal

import typer

from logprobe.analysis.datasets.settings import DataSettings, RaySettings
from logprobe.cli.data import DataFlags
from logprobe.cli.options import BosOption, ModelFlags
from logprobe.errors import require

_columns = partial(typer.Option, rich_help_panel="Input")
_scores = partial(typer.Option, rich_help_panel="Scores")
_cluster = partial(typer.Option, rich_help_panel="Ray")


@dataclass(frozen=True, kw_only=True)
class ScoreFlags:
    """Columns and scoring options, as in `DataSettings`."""

    context_column: Annotated[
        str | None, _columns(help="Column with the context before the text or the choices.")
    ] = None
    choices_column: Annotated[
        str | None, _columns(help="Column with a list of texts; the most likely one is the model's answer.")
    ] = None
    answer_column: Annotated[
        str | None,
        _columns(help="Column with the correct choice: its index from 0, its letter from A, or its text."),
    ] = None
    label_column: Annotated[
        str | None,
        _columns(
            help="With --detect: column with a text's known class (true, false, 1 or 0); adds each "
            "measure's AUC to the summary."
        ),
    ] = None
    delimiter: Annotated[str, _scores(help="Text before each choice, after the context.")] = " "
    tokens: Annotated[
        bool, _scores("--tokens", help="Output each token's id, logprob, rank and entropy.")
    ] = False
    unconditional: Annotated[
        bool, _scores("--unconditional", help="Also score each continuation without its context, for PMI.")
    ] = False
    detect: Annotated[
        bool,
        _scores(
            "--detect",
            help="Output measures of whether a text was in the training data or written by a machine.",
        ),
    ] = False
    bos: BosOption = None
    truncation: Annotated[
        Literal["error", "left", "window"] | None,
        _scores(
            help="Rows longer than the context: error (a bad row), left (keep the end) or window (sliding "
            "windows; the default with --window or --stride)."
        ),
    ] = None
    window: Annotated[int | None, _scores(help="Tokens per window; by default the model's context.")] = None
    stride: Annotated[
        int | None,
        _scores(
            help="Tokens from one window's start to the next; by default half a window. A stride of a full "
            "window makes windows disjoint; the first token of each then has no logprob."
        ),
    ] = None
    boundary: Annotated[
        Literal["auto", "token"],
        _scores(
            help="How to score a continuation if a token spans the end of its context: auto (by bytes) or "
            "token (as lm-evaluation-harness does)."
        ),
    ] = "auto"


@dataclass(frozen=True, kw_only=True)
class ClusterFlags:
    """The Ray cluster, as in `RaySettings`."""

    ray_address: Annotated[
        str | None,
        _cluster(
            help="HOST:PORT, auto (the cluster of this machine) or local (a new cluster here); by default "
            "the variable RAY_ADDRESS, else the cluster of this machine, else a new cluster."
        ),
    ] = None
    ray_actors: Annotated[
        int | None,
        _cluster(
            help="Copies of the model; by default as many as the GPUs allow, or one per machine without GPUs."
        ),
    ] = None
    ray_cpus: Annotated[
        float | None, _cluster(help="CPUs, and threads, of each copy; by default as many as fit.")
    ] = None
    ray_gpus: Annotated[
        float | None, _cluster(help="GPUs of each copy; by default 1 if the cluster has any.")
    ] = None


def dataset(
    *,
    data: DataFlags,
    scores: ScoreFlags,
    engine: Annotated[
        Literal["native", "ray"],
        _cluster(help="native: run in this process. ray: run on a Ray cluster, with a model per actor."),
    ] = "native",
    ray: ClusterFlags,
    model: ModelFlags,
) -> None:
    """Score the rows of a data set.

    Writes one row of results per input row: as JSON lines on standard output or, with -o, in a file. Bad rows
    are listed on standard error or in a second file, and the exit code is then 1. At the end, a summary is
    printed. --resume continues a run that was interrupted.

    A row is a text, a text after a context (--context-column), or a question with choices (--choices-column).
    Logprobs are in nats.

    Examples:
        logprobe dataset texts.jsonl -o scored.parquet
        logprobe dataset 'data/*.jsonl' --context-column q --choices-column choices --answer-column answer
        logprobe dataset texts.txt --lines --summary
    """
    has_windows = scores.window is not None or scores.stride is not None
    truncation = scores.truncation or ("window" if has_windows else "error")
    settings = DataSettings(**data.columns, **asdict(scores) | {"truncation": truncation})
    cluster = RaySettings(**asdict(ray))
    for name in cluster.given if engine != "ray" else ():
        require(False, name, "requires --engine ray; set it, or leave this option out")
    if not data.files:
        raise typer.BadParameter("missing; give files with rows (-: standard input)", param_hint="FILE")
    data.run(settings, model, cluster if engine == "ray" else None)
