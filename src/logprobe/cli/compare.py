"""`logprobe compare`: compare two models on the same texts."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from logprobe.analysis.io.files import check_place
from logprobe.analysis.io.sources import Source, check_apart, find_sources
from logprobe.cli.data import FILES_HELP, FormatOption, LimitOption, LinesOption, TextColumnOption, read_texts
from logprobe.cli.options import BosOption, EngineFlags, JsonOption, LoadFlags, field_names, open_llm
from logprobe.cli.tables import print_figures
from logprobe.errors import nearest_name

if TYPE_CHECKING:
    from logprobe.analysis.comparison import Comparison
    from logprobe.llm import LLM

_input = partial(typer.Option, rich_help_panel="Input")
_output = partial(typer.Option, rich_help_panel="Output")
LORA = "lora"
STORED = ".parquet"
BASELINE = ".lpkl"


def compare(
    a: Annotated[
        str,
        typer.Argument(
            help="Model (settings follow after commas: smollm2,dtype=float16), .lpkl baseline, or scored "
            ".parquet."
        ),
    ],
    b: Annotated[
        str | None, typer.Argument(help="Model; or a scored .parquet, if A is a scored .parquet as well.")
    ] = None,
    *,
    data: Annotated[list[str] | None, _input(help=f"Texts. {FILES_HELP}")] = None,
    text_column: TextColumnOption = "text",
    lines: LinesOption = False,
    format: FormatOption = None,  # noqa: A002 - the flag's name
    limit: LimitOption = None,
    bos: BosOption = None,
    save: Annotated[
        str | None, _output(help="Save A's whole distributions as a baseline (.lpkl), instead of comparing.")
    ] = None,
    output: Annotated[
        str | None, _output("--output", "-o", help="Write one row per position to a Parquet file.")
    ] = None,
    plot: Annotated[
        str | None, _output(help="Plot the log-probabilities to a PNG file (extra plot).")
    ] = None,
    as_json: JsonOption = False,
    loading: LoadFlags,
) -> None:
    """Compare two models on the same texts.

    Prints KL divergence, agreement, differences of logprobs, and importance ratios. A is the reference (e.g.
    the trainer), and B is compared with it (e.g. the same model in float16, or the sampler). Models with the
    same tokenizer are compared per token, others per word. Settings may follow a model's name: they are
    named like flags of `logprobe serve`, or lora (the folder of a LoRA adapter). Flags such as --device apply
    to models without that setting.

    A may also be a .parquet file written by `logprobe dataset --tokens`; B is then a model that scores the
    same data, or another such file. --save stores A's whole distributions in a baseline file, which takes the
    place of A in later comparisons.

    Examples:
        logprobe compare smollm2 smollm2,dtype=bfloat16 --data texts.txt --lines
        logprobe compare smollm2 --save base.lpkl --data texts.txt --lines
        logprobe compare base.lpkl ./student
    """
    engine = vars(loading)
    texts = None
    outputs = [Path(path) for path in (save, output, plot) if path]
    for path in outputs:  # before the models are loaded
        check_place(path)
    sources = find_sources(data, kind="txt") if data else []
    sources += [Source(name=name, format="parquet") for name in (a, b) if name]
    check_apart(sources, outputs)
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
    if comparison.unit == "word":
        note = "the tokenizers differ: compared per word, so there is no KL divergence, agreement or ratio"
        typer.echo(note, err=True)


def _compared(
    a: str, b: str | None, texts: list[str] | None, bos: bool | None, engine: dict[str, Any]
) -> Comparison:
    """Compare two models, a file and a model, or two files, depending on the names `a` and `b`."""
    from logprobe.analysis.comparison import compare as compare_models
    from logprobe.analysis.comparison import compare_stored, compare_with_stored

    if b is None:
        raise typer.BadParameter(
            "missing; name the model to compare A with (or a scored .parquet, if A is one)", param_hint="B"
        )
    if a.endswith(STORED) and b.endswith(STORED):
        return compare_stored(a, b)
    if texts is None and not a.endswith(BASELINE):
        raise typer.BadParameter("missing; name the texts to compare on", param_hint="--data")
    with ExitStack() as stack:
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

    with ExitStack() as stack:
        baseline = save_baseline(_open(model, stack, engine), texts, path, bos=bos)
    print_figures(asdict(baseline) | {"share_of_llama_cpp": baseline.share}, as_json=as_json)


def _open(named: str, stack: ExitStack, engine: dict[str, Any]) -> LLM:
    model, *pairs = named.split(",")
    settings = dict(engine)
    known = field_names(EngineFlags) | {LORA: LORA}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not separator:
            raise typer.BadParameter(f"{pair!r} must be NAME=VALUE", param_hint=named)
        if name.replace("_", "-") not in known:
            near = nearest_name(name.replace("_", "-"), known, 0.6)
            hint = f"did you mean {near}?" if near else f"known: {', '.join(known)}"
            raise typer.BadParameter(f"unknown setting {name!r}; {hint}", param_hint=named)
        settings[known[name.replace("_", "-")]] = int(value) if value.isdecimal() else value
    lora = settings.pop(LORA, None)
    llm = stack.enter_context(open_llm(model, **settings))
    if lora is None:
        return llm
    llm.add_lora(LORA, lora)
    return llm.with_lora(LORA)


def _write(comparison: Comparison, output: str | None, plot: str | None) -> None:
    from logprobe.analysis.io.files import writing

    for path, write in ((output, comparison.to_parquet), (plot, comparison.plot)):
        if path is not None:
            with writing(path):
                write(Path(path))
