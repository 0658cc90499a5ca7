"""What every rival process speaks: a JSON job a line on stdin, a JSON result a line on stdout.

A rival gives the bare work; timing, warm-up, validation and memory accounting are the same code for all.
Only the standard library is imported here, since each rival has an environment of its own. Whatever a rival
prints goes to stderr.

A job: ``{"verb", "variant", "model_folder", "inputs": [...], "warm_up": 0}``. The first job opens the model;
later ones may name another variant of the same rival. ``inputs`` holds one dict of keyword arguments a call;
the first ``warm_up`` of them are run but not timed.
A result: ``{"ok": true, "timings_s": [...], "output", "load_s", "load_peak_bytes", "peak_bytes",
"peak_growth_bytes", "versions"}``, where ``output`` is the last input's, or ``{"ok": false, "error": ...}``.
"""

import contextlib
import importlib.metadata
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

TokenIds = list[int]
ERROR_LEN = 200  # characters of an error that are kept
Read = Callable[[], Any]
Check = Callable[[Any, dict[str, Any]], bool]


def _decode_is_complete(output: Any, asked: dict[str, Any]) -> bool:
    return [len(ids) for ids in output] == [asked["new_tokens"]] * len(asked["prompts"])


def _score_is_complete(output: Any, asked: dict[str, Any]) -> bool:
    return [len(row) for row in output] == [len(prompt) - 1 for prompt in asked["prompts"]]


def _shared_prefix_is_complete(output: Any, asked: dict[str, Any]) -> bool:
    return len(output) == len(asked["continuations"])


def _likely_ids_are_complete(output: Any, asked: dict[str, Any]) -> bool:
    return [len(rows) for rows in output] == [len(prompt) for prompt in asked["prompts"]]


def _next_token_is_complete(output: Any, asked: dict[str, Any]) -> bool:
    return len(output) == len(asked["prefixes"])


def _surprisals_are_complete(output: Any, asked: dict[str, Any]) -> bool:
    return len(output) == len(asked["texts"])


def _event_loop_stall_is_complete(output: Any, asked: dict[str, Any]) -> bool:
    return bool(asked["rounds"]) and output >= 0


def _rows_are_complete(output: Any, asked: dict[str, Any]) -> bool:
    return output == asked["num_rows"] * asked["num_steps"]


# verb -> does the output hold everything that was asked for? Each rival's methods carry the same names, do
# the work and return a function that reads its numbers out, called after the clock has stopped:
#   decode(prompts, new_tokens, logprobs): chosen token ids, one list a prompt; end-of-text is ignored
#   score(prompts, top): logprobs (nats) of each prompt's tokens after its first
#   shared_prefix(context, continuations): summed logprobs (nats), one a continuation
#   likely_ids(prompts, count): ids of the likeliest tokens, a list a position, the first empty
#   next_token(prefixes, rounds): in each round every prefix is asked for its whole next-token row and is then
#       extended by that round's tokens; the likeliest token of the last round's rows is read out
#   surprisals(texts): nats of each sentence's tokens after its first, summed
#   event_loop_stall(prefixes, rounds): the same work; the longest that the event loop kept a task
#       waiting, ms
#   rows(num_rows, k, num_steps): steps of so many rows with k alternatives each, from a process of its own;
#       how many were read
COMPLETENESS: dict[str, Check] = {
    "decode": _decode_is_complete,
    "score": _score_is_complete,
    "shared_prefix": _shared_prefix_is_complete,
    "likely_ids": _likely_ids_are_complete,
    "next_token": _next_token_is_complete,
    "surprisals": _surprisals_are_complete,
    "event_loop_stall": _event_loop_stall_is_complete,
    "rows": _rows_are_complete,
}


def process_tree(pid: int) -> list[int]:
    """List a process and all its descendants (Linux)."""
    children: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended meanwhile
            children += map(int, path.read_text().split())
    return [pid, *(one for child in children for one in process_tree(child))]


def _resident_bytes(field: str) -> int:
    lines = [
        line
        for pid in process_tree(os.getpid())
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith(field + ":")
    ]
    return sum(int(line.split()[1]) * 1024 for line in lines)


class PeakMemory:
    """Growth of this process tree's resident memory over its level when the watch began, at its highest."""

    def __init__(self) -> None:
        for pid in process_tree(os.getpid()):
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # the high-water mark is the present level
        self._before = _resident_bytes("VmRSS")

    def highest_bytes(self) -> int:
        """Bytes of the highest level since the start, with those of files that are mapped."""
        return _resident_bytes("VmHWM")

    def growth_bytes(self) -> int:
        """Bytes of the highest level since the start, less the level then."""
        return max(0, self.highest_bytes() - self._before)


async def ask_rounds(lm: Any, prefixes: Sequence[TokenIds], rounds: Sequence[Sequence[int]]) -> Any:
    """The whole rows of the last round, from a model that has genlm-backend's words for it."""
    rows: Any = None
    for tokens in rounds:
        rows = await lm.batch_next_token_logprobs(prefixes)
        prefixes = extend_all(prefixes, tokens)
    return rows


def extend_all(prefixes: Sequence[TokenIds], tokens: Sequence[int]) -> list[TokenIds]:
    """Each prefix with its own next token at the end."""
    return [[*prefix, token] for prefix, token in zip(prefixes, tokens, strict=True)]


def _run_job(rival: Any, job: dict[str, Any]) -> dict[str, Any]:
    method, is_complete = getattr(rival, job["verb"]), COMPLETENESS[job["verb"]]
    timings_s: list[float] = []
    output: Any = None
    memory = PeakMemory()
    for index, asked in enumerate(job["inputs"]):
        if index == job.get("warm_up", 0):
            memory = PeakMemory()
        started = time.perf_counter()
        read = method(**asked)
        timings_s.append(time.perf_counter() - started)
        output = read()
        if not is_complete(output, asked):
            raise RuntimeError(f"{job['verb']} returned fewer results than the job asked for")
    return {
        "ok": True,
        "timings_s": timings_s[job.get("warm_up", 0) :],
        "output": output,
        "peak_bytes": memory.highest_bytes(),
        "peak_growth_bytes": memory.growth_bytes(),
    }


def _versions(packages: Sequence[str]) -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in packages}


def _private_stdout() -> TextIO:
    """Keep the real standard output for results; whatever else is printed goes to stderr."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return results


def serve(open_rival: Callable[[dict[str, Any]], Any], packages: Sequence[str]) -> None:
    """Answer jobs until stdin ends; ``open_rival(job)`` loads the model at the first one."""
    results = _private_stdout()
    rival: Any = None
    load_s, load_peak_bytes = 0.0, 0
    for line in sys.stdin:
        job = json.loads(line)
        try:
            if rival is None:
                started = time.perf_counter()
                rival = open_rival(job)
                load_s = time.perf_counter() - started
                load_peak_bytes = _resident_bytes("VmHWM")
            rival.use(job["variant"])
            result = _run_job(rival, job) | {"load_s": load_s, "load_peak_bytes": load_peak_bytes}
            result["versions"] = _versions(packages)
        except Exception as error:  # noqa: BLE001 - a job's failure is its result
            traceback.print_exc()
            told = " ".join(f"{type(error).__name__}: {error}".split())
            result = {"ok": False, "error": told[:ERROR_LEN]}
        print(json.dumps(result), file=results, flush=True)
    if hasattr(rival, "close"):
        rival.close()
