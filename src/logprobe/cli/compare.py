"""`logprobe compare`: the same texts through two models, and how far apart their numbers are."""

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
        help="A model, settings after a comma (smollm2,dtype=float16), a baseline (.lpkl), a scored .parquet."
    ),
]
_Other = Annotated[str | None, typer.Argument(help="A model, or where A is scored a scored .parquet.")]
_Save = Annotated[
    str | None, typer.Option("--save", help="Keep A's whole rows in a file that ends in .lpkl; no B then.")
]
_Data = Annotated[
    list[str] | None, typer.Option("--data", help="Texts: txt, jsonl, csv, Parquet, folders, patterns.")
]
_Output = Annotated[str | None, typer.Option("--output", "-o", help="Write one row a position to Parquet.")]
_Plot = Annotated[str | None, typer.Option("--plot", help="Draw the logprobs to a PNG (extra plot).")]
_Bos = Annotated[bool | None, typer.Option("--bos/--no-bos", help="Put BOS before each text, or do not.")]
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
    """Compare what two models give the same tokens: KL, agreement, logprobs, importance ratios.

    A is the reference (a trainer), B what is used in its place (float16, a sampler). Models of one tokenizer
    are compared token by token, others word by word. Settings: those of `logprobe serve`, and lora=FOLDER.
    --device and the like are for the models that do not say otherwise.
    A scored .parquet (--tokens) as A is compared with the model B on the run's own data.

    --save keeps A's whole rows, so that any B is compared with them later: `compare base.lpkl B`.
    """
    texts = None
    if data:
        texts = read_texts(data, text_column, kind=format, by_line=lines, limit=limit)
    if save is not None:
        if b is not None or texts is None:
            raise typer.BadParameter("takes one model, and texts (--data)", param_hint="--save")
        _save(a, texts, save, bos, engine, as_json=as_json)
        return
    comparison = _compared(a, b, texts, bos, engine)
    _write(comparison, output, plot)
    print_figures(comparison.to_dict(), as_json=as_json)


def _compared(
    a: str, b: str | None, texts: list[str] | None, bos: bool | None, engine: dict[str, Any]
) -> Comparison:
    """Two models, or a file in the place of the first or of both."""
    from logprobe.analysis.comparison import compare as compare_models
    from logprobe.analysis.comparison import compare_stored, compare_with_stored

    if b is None:
        raise typer.BadParameter("name the model to compare with", param_hint="B")
    if a.endswith(STORED) and b.endswith(STORED):
        return compare_stored(a, b)
    if texts is None and not a.endswith(BASELINE):
        raise typer.BadParameter("name the texts to compare on", param_hint="--data")
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
            raise typer.BadParameter(f"{pair!r} is no NAME=VALUE", param_hint=named)
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
