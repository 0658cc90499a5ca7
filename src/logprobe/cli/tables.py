"""Print values in columns: fitted to the width of a terminal by rich, or unwrapped for files and pipes."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.padding import Padding
from rich.segment import Segment, Segments
from rich.table import Table
from rich.text import Text

from logprobe.analysis.statistics import Mean
from logprobe.cli.rows import visible

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rich.console import ConsoleOptions, RenderResult

    from logprobe.analysis.datasets.run import Summary
    from logprobe.cli.rows import TokenRow, Totals

MISSING = "-"
GAP = 2  # number of cells between columns, and between alternatives
HEADER = ("#", "token", "logprob", "rank", "entropy")
INDENT = (0, 0, 0, 4)
MIN_ALTERNATIVES_WIDTH = 40  # cells; in a narrower column, alternatives are printed below their token
MAX_TOKEN_SHARE = 3  # a token takes at most 1/3 of the width


def console(*, stderr: bool = False, is_forced: bool = False) -> Console:
    """Return a console for a stream; `is_forced` enables colors even for files and with `NO_COLOR`."""
    if is_forced:
        return Console(
            stderr=stderr,
            force_terminal=True,
            no_color=False,
            color_system="truecolor",
            markup=False,
            highlight=False,
        )
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def refuse_vocabulary(num_top: int | None, flag: str) -> None:
    """Refuse to print the whole vocabulary for each token on a terminal.

    Raises:
        BadParameter: `num_top` is -1, and standard output is a terminal.
    """
    if num_top == -1 and console().is_terminal:
        raise typer.BadParameter(
            "-1 prints the whole vocabulary for each token, too much for a terminal; redirect it (> FILE)",
            param_hint=flag,
        )


class Flow:
    """Prints short texts, as many per line as fit; a text that is too long is cut instead of wrapped."""

    def __init__(self, items: Sequence[str]) -> None:
        self._items = items

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        line, width = "", 0
        for item in self._items:
            if line and width + GAP + cell_len(item) > options.max_width:
                yield Text(line, no_wrap=True, overflow="ellipsis")
                line, width = "", 0
            line += " " * GAP * bool(line) + item
            width = cell_len(line)
        yield Text(line, no_wrap=True, overflow="ellipsis")

    def __rich_measure__(self, _: Console, options: ConsoleOptions) -> Measurement:
        widths = [cell_len(item) for item in self._items] or [0]
        whole = Measurement(max(widths), sum(widths) + GAP * (len(widths) - 1))
        return whole.with_maximum(options.max_width)


def print_tokens(rows: Sequence[TokenRow], num_top: int, *, first: int = 0) -> None:
    """Print one line per token: position, token, logprob and entropy in nats, rank, alternatives.

    `first` is the position of the first row; the header is printed only if `first` is 0. On a terminal,
    alternatives take as many lines as they need; on a narrow terminal, they are printed below their token.
    """
    screen = console()
    if screen.is_terminal:
        screen.print(FittedTokens(rows, num_top, first))
    else:
        typer.echo(token_table(rows, num_top, first=first))


class FittedTokens:
    """Prints a table of tokens that is fitted to the width of the terminal."""

    def __init__(self, rows: Sequence[TokenRow], num_top: int, first: int) -> None:
        self._rows = rows
        self._num_top = num_top
        self._cells = [_cells(position, row) for position, row in enumerate(rows, first)]
        self._has_header = not first

    def __rich_console__(self, screen: Console, options: ConsoleOptions) -> RenderResult:
        most = options.max_width // MAX_TOKEN_SHARE
        grid = self._grid(most, has_alternatives=False)
        num_left = options.max_width - Measurement.get(screen, options, grid).maximum
        if not self._num_top or num_left >= MIN_ALTERNATIVES_WIDTH:
            yield self._grid(most, has_alternatives=self._num_top != 0)
            return
        lines = screen.render_lines(grid, options, pad=False)  # one line per row, as no column wraps
        if self._has_header:
            yield Segments(lines.pop(0))
            yield Segment.line()
            yield Padding(_alternatives_title(self._num_top), INDENT)
        for line, row in zip(lines, self._rows, strict=True):
            yield Segments(line)
            yield Segment.line()
            if row["top_logprobs"]:
                yield Padding(Flow(_alternatives(row)), INDENT)

    def _grid(self, most: int, *, has_alternatives: bool) -> Table:
        grid = _grid()
        grid.show_header = self._has_header
        for name in HEADER:
            is_token = name == "token"
            grid.add_column(
                name,
                justify="left" if is_token else "right",
                no_wrap=True,
                overflow="ellipsis",
                max_width=most if is_token else None,
            )
        if has_alternatives:
            grid.add_column(_alternatives_title(self._num_top))
        for cells, row in zip(self._cells, self._rows, strict=True):
            grid.add_row(*map(Text, cells), *([Flow(_alternatives(row))] if has_alternatives else []))
        return grid


def print_facts(lines: Sequence[Sequence[str]], *, err: bool = False) -> None:
    """Print columns of texts; on a terminal, the last column takes as many lines as it needs."""
    screen = console(stderr=err)
    if not screen.is_terminal:
        typer.echo(table(lines, is_left=[True] * len(lines[0])), err=err)
        return
    fitted = _grid()
    fitted.show_header = False
    for _ in lines[0][:-1]:
        fitted.add_column(no_wrap=True)
    fitted.add_column(overflow="fold")
    for line in lines:
        fitted.add_row(*map(Text, line))
    screen.print(fitted)


def _grid() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="")


def token_table(rows: Sequence[TokenRow], num_top: int, *, first: int = 0) -> str:
    """Return the table of `print_tokens` with one unwrapped line per token."""
    header = [*HEADER, *([_alternatives_title(num_top)] if num_top else [])]
    gap = " " * GAP
    lines = [
        [*_cells(position, row), gap.join(_alternatives(row))] for position, row in enumerate(rows, first)
    ]
    return table(lines if first else [header, *lines])


def _alternatives_title(num_top: int) -> str:
    return f"{num_top} most likely" if num_top >= 0 else "all, most likely first"


def totals_lines(totals: Totals, note: str) -> list[list[str]]:
    """Return the lines with the totals that `score` prints; `note` describes the scored tokens."""
    return [
        ["tokens", f"{totals['num_tokens']} ({totals['num_scored']} scored; {note})"],
        ["bytes", f"{totals['num_bytes']} ({totals['num_scored_bytes']} scored)"],
        ["sum", f"{totals['logprob']:.4f} nats"],
        ["mean", _number(totals["mean_logprob"]) + " nats per token"],
        ["perplexity", _number(totals["perplexity"])],
        ["bits per byte", _number(totals["bits_per_byte"])],
    ]


def number_lines(numbers: Mapping[str, float | None]) -> list[list[str]]:
    """Return one line per number, with its name and value."""
    return [[name, MISSING if value is None else f"{value:.6g}"] for name, value in numbers.items()]


def summary_lines(summary: Summary) -> list[list[str]]:
    """Return the lines that print a data set's summary; fields that are None are left out."""
    lines = [["rows", f"{summary.num_rows} scored, {summary.num_bad} bad"]]
    for field in fields(summary)[2:]:
        value = getattr(summary, field.name)
        if value is None:
            continue
        if isinstance(value, Mean):
            lines.append([field.name, str(value)])
        elif isinstance(value, dict):
            lines += [[f"{field.name} {name}", _number(number)] for name, number in value.items()]
        else:
            lines.append([field.name, _number(value)])
    return lines


def print_figures(figures: Mapping[str, Any], *, as_json: bool) -> None:
    """Print values by name, as one JSON object or as `figure_lines`."""
    if as_json:
        typer.echo(json.dumps(figures))
    else:
        print_facts(list(figure_lines(figures)))


def figure_lines(figures: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (name, value) lines; values that are None are left out."""
    for name, value in figures.items():
        if name == "statistics" and value is not None:
            yield from ((title, _figure(**figure)) for title, figure in value.items())
        elif isinstance(value, dict):
            yield from _parts_of(name, value)
        elif value is not None:
            yield name, f"{value:.6g}" if isinstance(value, float) else str(value)


def _parts_of(name: str, parts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield a line with the numbers in a dict, and then the lines for its nested dicts."""
    numbers = {part: value for part, value in parts.items() if isinstance(value, int | float)}
    yield name, "  ".join(f"{part} {number:.6g}" for part, number in numbers.items())
    for part, value in parts.items():
        if isinstance(value, dict):
            yield from _parts_of(part, value)


def _figure(value: float, error: float | None, unit: str | None) -> str:
    spread = "" if error is None else f" ± {error:.6f}"
    return f"{value:.6f}{spread}{' %' if unit else ''}"


def table(lines: Sequence[Sequence[str]], is_left: Sequence[bool] | None = None) -> str:
    """Align columns; by default, the second and sixth are left-aligned and all others right-aligned."""
    num_columns = max(map(len, lines))
    sides = is_left or [column in (1, 5) for column in range(num_columns)]
    widths = [
        max(cell_len(line[column]) for line in lines if column < len(line)) for column in range(num_columns)
    ]
    return "\n".join("  ".join(_aligned(line, widths, sides)).rstrip() for line in lines)


def _aligned(line: Sequence[str], widths: Sequence[int], is_left: Sequence[bool]) -> Iterator[str]:
    for cell, width, left in zip(line, widths, is_left, strict=False):
        # str.ljust would be wrong, because a wide character takes two cells.
        space = " " * (width - cell_len(cell))
        yield cell + space if left else space + cell


def _cells(position: int, row: TokenRow) -> list[str]:
    numbers = [_number(row["logprob"]), _number(row["rank"]), _number(row["entropy"])]
    return [str(position), visible(row["bytes"]), *numbers]


def _alternatives(row: TokenRow) -> list[str]:
    return [f"{visible(entry['bytes'])} {entry['logprob']:.4f}" for entry in row["top_logprobs"]]


def _number(value: float | None) -> str:
    if value is None:
        return MISSING
    return str(value) if isinstance(value, int) else f"{value:.4f}"
