"""The command in a process whose files may not grow past a size, or that interrupts itself."""

from __future__ import annotations

import os
import subprocess
import sys

from server_process import PATIENCE_S

# Parts of few rows, so that runs of a second have some. Python ignores the signal of the size limit, and a
# write past it fails as one on a full disk does.
_COMMAND = """
import os, resource, signal, sys
from logprobe.cli import command
from logprobe.analysis.io import journal, sources

journal.ROWS_A_PART = sources.ROWS_A_CALL = 100
journal.SECONDS_A_PART = float("inf")
most_bytes, interrupted_at = map(int, sys.argv[1:3])
if most_bytes:
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
plain, writes = journal.pq.write_table, 0

def write_table(*args, **options):
    global writes
    writes += 1
    plain(*args, **options)
    if writes == interrupted_at:
        os.kill(os.getpid(), signal.SIGINT)

journal.pq.write_table = write_table
sys.argv[1:3] = []
command()
"""


def limited_command(
    *arguments: object, most_bytes: int = 0, interrupted_at: int = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `logprobe` to its end.

    Args:
        arguments: of the command.
        most_bytes: of each file that it writes; 0: no limit.
        interrupted_at: gets SIGINT while it writes this part of an output, counted from 1; 0: none.
        environment: more variables.
    """
    command = [sys.executable, "-c", _COMMAND, str(most_bytes), str(interrupted_at), *map(str, arguments)]
    own = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | environment
    return subprocess.run(command, env=own, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
