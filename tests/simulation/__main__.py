"""`make simulate SECONDS=60 SEED=...`: simulate fresh seeds until the time is over.

A failing plan is reduced and printed as a test that can be pasted into `test_corpus.py` (exit code 1). If one
of the events in `world.SOMETIMES` has never happened, the run fails, too (exit code 2).
"""

from __future__ import annotations

import argparse
import secrets
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from simulation.plan import draw_plan
from simulation.shrink import shrink
from simulation.world import SOMETIMES, simulate

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE = Path(__file__).parents[2] / "docs/dev/testing.md"
SHRINK_S = 120.0


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, prog="simulation")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, help="the first seed; the others follow it")
    parser.add_argument("--write", action="store_true", help=f"write the figures into {PAGE.name}")
    parser.add_argument("--no-shrink", action="store_true", help="do not reduce a plan that fails")
    options = parser.parse_args()
    first = secrets.randbelow(10**9) if options.seed is None else options.seed
    print(f"seeds from {first}", flush=True)
    began_s = time.monotonic()
    sometimes: Counter[str] = Counter()
    num_seeds = num_steps = num_turns = 0
    while time.monotonic() - began_s < options.seconds:
        plan = draw_plan(first + num_seeds)
        try:
            outcome = simulate(plan)
        except Exception as error:  # noqa: BLE001 - any failure is a fault
            print("".join(traceback.format_exception(error)))
            print(
                f"seed {plan.seed} failed after {time.monotonic() - began_s:.1f} s: {short(error)}",
                flush=True,
            )
            if not options.no_shrink:
                print(shrink(plan, timer(SHRINK_S)).code())
            return 1
        num_seeds += 1
        num_steps += outcome.num_steps
        num_turns += outcome.num_turns
        sometimes += outcome.sometimes
    seconds = time.monotonic() - began_s
    lines = [
        "| what | number |",
        "|---|---|",
        f"| seconds | {seconds:.0f} |",
        f"| seeds, from {first} | {num_seeds:,} |",
        f"| steps of an engine | {num_steps:,} |",
        f"| turns of a thread | {num_turns:,} |",
        *(f"| {what} | {sometimes[what]:,} |" for what in sorted(SOMETIMES)),
    ]
    print("\n".join(lines))
    if options.write:
        insert("simulation", lines)
    if never := sorted(what for what in SOMETIMES if not sometimes[what]):
        print(f"never happened: {', '.join(never)}")
        return 2
    return 0


def timer(seconds: float) -> Callable[[], bool]:
    """Return a function that returns True once the time is over."""
    until_s = time.monotonic() + seconds
    return lambda: time.monotonic() > until_s


def short(error: BaseException) -> str:
    """Return the first line of an error, at most 120 characters."""
    return f"{type(error).__name__}: {error}".partition("\n")[0][:120]


def insert(name: str, lines: list[str]) -> None:
    """Replace what stands between the marks of this name in the page."""
    text = PAGE.read_text()
    before, begin, rest = text.partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition(f"<!-- end of {name} -->\n")
    assert begin, f"{PAGE} has no mark {name}"
    assert end, f"{PAGE} has no mark end of {name}"
    PAGE.write_text(before + begin + "\n" + "\n".join(lines) + "\n\n" + end + after)


if __name__ == "__main__":
    sys.exit(main())
