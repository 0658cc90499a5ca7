"""A progress bar over bytes of text or rows of data, with throughput and remaining time."""

from __future__ import annotations

from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import Console

    Advance: TypeAlias = Callable[[int, int], None]


def can_draw(console: Console) -> bool:
    """Return True if a bar is visible: on a terminal, or in a notebook with ipywidgets."""
    if console.is_jupyter:
        return find_spec("ipywidgets") is not None  # without it, rich warns at each bar
    return console.is_terminal


@contextmanager
def byte_bar(num_bytes: int | None, *, shown: bool, unit: str = "tokens") -> Iterator[Advance | None]:
    """Show a progress bar over `num_bytes`, or over an unknown number of bytes if None.

    Yields a function to call with the numbers of further bytes and units, or None if no bar can be seen.
    """
    if not shown:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not can_draw(console):
        yield None
        return
    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), TimeRemainingColumn())
    num_units = 0
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(f"0 {unit}", total=num_bytes)

        def advance(more_bytes: int, more_units: int) -> None:
            nonlocal num_units
            num_units += more_units
            rate = num_units / (bar.tasks[task].elapsed or 1e-9)
            bar.update(task, advance=more_bytes, description=f"{num_units:,} {unit}, {rate:,.0f}/s")

        yield advance
