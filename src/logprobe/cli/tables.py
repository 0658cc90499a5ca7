"""Rows of text as an aligned table, the same on a terminal and in a pipe."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.cells import cell_len

from logprobe.cli.rows import visible

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from logprobe.cli.rows import TokenRow, Totals

MISSING = "-"


def token_table(rows: Sequence[TokenRow], num_top: int) -> str:
    """One line a token: position, token, logprob and entropy in nats, rank, alternatives."""
    header = ["#", "token", "logprob", "rank", "entropy"]
    title = f"{num_top} most likely" if num_top >= 0 else "all, most likely first"
    return table([header + ([title] if num_top else []), *map(_cells, range(len(rows)), rows)])


def totals_table(totals: Totals, note: str) -> str:
    """What `score` sums up; `note` says which tokens were scored."""
    return table(
        [
            ["tokens", f"{totals['num_tokens']} ({totals['num_scored']} scored; {note})"],
            ["bytes", f"{totals['num_bytes']} ({totals['num_scored_bytes']} scored)"],
            ["sum", f"{totals['sum_logprob']:.4f} nats"],
            ["mean", _number(totals["mean_logprob"]) + " nats a token"],
            ["perplexity", _number(totals["perplexity"])],
            ["bits per byte", _number(totals["bits_per_byte"])],
        ],
        is_left=[True, True],
    )


def table(lines: Sequence[Sequence[str]], is_left: Sequence[bool] | None = None) -> str:
    """Aligned columns; by default the second and the last are left-aligned, the others are numbers."""
    num_columns = max(map(len, lines))
    sides = is_left or [column in (1, 5) for column in range(num_columns)]
    widths = [
        max(cell_len(line[column]) for line in lines if column < len(line)) for column in range(num_columns)
    ]
    return "\n".join("  ".join(_aligned(line, widths, sides)).rstrip() for line in lines)


def _aligned(line: Sequence[str], widths: Sequence[int], is_left: Sequence[bool]) -> Iterator[str]:
    for cell, width, left in zip(line, widths, is_left, strict=False):
        # Not str.ljust: a wide character takes two cells.
        space = " " * (width - cell_len(cell))
        yield cell + space if left else space + cell


def _cells(position: int, row: TokenRow) -> list[str]:
    alternatives = "  ".join(f"{visible(one['bytes'])} {one['logprob']:.4f}" for one in row["top"])
    numbers = [_number(row["logprob"]), _number(row["rank"]), _number(row["entropy"])]
    return [str(position), visible(row["bytes"]), *numbers, alternatives]


def _number(value: float | None) -> str:
    if value is None:
        return MISSING
    return str(value) if isinstance(value, int) else f"{value:.4f}"
