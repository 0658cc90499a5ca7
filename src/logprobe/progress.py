"""Progress bars on stderr for long work."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from logprobe.engine.request import Request, RequestOutput


@contextmanager
def progress_bar(
    requests: Sequence[Request], *, shown: bool
) -> Iterator[Callable[[RequestOutput], None] | None]:
    """A bar over the tokens of all requests; call what it yields with each output that has grown.

    None is yielded where there is nobody to show it to.
    """
    if not shown:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not (console.is_terminal or console.is_jupyter):
        yield None
        return
    tally = Tally(requests)
    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(f"0/{tally.total:,} tokens", total=tally.total)

        def advance(output: RequestOutput) -> None:
            tally.add(output)
            rate = tally.done / (bar.tasks[task].elapsed or 1e-9)
            told = f"{tally.done:,}/{tally.total:,} tokens, {rate:,.0f} a second"
            if len(requests) > 1:
                told += f", {tally.num_ended}/{len(requests)} requests"
            bar.update(task, total=tally.total, completed=tally.done, description=told)

        yield advance


class Tally:
    """How far requests are, in tokens of prompts and completions."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._most = {
            one.request_id: len(one.prompt_token_ids) + one.params.num_samples * one.params.max_tokens
            for one in requests
        }
        self._done = dict.fromkeys(self._most, 0)
        self.total = sum(self._most.values())  # falls where a request ends before its limit
        self.done = 0
        self.num_ended = 0

    def add(self, output: RequestOutput) -> None:
        """Take in how far a request has come."""
        name, done = output.request_id, _num_done(output)
        self.done += done - self._done[name]
        self._done[name] = done
        if output.is_finished:
            self.total -= self._most[name] - done
            self.num_ended += 1


def _num_done(output: RequestOutput) -> int:
    num_generated = sum(len(one.token_ids) for one in output.outputs)
    if num_generated or output.is_finished:
        return len(output.prompt_token_ids) + num_generated
    return 0 if output.prompt_logprobs is None else len(output.prompt_logprobs)
