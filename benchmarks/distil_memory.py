"""`logprobe distil` over many rows: how much memory it holds as it goes, whole, or killed and resumed.

Makes a text file of so many lines and a tiny random model, runs the command on them in a process of its own,
and reads from outside how far into the file it is and how much of it is resident. With `--kill-at 0.5` the
process is killed at that share of the rows, and another one resumes the run. The pool of keys and values is
small, so that it is full before the first share is reached. docs/distil.md states the maximum of a run; the
tiny model is the tests', which `PYTHONPATH=tests` brings within reach.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from machine import machine_facts

from conftest import save_tiny_llama

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SHARES = (0.01, 0.1, 0.5, 1.0)
TOP = 8
KV_BYTES = 1 << 22
EVERY_S = 0.02
MB = 1e6


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What was seen of the process at one time."""

    num_rows: int  # read so far
    seconds: float  # since it began
    num_bytes: int  # resident


def line_of(row: int) -> str:
    """Lines are equally long, so that a place in the file is a number of rows."""
    return f"{row:08d} the cat and the dog\n"


def write_text(path: Path, num_rows: int) -> None:
    """So many lines, none twice."""
    with path.open("w", encoding="ascii") as file:
        file.writelines(map(line_of, range(num_rows)))


def resident_bytes(pid: int) -> int:
    """What a process holds now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def rows_read(pid: int, text: Path) -> int | None:
    """How many lines of a file a process has read; None while it is not open."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if link.readlink() == text:
                about = Path(f"/proc/{pid}/fdinfo/{link.name}").read_text()
                return int(about.split("pos:")[1].split()[0]) // len(line_of(0))
        except FileNotFoundError:  # closed since
            continue
    return None


def samples(process: subprocess.Popen[bytes], text: Path) -> Iterator[Sample]:
    """What is seen of a process until it ends."""
    began, num_rows = time.monotonic(), 0
    while process.poll() is None:
        try:
            num_rows = rows_read(process.pid, text) or num_rows
            num_bytes = resident_bytes(process.pid)
        except (FileNotFoundError, PermissionError, ProcessLookupError):  # it ends
            break
        if num_bytes:
            yield Sample(num_rows=num_rows, seconds=time.monotonic() - began, num_bytes=num_bytes)
        time.sleep(EVERY_S)


def at_shares(seen: Sequence[Sample], num_rows: int, shares: Sequence[float] = SHARES) -> list[Sample]:
    """The first sample at each share of the rows that was reached; at all of them, the last one."""
    reached = []
    for share in shares:
        those = [sample for sample in seen if sample.num_rows >= share * num_rows]
        if those:
            reached.append(those[-1] if share == 1 else those[0])
    return reached


def run(
    model: Path, text: Path, out: Path, flags: Sequence[str], *, stop_at: float = math.inf
) -> list[Sample]:
    """Let the command run, to its end or until it has read so many rows; what was seen of it.

    Raises:
        SystemExit: it failed.
    """
    command = [sys.executable, "-m", "logprobe", "distil", str(text), "--lines", "-o", str(out)]
    command += [
        "--model",
        str(model),
        "--logprobs",
        str(TOP),
        "--kv-cache-memory-bytes",
        str(KV_BYTES),
        *flags,
    ]
    seen = []
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        for sample in samples(process, text):
            seen.append(sample)
            if sample.num_rows >= stop_at:
                process.kill()
                return seen
    if process.returncode:
        raise SystemExit(f"logprobe distil: exit code {process.returncode}")
    whole = text.stat().st_size // len(line_of(0))  # it may have closed the file between two looks
    return [*seen[:-1], replace(seen[-1], num_rows=whole)]


def rows_written(out: Path) -> int:
    """Rows that whole parts of an unfinished run answer."""
    return max((int(part.stem.split("-")[1]) for part in out.glob("*.parts/*.parquet")), default=0)


def measure(num_rows: int, kill_at: float | None, flags: Sequence[str]) -> dict[str, Any]:
    """Each process's samples, and what the run came to."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        model = folder / "model"
        model.mkdir()
        save_tiny_llama(model)
        text, few, out = folder / "rows.txt", folder / "few.txt", folder / "teacher"
        write_text(text, num_rows)
        write_text(few, 100)
        run(model, few, folder / "first", [])  # compiles, proves and keeps the model
        seen = {}
        if kill_at is not None:
            seen["killed"] = run(model, text, out, flags, stop_at=kill_at * num_rows)
            written = rows_written(out)
            seen[f"resumed after {written:,} rows"] = run(model, text, out, [*flags, "--resume"])
        else:
            seen["whole"] = run(model, text, out, flags)
        summary = json.loads((out / "run.json").read_text())["summary"]
        size = sum(part.stat().st_size for part in (out / "data").iterdir())
    return {"num_rows": num_rows, "summary": summary, "num_bytes": size, "runs": seen}


def lines(measured: dict[str, Any]) -> Iterator[str]:
    """The table: a line a share that each process reached, and the most that was seen of it."""
    yield f"{'process':32}{'rows':>12}{'seconds':>10}{'resident MB':>13}"
    for name, seen in measured["runs"].items():
        for sample in at_shares(seen, measured["num_rows"]):
            yield f"{name:32}{sample.num_rows:>12,}{sample.seconds:>10.1f}{sample.num_bytes / MB:>13.1f}"
        most = max(sample.num_bytes for sample in seen)
        yield f"{name:32}{'the most':>12}{seen[-1].seconds:>10.1f}{most / MB:>13.1f}"
    yield f"{measured['summary']['num_rows']:,} rows in {measured['num_bytes'] / MB:.1f} MB of Parquet"


def main() -> None:
    """Measure, and print the table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--kill-at", type=float, help="kill the run at this share of the rows, and resume it")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("flags", nargs="*", help="after --: further flags of the command")
    given = parser.parse_args()
    measured = measure(given.rows, given.kill_at, given.flags)
    if given.json:
        runs = {
            name: [vars(sample) for sample in at_shares(seen, given.rows)]
            for name, seen in measured["runs"].items()
        }
        print(json.dumps(measured | {"runs": runs, "machine": machine_facts()}))
    else:
        print(*lines(measured), sep="\n")


if __name__ == "__main__":
    main()
