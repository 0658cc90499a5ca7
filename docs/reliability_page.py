"""Print docs/reliability.md from the server's limits and the newest results of the attack and stress runs."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from harness import number
from report import machine, newest_results

from logprobe.config import EngineConfig
from logprobe.engine.plan.shares import LARGE_PART, PLACES_PART
from logprobe.processors.builtin.grammar import MAX_STEP_ITEMS
from logprobe.server.http.workers import MAX_JOBS, NUM_THREADS
from route_audit import AUDIT, READ

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

BENCH = "bench_attacks"

HEADER = """# Reliability

How a server behaves under load and under attack, for the person who operates it: what it guarantees, how
clients share it, what bounds a request, and what was measured. Access control is described in
[SECURITY.md](../SECURITY.md), the installation in [deployment](deploy.md). `make docs` writes this page
from the server's limits and the recorded results.

## Guarantees

"""

GUARANTEES = {
    "no request ends the process, delays `/health` for other clients, or leaves memory behind": (
        "`tests/server/attacks`, `benchmarks/bench_attacks.py`"
    ),
    "an exception in a logits processor ends its own request only": (
        "`tests/server/attacks/test_processors.py`"
    ),
    "a step that hangs makes `/health` return 503, and every waiting request ends with an error": (
        "`tests/server/attacks/test_processors.py`"
    ),
    "an engine process that does not answer makes `/ready` fail, its requests end with an error, and other "
    "replicas continue": "`tests/engine/backends/process/test_server.py`",
    "no web page of another origin can read from or control the server": (
        "`tests/server/attacks/test_browsers.py`, `tests/web`"
    ),
    "every request gets one result or one error, and its slots, handles and memory are freed": (
        "`tests/torture`"
    ),
    "records, Arrow and Parquet files, checkpoints, LoRA folders and replies of other servers are validated; "
    "a bad one raises an error and cannot make the process allocate what it claims": (
        "`tests/records/forms`, `tests/models`, `tests/next_token/test_remote_hostile.py`"
    ),
}

SHARING = """
## How clients share the server

A client is identified by its API key, or by its address if the server has no keys. One HTTP request, with
all its prompts and samples, is one call. A single call, or calls that fit into one step together
(`max_batch_tokens`, {step} tokens), run in order of arrival with all resources. Otherwise:

- **Running completions** get a token in every step.
- **Large calls**, with more work than one step, together get 1/{large} of each step ({part} tokens and as
  many prompt rows) while others run, and wait for each other in order of arrival.
- **Small calls** get their first token after at most three steps. A call that holds more than its share
  of the running places (`max_batch_rows`, {places}) or of the KV cache is preempted for them. A share is
  the total divided by the number of calls, for places at least 1/{most}.
- **Between clients**, places and cache are divided first, then between the calls of each client; prompts
  of the client with the least work run first. Many calls of one client count like one.
- **Limits.** One client may use all of `max_requests`, `max_tokens_in_flight` and `max_logprob_bytes`; an
  eighth of each is added for clients that hold no more than an eighth of it.
- **Waiting.** Requests that find no room wait in order of arrival: at most `max_waiting` per client and
  for `wait_timeout_s`, then they get 429 with `Retry-After`. Waiting requests keep only the bytes of
  their body. A draining server answers 503.
- **Reading and writing.** Bodies are read by {threads} threads that take turns between clients, with at
  most {jobs} jobs queued or running; one more gets 429. Replies are written by as many other threads.

A grammar may use {items} parser items per token; an ambiguous grammar that needs more fails its own
request (400).

"""

BOUNDS = """## What bounds each route

The settings that limit the work of a request; [SECURITY.md](../SECURITY.md#limits-of-the-server) explains
them. Every route with a body is also bounded by {body}.
The number of connections is left to the operating system, and `write_timeout_s` starts again whenever a
reader takes data.

"""

NOT_COVERED = """
## Not covered

- The duration of a step: tokens of all running completions are computed together, so a token takes longer
  when more of them run.
- Clients without keys that share an address count as one, and a client with many addresses as many.
- A client that closes its half of the connection counts as gone: it gets a 400, and its request ends.
- Compression in valid files: a Parquet file may repeat columns, up to 8 positions per byte.
- Limits that the operator removes (`--max-logprobs -1`, `--allowed-host '*'`), and logits processors,
  which are the operator's own code.
"""

MEASURED = """
## Measured: delay for other clients

`benchmarks/bench_attacks.py` runs {count} kinds of attack one after the other, on two cores shared with
the attacker, for three layouts: an engine thread (the default), an engine process, two replicas. The
longest wait of another client during any of them, ms, median over the rounds:

{attacks}
Next token of another client while a heavy request runs, ms:

{beside}
Memory of all processes after the attacks, compared with before: {memory}.

Measured on {on}.
"""
TORTURE = """
## Measured: stress test

`make torture` sends requests of every kind from twelve clients, some of which leave, read slowly or send
invalid bodies, while weights are replaced and engine processes are killed, stopped or starved. An error
is a reply that states one, or a stream that ends early because its process was killed. Afterwards the
replies are requested again alone and compared bit by bit.

{layouts}
Drawn tokens scored again with {model}, with cached prefixes, without, and in chunks: {differing} of
{numbers} numbers differ.

Measured on {on}.
"""
LAYOUT_NAMES = {"logprobe": "thread", "an engine process": "process", "two replicas": "replicas"}
HEALTH, COMPLETION = "slowest health during ", "another client's slowest completion during "
MEMORY, NEIGHBOUR = "memory after all of them", "a neighbour's next token beside "


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [f"| {' | '.join(row)} |" for row in (heads, *rows)]
    return "\n".join([lines[0], "|---" * len(heads) + "|", *lines[1:]]) + "\n"


def bounds() -> str:
    """Return the table of the settings that bound each route; routes with the same settings share a row."""
    settings: dict[str, dict[str, None]] = {}
    body: list[str] = []
    for row in AUDIT:
        names = re.findall("`([^`]*)`", row.bounds)
        if row.what == READ:
            body = names
            continue
        for route in row.what:
            title = route if route.startswith("any path") else f"`{route}`"
            settings.setdefault(title, {}).update(dict.fromkeys(names))
    routes: dict[tuple[str, ...], list[str]] = {}
    for title, names_of in settings.items():
        own = tuple(name for name in names_of if title.strip("`") not in READ or name not in body)
        if own:
            routes.setdefault(own, []).append(title)
    rows = [("; ".join(titles), _listed(names)) for names, titles in routes.items()]
    return BOUNDS.format(body=_listed(body)) + table(("route", "settings"), rows)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def measured(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the largest figures of the newest attack run."""
    if BENCH not in results:
        return ""
    figures = {figure["name"]: figure["spreads"] for figure in results[BENCH]["figures"]}
    layouts = list(next(iter(figures.values())))

    def largest(beginning: str) -> Iterator[str]:
        for layout in layouts:
            medians = {
                name.removeprefix(beginning): spread[layout]["median"]
                for name, spread in figures.items()
                if name.startswith(beginning)
            }
            worst = max(medians, key=lambda name: medians[name])
            yield f"{number(medians[worst])} ({worst})"

    names = [LAYOUT_NAMES[layout] for layout in layouts]
    attacks = table(
        ("", *names), [("`/health`", *largest(HEALTH)), ("a completion of 4 tokens", *largest(COMPLETION))]
    )
    beside = table(
        ("heavy request", *names),
        [
            (name.removeprefix(NEIGHBOUR), *(number(spread[layout]["median"]) for layout in layouts))
            for name, spread in figures.items()
            if name.startswith(NEIGHBOUR)
        ],
    )
    memory = ", ".join(
        f"{number(figures[MEMORY][layout]['median'])} % ({LAYOUT_NAMES[layout]})" for layout in layouts
    )
    return MEASURED.format(
        count=sum(name.startswith(HEALTH) for name in figures) - 1,
        attacks=attacks,
        beside=beside,
        memory=memory,
        on=machine(results[BENCH]["machine"]),
    )


def tortured(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the outcome of the stress test, one layout per row."""
    if "torture" not in results:
        return ""
    found = results["torture"]
    ends = ("result", "error", "refused", "left", "lost", "wrong")
    rows = [
        (
            layout["layout"],
            f"{layout['sent']:,} in {layout['minutes']:.1f} min",
            *(f"{layout['ended'].get(end, 0):,}" for end in ends),
            f"{layout['differing']:,} of {layout['numbers']:,}",
            f"{layout['health_p99_ms']:.1f} ({layout['idle_health_p99_ms']:.1f})",
        )
        for layout in found["layouts"]
    ]
    heads = ("layout", "requests", *ends, "numbers that differ", "p99 of `/health`, ms (idle)")
    drawn = found["drawn"]
    return TORTURE.format(
        layouts=table(heads, rows),
        model=", ".join(sorted({run["model"] for run in drawn})) or "no model",
        differing=f"{sum(run['differing'] for run in drawn):,}",
        numbers=f"{sum(run['numbers'] for run in drawn):,}",
        on=machine(found["machine"]),
    )


def page() -> str:
    """Return the whole page."""
    engine = EngineConfig()
    sharing = SHARING.format(
        step=engine.max_batch_tokens,
        large=LARGE_PART,
        part=engine.max_batch_tokens // LARGE_PART,
        places=engine.max_batch_rows,
        most=PLACES_PART,
        threads=NUM_THREADS,
        jobs=MAX_JOBS,
        items=f"{MAX_STEP_ITEMS:,}",
    )
    results = newest_results()
    return "".join(
        [
            HEADER,
            table(("guarantee", "tested by"), GUARANTEES.items()),
            sharing,
            bounds(),
            measured(results),
            tortured(results),
            NOT_COVERED,
        ]
    )


if __name__ == "__main__":
    print(page(), end="")
