"""Put faults into the engine on purpose, one at a time, and measure how long it takes to find each.

`make mutations` runs it. Each fault is a change of the source in a copy; it must be found within 30 seconds.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from simulation.__main__ import insert

ROOT = Path(__file__).parents[2]
LIMIT_S = 30


class Mutation(NamedTuple):
    """A fault: `old` in a file of the package becomes `new`."""

    name: str
    file: str
    old: str
    new: str


SCHEDULER, RADIX, ENGINE = "engine/plan/scheduler.py", "engine/plan/radix.py", "engine/engine.py"
REPLICA, STREAMS = "engine/backends/process/replica.py", "transport/streams.py"
MUTATIONS = (
    Mutation(
        "a command does not wake the engine",
        "engine/backends/thread.py",
        "            self._commands.append(command)\n            self._wake.notify()\n\n    @property",
        "            self._commands.append(command)\n\n    @property",
    ),
    Mutation(
        "the end of a request does not wake its reader",
        STREAMS,
        "reader is not None and (is_urgent or inbox.num_rows >= reader.min_rows)",
        "reader is not None and inbox.num_rows >= reader.min_rows",
    ),
    Mutation(
        "a reader that has caught up is not resumed",
        STREAMS,
        "(self._pause if is_paused else self._resume)(inbox.req_id)",
        "is_paused and self._pause(inbox.req_id)",
    ),
    Mutation(
        "a lock on a prefix stops one node short",
        RADIX,
        "        while node is not above:\n",
        "        while node is not above and node.parent is not above:\n",
    ),
    Mutation(
        "a split node forgets one of its locks",
        RADIX,
        "num_locks=node.num_locks)",
        "num_locks=max(node.num_locks - 1, 0))",
    ),
    Mutation(
        "slots that the tree takes over are freed, too",
        SCHEDULER,
        "self.pool.free(tail[: len(known)])",
        "self.pool.free(tail)",
    ),
    Mutation(
        "slots of rejected drafts are not freed",
        SCHEDULER,
        "            self.pool.free(wrong)\n",
        "",
    ),
    Mutation(
        "a preempted sample is not queued again",
        SCHEDULER,
        "        self.waiting.appendleft(sample)\n        self.num_preempted += 1",
        "        self.num_preempted += 1",
    ),
    Mutation(
        "the latest request starts first",
        SCHEDULER,
        "        self.waiting.append(sample)\n",
        "        self.waiting.appendleft(sample)\n",
    ),
    Mutation(
        "requests with other LoRA weights share prefixes",
        SCHEDULER,
        "self.tree.root((None if sample.lora is None else sample.lora.number, sample.is_long))",
        "self.tree.root((None, sample.is_long))",
    ),
    Mutation(
        "prompt rows of freed slots stay known",
        "engine/prompt_rows.py",
        "        self._next_ids[slots] = -1\n",
        "        pass\n",
    ),
    Mutation(
        "cached prefixes survive a swap of the weights",
        ENGINE,
        "        self.scheduler = self._new_scheduler()\n        give_back",
        "        give_back",
    ),
    Mutation(
        "prompts are scored with the old weights after a swap",
        ENGINE,
        "        self.scorer = PromptScorer(self.forward)\n        self.scheduler",
        "        self.scheduler",
    ),
    Mutation(
        "the end of an aborted request is sent twice",
        ENGINE,
        "return [*self.recorder.end(samples), *self._swap_weights()]",
        "return [*self.recorder.end(samples), *self.recorder.end(samples), *self._swap_weights()]",
    ),
    Mutation(
        "an abort does not find a request that waits for new weights",
        ENGINE,
        "held = self._swap.take(request_id)",
        "held = None",
    ),
    Mutation(
        "the error of a step that cannot be published is lost",
        "engine/overlap.py",
        "        if error is None:\n            return\n",
        "        return\n",
    ),
    Mutation(
        "requests of a process that died do not end",
        REPLICA,
        "            self._why_down = reason\n            self._end_all(reason)\n",
        "            self._why_down = reason\n",
    ),
    Mutation(
        "the end of a request is not accounted for",
        REPLICA,
        "                    del self._backlogs[event.request_id]\n",
        "",
    ),
    Mutation(
        "a restarted process has the old weights",
        "engine/backends/process/engine.py",
        "weights = [] if self._weights is None else [self._weights]",
        "weights: list[LoadWeights] = []",
    ),
    Mutation(
        "LoRA weights are never freed",
        "engine/loras.py",
        "        del self._holds[number], self._versions[number]\n        return number",
        "        return None",
    ),
    Mutation(
        "requests whose readers never began are kept (a fault that was found)",
        "engine/front.py",
        "                if is_unread:\n",
        "                if False and is_unread:\n",
    ),
)


NOTHING = Mutation("nothing", "engine/__init__.py", "", "")


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the list into docs/dev/testing.md")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("names", nargs="*", help="parts of names; all if there are none")
    options = parser.parse_args()
    chosen = [
        one for one in MUTATIONS if not options.names or any(part in one.name for part in options.names)
    ]
    seconds, found = time_to_find(NOTHING, options.seed)
    assert not found, f"the engine as it is fails: {found}"
    lines, num_missed = ["| fault | seconds |", "|---|---|"], 0
    for mutation in chosen:
        seconds, found = time_to_find(mutation, options.seed)
        num_missed += not found
        lines.append(f"| {mutation.name} | {f'{seconds:.1f}' if found else 'not found'} |")
        print(lines[-1], found, flush=True)
    print(f"found {len(chosen) - num_missed} of {len(chosen)}")
    if options.write:
        insert("mutations", lines)
    return 1 if num_missed else 0


def time_to_find(mutation: Mutation, seed: int) -> tuple[float, str]:
    """Return how long the simulation of the changed package ran, and what it found; empty if nothing."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "logprobe"
        shutil.copytree(ROOT / "src/logprobe", package, ignore=shutil.ignore_patterns("__pycache__"))
        file = package / mutation.file
        text = file.read_text()
        is_one = mutation is NOTHING or text.count(mutation.old) == 1
        assert is_one, f"{mutation.name}: {text.count(mutation.old)} places"
        file.write_text(text.replace(mutation.old, mutation.new))
        command = [sys.executable, "-m", "simulation", "--no-shrink", "--seconds", str(LIMIT_S)]
        env = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT / 'tests'}"}
        began_s = time.monotonic()
        ended = subprocess.run(
            [*command, "--seed", str(seed)], env=env, capture_output=True, text=True, check=False
        )
        seconds = time.monotonic() - began_s
    last = ended.stdout.strip().rpartition("\n")[2]
    return seconds, last.partition(" s: ")[2].replace("|", "/")[:90] if ended.returncode == 1 else ""


if __name__ == "__main__":
    sys.exit(main())
