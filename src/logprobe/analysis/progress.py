"""Progress bars over bytes of text, rows of data or tokens of requests, with throughput and time."""

from __future__ import annotations

from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rich.console import Console
    from rich.progress import Progress

    from logprobe.engine.request import RequestOutput
    from logprobe.transport.messages import Request

    Advance: TypeAlias = Callable[[int, int], None]


def can_draw(console: Console) -> bool:
    """Return True if a bar is visible: on a terminal, or in a notebook with ipywidgets."""
    if console.is_jupyter:
        return find_spec("ipywidgets") is not None  # without it, rich warns at each bar
    return console.is_terminal


@contextmanager
def _bar(*, shown: bool) -> Iterator[Progress | None]:
    """Show an empty progress bar on stderr, or yield None if no bar is wanted or visible."""
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
    with Progress(*columns, console=console, transient=True) as bar:
        yield bar


@contextmanager
def byte_bar(num_bytes: int | None, *, shown: bool, unit: str = "tokens") -> Iterator[Advance | None]:
    """Show a progress bar over `num_bytes`, or over an unknown number of bytes if None.

    Yields a function to call with the numbers of further bytes and units, or None if no bar can be seen.
    """
    num_units = 0
    with _bar(shown=shown) as bar:
        if bar is None:
            yield None
            return
        task = bar.add_task(f"0 {unit}", total=num_bytes)

        def advance(more_bytes: int, more_units: int) -> None:
            nonlocal num_units
            num_units += more_units
            rate = num_units / (bar.tasks[task].elapsed or 1e-9)
            bar.update(task, advance=more_bytes, description=f"{num_units:,} {unit}, {rate:,.0f}/s")

        yield advance


@contextmanager
def progress_bar(
    requests: Sequence[Request], *, shown: bool
) -> Iterator[Callable[[RequestOutput], None] | None]:
    """Show a progress bar over the tokens of all requests.

    Yields a function to call with each updated output, or None if no bar can be seen.
    """
    with _bar(shown=shown) as bar:
        if bar is None:
            yield None
            return
        tally = Tally(requests)
        task = bar.add_task(f"0/{tally.total:,} tokens", total=tally.total)

        def advance(output: RequestOutput) -> None:
            tally.add(output)
            rate = tally.done / (bar.tasks[task].elapsed or 1e-9)
            progress = f"{tally.done:,}/{tally.total:,} tokens, {rate:,.0f} a second"
            if len(requests) > 1:
                progress += f", {tally.num_ended}/{len(requests)} requests"
            bar.update(task, total=tally.total, completed=tally.done, description=progress)

        yield advance


class Tally:
    """Counts the prompt and completion tokens that were processed, over all requests."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._most = {
            request.request_id: len(request.prompt_token_ids)
            + request.params.num_samples * request.params.max_tokens
            for request in requests
        }
        self._done = dict.fromkeys(self._most, 0)
        self.total = sum(self._most.values())  # decreases when a request ends before its limit
        self.done = 0
        self.num_ended = 0

    def add(self, output: RequestOutput) -> None:
        """Update the progress of one request."""
        name, done = output.request_id, _num_done(output)
        self.done += done - self._done[name]
        self._done[name] = done
        if output.is_finished:
            self.total -= self._most[name] - done
            self.num_ended += 1


def _num_done(output: RequestOutput) -> int:
    num_generated = sum(len(completion.token_ids) for completion in output.outputs)
    if num_generated or output.is_finished:
        return len(output.prompt_token_ids) + num_generated
    return 0 if output.prompt_logprobs is None else len(output.prompt_logprobs)
