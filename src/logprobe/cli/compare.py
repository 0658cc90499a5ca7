"""`logprobe compare`: the same texts through two models, and how far apart their numbers are."""

from __future__ import annotations

import json
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from logprobe.cli.options import JsonOption, flags_for, open_llm, takes_engine
from logprobe.cli.tables import print_facts
from logprobe.errors import InputError, OutputError
from logprobe.scoring.data.sources import Format, find_sources, read_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from logprobe.llm import LLM
    from logprobe.scoring.comparison import Comparison

_Model = Annotated[
    str,
    typer.Argument(help="A model, settings after a comma (smollm2,dtype=float16), or a scored .parquet."),
]
_Data = Annotated[
    list[str] | None, typer.Option("--data", help="Texts: txt, jsonl, csv, Parquet, folders, patterns.")
]
_Column = Annotated[str, typer.Option("--text-column", help="The column of the texts.")]
_Lines = Annotated[bool, typer.Option("--lines", help="Each line of a text file is a text.")]
_Format = Annotated[Format | None, typer.Option("--format", help="What the files are, whatever their names.")]
_Limit = Annotated[int | None, typer.Option("--limit", help="Take so many texts.")]
_Output = Annotated[str | None, typer.Option("--output", "-o", help="Write one row a position to Parquet.")]
_Plot = Annotated[str | None, typer.Option("--plot", help="Draw the logprobs to a PNG (extra plot).")]
_Bos = Annotated[bool | None, typer.Option("--bos/--no-bos", help="Put BOS before each text, or do not.")]
LORA = "lora"
STORED = ".parquet"


@takes_engine
def compare(
    a: _Model,
    b: _Model,
    *,
    data: _Data = None,
    text_column: _Column = "text",
    lines: _Lines = False,
    format: _Format = None,  # noqa: A002 - the flag's name
    limit: _Limit = None,
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
    """
    if a.endswith(STORED) and b.endswith(STORED):
        from logprobe.scoring.comparison import compare_stored

        comparison = compare_stored(a, b)
    else:
        if not data:
            raise typer.BadParameter("name the texts to compare on", param_hint="--data")
        rows = read_rows(find_sources(data, kind=format, by_line=lines), [text_column])
        texts = [_text(row.values.get(text_column), row) for row in islice(rows, limit)]
        comparison = (_compare_file if a.endswith(STORED) else _compare_models)(a, b, texts, bos, engine)
    _write(comparison, output, plot)
    if as_json:
        typer.echo(json.dumps(comparison.to_dict()))
    else:
        print_facts(list(_lines_of(comparison.to_dict())))


def _compare_models(a: str, b: str, texts: list[str], bos: bool | None, engine: dict[str, Any]) -> Comparison:
    from logprobe.scoring.comparison import compare as compare_models

    with ExitStack() as stack, flags_for():
        return compare_models(_open(a, stack, engine), _open(b, stack, engine), texts, bos=bos)


def _compare_file(a: str, b: str, texts: list[str], bos: bool | None, engine: dict[str, Any]) -> Comparison:
    from logprobe.scoring.comparison import compare_with_stored

    with ExitStack() as stack, flags_for():
        return compare_with_stored(a, _open(b, stack, engine), texts, bos=bos)


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


def _text(value: Any, row: Any) -> str:
    if row.problem is not None or not isinstance(value, str):
        raise InputError(f"{row.source}, line {row.line}: {row.problem or 'its text is no text'}")
    return value


def _write(comparison: Comparison, output: str | None, plot: str | None) -> None:
    writers = {output: comparison.to_parquet, plot: comparison.plot}
    for path, write in writers.items():
        if path is None:
            continue
        try:
            write(Path(path))
        except OSError as error:
            raise OutputError(f"{path}: cannot be written ({error.strerror or error})") from error


def _lines_of(figures: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The figures in the order in which they are read; those that have no meaning are left out."""
    for name, value in figures.items():
        if isinstance(value, dict):
            yield name, "  ".join(f"{part} {number:.6g}" for part, number in value.items())
        elif value is not None:
            yield name, f"{value:.6g}" if isinstance(value, float) else str(value)
