"""The CPU kernels compiled before they are needed: in processes of their own on all cores, once a machine.

Before it: the kernels that a model takes, by name. After it: their machine code on the disk, from which every
process links them. What cannot be kept on the disk is compiled where it is first used.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Final

from logprobe.kernels.machine_code import folder_to_write
from logprobe.kernels.threads.parallel import worker_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

# Name -> about how long a core compiles it, s: how the work is shared out, and what is told of it. Neighbours
# have much in common, which a process compiles once.
BASE: Final[Mapping[str, float]] = {
    "extraction.rows": 8,
    "draw.rows": 4,
    "attention.rows": 4,
    "layers.rotary": 1,
    "layers.norm": 0.5,
    "layers.gate": 1,
    "layers.store": 0.5,
    "threads.series": 0.5,
    "attention.chunk": 6,
}
PANELS: Final = "layers.panels."
PANELS_S: Final = 5.0  # the kernel of one form of weights
MOST_PROCESSES: Final = 6  # each takes a third of a gigabyte and a second to start
MAIN: Final = "import sys; from logprobe.kernels.compiling import compile_all; compile_all(sys.argv[1:])"

logger = logging.getLogger("logprobe")


def kernel_names(forms: Iterable[str] = ()) -> list[str]:
    """All that a model takes whose weights are kept in these forms."""
    return [*BASE, *(f"{PANELS}{form}" for form in sorted(set(forms)))]


def compile_all(names: Iterable[str]) -> None:
    """Compile kernels here, and print each one's name when it is done."""
    for name in names:
        worker_of(name).compile()
        print(name, flush=True)  # noqa: T201 - for the process that waits


@contextmanager
def compiled_beside(names: Iterable[str]) -> Iterator[list[str]]:
    """Compile those of some kernels that are not on the disk, while the block does other work; then wait.

    A terminal shows a bar. One process of a machine compiles at a time. Yields the names of what is compiled.
    """
    missing = _missing(names)
    folder = folder_to_write() if missing else None
    if folder is None:
        if missing:
            logger.warning("CPU kernels are compiled in every process; set NUMBA_CACHE_DIR to keep them")
        yield missing
        return
    from filelock import FileLock

    with FileLock(folder / "logprobe-kernels.lock"):
        missing = _missing(missing)  # another process may have compiled some meanwhile
        with _processes(missing) as done:
            yield missing
            _show(done, len(missing))


def _missing(names: Iterable[str]) -> list[str]:
    """The names of those kernels that are not on the disk."""
    return [name for name in names if not worker_of(name).is_stored()]


@contextmanager
def _processes(names: list[str]) -> Iterator[IO[str]]:
    """Processes that compile kernels, as the stream on which they tell what is done; ended with the block."""
    shares = _shares(names, min(os.cpu_count() or 1, MOST_PROCESSES))
    if shares:
        seconds = max(sum(map(_seconds, share)) for share in shares)
        message = "compiling %d CPU kernels, once, in %d processes: about %.0f s"
        logger.warning(message, len(names), len(shares), seconds)
    reader, writer = os.pipe()
    path = os.pathsep.join(filter(None, sys.path))  # what can be imported here can be imported there
    processes = [
        subprocess.Popen(  # noqa: S603 - this interpreter
            [sys.executable, "-P", "-c", MAIN, *share],
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=writer,
        )
        for share in shares
    ]
    os.close(writer)
    try:
        with os.fdopen(reader, encoding="utf-8") as done:
            yield done
    except BaseException:
        for process in processes:
            process.terminate()
        raise
    finally:
        codes = [process.wait() for process in processes]
    if any(codes):
        logger.warning("some CPU kernels could not be compiled ahead; they are compiled where they are used")


def _seconds(name: str) -> float:
    return BASE.get(name, PANELS_S)


def _shares(names: list[str], num_processes: int) -> list[list[str]]:
    """The kernels of each process: neighbours, as much for one as for another."""
    total, before = sum(map(_seconds, names)), 0.0
    shares: list[list[str]] = [[] for _ in range(num_processes)]
    for name in names:
        middle = before + _seconds(name) / 2
        shares[int(middle / total * num_processes)].append(name)
        before += _seconds(name)
    return [share for share in shares if share]


def _show(done: IO[str], num_kernels: int) -> None:
    """Wait until every process has ended, with a bar where somebody can see it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("compiling kernels", total=num_kernels)
        for line in done:
            bar.update(task, advance=1, description=f"compiling kernels: {line.strip()}")
