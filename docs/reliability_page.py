"""docs/reliability.md from the server's own limits and the newest figures of benchmarks/bench_attacks.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from report import newest_results, section

from logprobe.config import EngineConfig
from logprobe.engine.plan.shares import LARGE_PART, PLACES_PART
from logprobe.processors.builtin.grammar import MAX_STEP_ITEMS
from logprobe.server import ServerSettings
from logprobe.server.limits import limit_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

BENCH = "bench_attacks"

HEADER = """# Reliability

What a server of this library promises under load and attack, and what shows it. This page is written by
`python docs/reliability_page.py` (`make docs`) from the server's own limits and the newest run of
`benchmarks/bench_attacks.py`. Who may do what stands in [SECURITY.md](../SECURITY.md).

## Promises

"""

PROMISES = {
    "no request ends the process, keeps a second client's `/health` waiting, or keeps memory": (
        "`tests/server/attacks`, `benchmarks/bench_attacks.py`"
    ),
    "whatever a logits processor raises fails its own request": "`tests/server/attacks/test_processors.py`",
    "a step that hangs is told by `/health` (503), and every waiter ends with an error": "the same",
    "no web page of another origin reads or drives the server": (
        "`tests/server/attacks/test_browsers.py`; in a real Chromium `tests/web` (`make test-web`)"
    ),
    "of 96 mixed requests, 24 at once and a third given up, none is lost and none is wrong (5e-5 nats)": (
        "`tests/torture`"
    ),
    "nothing stays of them: requests, slots, handles, memory": "the same",
    "records, Arrow columns and Parquet files are not believed: one `InputError`, no memory by their own "
    "say-so": "`tests/records/forms/*hostile.py`",
    "nor are GGUF and safetensors headers, LoRA folders, or other servers' replies": (
        "`tests/models`, `tests/next_token/test_remote_hostile.py`"
    ),
    "what nobody thought of": "fuzz tests of all of these, some seconds in every run, longer by `make fuzz`",
}

FAIRNESS = """
## How long a neighbour waits

One HTTP request, with all its prompts and samples, is one call; so is one call of `LLM`. While a call is
alone, or all calls fit into a step (`max_batch_tokens`, {step}), they are served as they came, with all there
is. Otherwise, counted in the engine's steps (`tests/engine/plan/test_shares.py`):

- A completion that runs gets a token in every step, whatever others ask.
- A step runs at most `max_batch_tokens` tokens and scores at most as many prompt rows. Calls that ask for
  more than a step have, together, one in {large} of each beside others: {part} tokens and as many rows.
- A call that comes later and fits into a step has its first token after at most three steps beside a long
  prompt, an echo with its logprobs, `n = 128`, or a body of 512 prompts: a call that holds more than its
  share of the places (`max_batch_rows`, {places}) or of the slots of the key/value pool gives some up for it.
  A share is what is there divided by the calls, of places at least one in {most}.
- Calls that ask for more than a step wait for each other in the order of their arrival.
- A server's clients are told apart by their keys, or else by their addresses. Places and slots are shared
  between them first, then what each has between its calls; in a step the prompts of a client that has less to
  run come first. So hundreds of calls of one client are to another one as a single call is.
- A client may have all of `max_requests`, `max_tokens_in_flight` and `max_logprob_bytes` in progress. An
  eighth comes on top for clients that hold no more than an eighth of that
  (`tests/server/attacks/test_monopoly.py`).

A grammar takes at most {items} items of the parser for a token; one that can be read in too many ways to be
followed within that fails its own request (400).

## Limits

"""

NOT_COVERED = """
## What is not covered

- The time of a step: others' tokens are computed with one's own, so beside 63 other completions a token takes
  as long as 64 take together.
- Clients without keys that share an address are one client, and one that has many addresses is many.
- A client that closes its half of the connection counts as gone: it is told so (400), and its request ends.
- Bombs in honest formats: a Parquet file may hold columns that repeat, up to 8 positions a byte.
- What the operator lifts (`--max-logprobs -1`, `--allowed-host '*'`), and processors, which are the
  operator's own code.
"""


def table(heads: tuple[str, str], rows: Iterable[tuple[str, object]]) -> str:
    """Two columns."""
    lines = [f"| {heads[0]} | {heads[1]} |", "|---|---|", *(f"| {one} | {other} |" for one, other in rows)]
    return "\n".join(lines) + "\n"


def measured(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The figures of the newest run."""
    return "\n".join(section(BENCH, results[BENCH])) + "\n" if BENCH in results else ""


def page() -> str:
    """The whole page."""
    engine, settings = EngineConfig(), ServerSettings()
    fairness = FAIRNESS.format(
        step=engine.max_batch_tokens,
        large=LARGE_PART,
        part=engine.max_batch_tokens // LARGE_PART,
        places=engine.max_batch_rows,
        most=PLACES_PART,
        items=f"{MAX_STEP_ITEMS:,}",
    )
    limits = table(
        ("limit (what each bounds: SECURITY.md)", "default"),
        [(f"`{name}`", f"{value:,}") for name, value in limit_table(settings).items()],
    )
    promises = table(("promise", "shown by"), PROMISES.items())
    return HEADER + promises + fairness + limits + measured(newest_results()) + NOT_COVERED


if __name__ == "__main__":
    print(page(), end="")
