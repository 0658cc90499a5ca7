"""`logprobe compare`: compare two models on the same texts."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from logprobe.cli.data import ColumnOption, FormatOption, LimitOption, LinesOption, read_texts
from logprobe.cli.options import JsonOption, flags_for, open_llm, takes_engine
from logprobe.cli.tables import print_figures

if TYPE_CHECKING:
    from logprobe.analysis.comparison import Comparison
    from logprobe.llm import LLM

_Model = Annotated[
    str,
    typer.Argument(
        help="Model, with settings after commas (smollm2,dtype=float16), baseline .lpkl, or scored .parquet."
    ),
]
_Other = Annotated[
    str | None, typer.Argument(help="Model; or a scored .parquet, if A is a scored .parquet as well.")
]
_Save = Annotated[
    str | None, typer.Option("--save", help="Save A's full rows as a baseline (.lpkl), instead of comparing.")
]
_Data = Annotated[
    list[str] | None, typer.Option("--data", help="Texts: txt, jsonl, csv, Parquet, folders, glob patterns.")
]
_Output = Annotated[
    str | None, typer.Option("--output", "-o", help="Write one row per position to a Parquet file.")
]
_Plot = Annotated[
    str | None, typer.Option("--plot", help="Plot the log-probabilities to a PNG file (extra plot).")
]
_Bos = Annotated[
    bool | None,
    typer.Option("--bos/--no-bos", help="Start each text with BOS, or not; default: as the tokenizer does."),
]
LORA = "lora"
STORED = ".parquet"
BASELINE = ".lpkl"


@takes_engine
def compare(
    a: _Model,
    b: _Other = None,
    *,
    save: _Save = None,
    data: _Data = None,
    text_column: ColumnOption = "text",
    lines: LinesOption = False,
    format: FormatOption = None,  # noqa: A002 - the flag's name
    limit: LimitOption = None,
    bos: _Bos = None,
    output: _Output = None,
    plot: _Plot = None,
    as_json: JsonOption = False,
    **engine: Any,
) -> None:
    """Compare two models on the same tokens.

    Prints KL divergence, agreement, differences of logprobs, and importance ratios. A is the reference (e.g.
    the trainer), B the model that is used instead (e.g. in float16, or the sampler). Models with the same
    tokenizer are compared per token, others per word. Settings after a model's name are those of `logprobe
    serve`, and lora=FOLDER; flags such as --device apply to models without that setting.

    A .parquet file written by `logprobe score --tokens` as A is compared with model B on the same data.

    --save stores A's full rows, to be compared with any model later: `compare base.lpkl B`.
    """
    texts = None
    if data:
        texts = read_texts(data, text_column, kind=format, by_line=lines, limit=limit)
    if save is not None:
        if b is not None or texts is None:
            raise typer.BadParameter("requires one model and texts (--data)", param_hint="--save")
        _save(a, texts, save, bos, engine, as_json=as_json)
        return
    comparison = _compared(a, b, texts, bos, engine)
    _write(comparison, output, plot)
    print_figures(comparison.to_dict(), as_json=as_json)


def _compared(
    a: str, b: str | None, texts: list[str] | None, bos: bool | None, engine: dict[str, Any]
) -> Comparison:
    """Compare two models, a file and a model, or two files, depending on the names `a` and `b`."""
    from logprobe.analysis.comparison import compare as compare_models
    from logprobe.analysis.comparison import compare_stored, compare_with_stored

    if b is None:
        raise typer.BadParameter("missing; name the model to compare with", param_hint="B")
    if a.endswith(STORED) and b.endswith(STORED):
        return compare_stored(a, b)
    if texts is None and not a.endswith(BASELINE):
        raise typer.BadParameter("missing; name the texts to compare on", param_hint="--data")
    with ExitStack() as stack, flags_for():
        if a.endswith(BASELINE):
            from logprobe.analysis.baseline.models import compare_with_baseline

            return compare_with_baseline(a, _open(b, stack, engine), texts, bos=bos)
        assert texts is not None
        if a.endswith(STORED):
            return compare_with_stored(a, _open(b, stack, engine), texts, bos=bos)
        return compare_models(_open(a, stack, engine), _open(b, stack, engine), texts, bos=bos)


def _save(
    model: str, texts: list[str], path: str, bos: bool | None, engine: dict[str, Any], *, as_json: bool
) -> None:
    from logprobe.analysis.baseline.models import save_baseline

    with ExitStack() as stack, flags_for():
        baseline = save_baseline(_open(model, stack, engine), texts, path, bos=bos)
    print_figures(asdict(baseline) | {"share_of_llama_cpp": baseline.share}, as_json=as_json)


def _open(named: str, stack: ExitStack, engine: dict[str, Any]) -> LLM:
    model, *pairs = named.split(",")
    settings = dict(engine)
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator:
            raise typer.BadParameter(f"{pair!r} must be NAME=VALUE", param_hint=named)
        settings[name] = int(value) if value.isdecimal() else value
    lora = settings.pop(LORA, None)
    llm = stack.enter_context(open_llm(model, **settings))
    if lora is None:
        return llm
    llm.add_lora(LORA, lora)
    return llm.with_lora(LORA)


def _write(comparison: Comparison, output: str | None, plot: str | None) -> None:
    from logprobe.analysis.io.tables import writing

    for path, write in ((output, comparison.to_parquet), (plot, comparison.plot)):
        if path is not None:
            with writing(path):
                write(Path(path))
