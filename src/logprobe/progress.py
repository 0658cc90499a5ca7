"""Progress bars on stderr for long work."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from logprobe.engine.request import RequestOutput


@contextmanager
def progress_bar(total: int, *, shown: bool) -> Iterator[Callable[[RequestOutput], None]]:
    """A bar over `total` requests; call what it yields with each output that has ended."""
    if not shown:
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("requests", total=total, rate="")
        num_tokens = 0

        def advance(output: RequestOutput) -> None:
            nonlocal num_tokens
            num_tokens += len(output.prompt_token_ids) + sum(len(one.token_ids) for one in output.outputs)
            elapsed = bar.tasks[task].elapsed or 1e-9
            bar.update(task, advance=1, rate=f"{num_tokens / elapsed:,.0f} tokens/s")

        yield advance
