"""Run the command in a process with a file size limit, or that interrupts itself."""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import sys
from subprocess import CompletedProcess
from typing import TYPE_CHECKING, Any

from server_process import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

# One process imports the libraries, which takes seconds, and each command runs in a fork of it.
_FORKS = multiprocessing.get_context("forkserver") if hasattr(os, "fork") else multiprocessing.get_context()
_IMPORTS = [
    "logprobe.analysis.distillation.run",
    "logprobe.cli.app",
    "logprobe.engine.backends.start",
    "logprobe.engine.forward.native",
    "transformers",
]


def limited_command(
    *arguments: object, most_bytes: int = 0, interrupted_at: int = 0, **environment: str
) -> CompletedProcess[str]:
    """Run `logprobe` to its end.

    Args:
        arguments: of the command.
        most_bytes: of each file that it writes; 0: no limit.
        interrupted_at: gets SIGINT while it writes this part of an output, counted from 1; 0: none.
        environment: more variables.
    """
    _FORKS.set_forkserver_preload(_IMPORTS)
    words = [str(argument) for argument in arguments]
    received, sent = _FORKS.Pipe(duplex=False)
    process = _FORKS.Process(target=_run, args=(words, most_bytes, interrupted_at, environment, sent))
    process.start()
    sent.close()
    out, err = received.recv() if received.poll(PATIENCE_S) else ("", "")
    process.join(PATIENCE_S)
    assert process.exitcode is not None, "the command did not end"
    return CompletedProcess(words, process.exitcode, out, err)


def _run(
    words: Sequence[str], most_bytes: int, interrupted_at: int, environment: dict[str, str], sent: Connection
) -> None:
    import resource

    from logprobe.analysis.io import journal, sources
    from logprobe.cli.app import run

    os.environ.update(environment)
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2)]
    sys.stdout, sys.stderr = streams
    # Small parts, so that short runs have several. Python ignores the signal of the size limit, and a write
    # beyond it fails like on a full disk.
    journal.ROWS_A_PART = sources.ROWS_A_CALL = 100  # type: ignore[misc]
    journal.SECONDS_A_PART = float("inf")  # type: ignore[misc]
    if most_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
    plain, writes = journal.pq.write_table, 0

    def write_table(*args: Any, **options: Any) -> None:
        nonlocal writes
        writes += 1
        plain(*args, **options)
        if writes == interrupted_at:
            os.kill(os.getpid(), signal.SIGINT)

    journal.pq.write_table = write_table
    try:
        sys.exit(run(words))
    finally:
        sent.send([stream.buffer.getvalue().decode() for stream in streams])  # type: ignore[attr-defined]
