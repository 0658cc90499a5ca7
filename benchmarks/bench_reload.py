"""This measures a model after `load_weights`: tokens a second, the seconds of a load, and resident memory.

Tokens a second are those of the steady state at 1, 8 and 32 requests at once, greedy with 20 logprobs: of a
model whose weights were replaced by a state (ours) beside a fresh load of a folder that holds this state, as
`save_pretrained` writes it, in the same layout (a thread, an engine process). One state is of bfloat16
numbers, which panels of bfloat16 hold; the other of float32 numbers that no shorter form holds. All are open
at once and take turns; beside them is the model from its own folder, before any load. Memory is that of a
process of its own which only loads, after its second and its last load.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from bench_weights import unrounded
from harness import OURS, Figure, Measure, Options, Target, alternate, parse_options, publish
from prompts import prompts

from logprobe import LLM, SamplingParams
from logprobe.models import load_model, resolve

TOP, PROMPT_LEN = 20, 32
FRESH, OPENED = "a fresh load", "before any load"
LAYOUTS: dict[str, dict[str, Any]] = {"a thread": {}, "an engine process": {"process": True}}
STATES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
KEEPS = 0.95  # of a fresh load's tokens a second
SHRINKS = 0.9  # the memory after the second load, of that after the last, at least
RESIDENT = "int(open('/proc/self/statm').read().split()[1]) * 4096 / 1e6"
LOADS = f"""
import sys
from logprobe import LLM
llm = LLM(sys.argv[1], kv_cache_memory_bytes=1 << 26)
for number in range(int(sys.argv[3])):
    llm.load_weights(sys.argv[2], version=str(number))
    print({RESIDENT})
"""


def save_state(opened: Path, kind: str, folder: Path) -> Path:
    """A folder of the model with weights of one kind; its tokenizer is the model's."""
    files = resolve(str(opened))
    module: Any = load_model(files, dtype=torch.float32)
    if kind == "float32":
        for weight in module.parameters():
            weight.copy_(unrounded(weight))
    target = folder / kind
    module.to(STATES[kind]).save_pretrained(target)
    for file in files.folder.glob("tokenizer*"):
        (target / file.name).write_bytes(file.read_bytes())
    return target


def rate(llm: LLM, folder: Path, batch: int, new_tokens: int, number: int) -> float:
    """Tokens a second from the step after the first tokens on."""
    ids = prompts(folder, batch, PROMPT_LEN, number)
    seconds = []
    for count in (1, new_tokens):
        params = SamplingParams(max_tokens=count, temperature=0, logprobs=TOP, ignore_eos=True)
        llm.engine.forget_prefixes()
        start = time.perf_counter()
        llm.generate(ids, params, progress=False)
        seconds.append(time.perf_counter() - start)
    return batch * (new_tokens - 1) / (seconds[1] - seconds[0])


def load_s(llm: LLM, folder: Path, number: int) -> float:
    """Seconds of a load until the new weights answer."""
    start = time.perf_counter()
    llm.load_weights(folder, version=f"load {number}")
    return time.perf_counter() - start


def speed_figures(options: Options, kind: str, folders: tuple[Path, Path], layout: str) -> Iterator[Figure]:
    """Tokens a second after loads of one kind of state in one layout, and how long they take."""
    batches, new_tokens = ((1, 2), 4) if options.is_smoke else ((1, 8, 32), 48)
    opened, saved = folders
    settings = {"kv_cache_memory_bytes": 1 << 28, **LAYOUTS[layout]}
    with ExitStack() as stack:
        llms = {
            name: stack.enter_context(LLM(str(folder), **settings))
            for name, folder in {OURS: opened, FRESH: saved, OPENED: opened}.items()
        }
        load_s(llms[OURS], saved, options.rounds)  # warms up: kernels of another form may have to be compiled
        times = [load_s(llms[OURS], saved, number) for number in range(options.rounds)]
        yield Figure(
            name=f"load_weights of a {kind} state, {layout}",
            unit="s",
            better="lower",
            samples={OURS: times},
        )
        for batch in batches:
            contestants: dict[str, Measure] = {
                name: partial(rate, llm, saved, batch, new_tokens) for name, llm in llms.items()
            }
            for measure in contestants.values():
                measure(options.rounds)  # warms up
            samples, notes = alternate(contestants, options.rounds)
            yield Figure(
                name=f"decode after load_weights of a {kind} state, {layout}, batch {batch}, logprobs {TOP}",
                unit="tokens/s",
                better="higher",
                samples=samples,
                targets=[Target(against=FRESH, at_least=KEEPS)],
                notes=notes,
            )


def memory_figure(options: Options, kind: str, folders: tuple[Path, Path]) -> Figure:
    """Resident memory of a process that loads again and again."""
    num_loads = 3 if options.is_smoke else 20
    command = [sys.executable, "-c", LOADS, *map(str, folders), str(num_loads)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    resident = [float(line) for line in done.stdout.split()]
    second = "after load 2"
    return Figure(
        name=f"resident memory after load {num_loads} of a {kind} state",
        unit="MB",
        better="lower",
        samples={OURS: [resident[-1]], second: [resident[1]]},
        targets=[Target(against=second, at_least=SHRINKS)],
    )


def main() -> None:
    """Run all states and layouts."""
    options = parse_options(__doc__ or "")
    figures: list[Figure] = []
    opened = resolve(options.model).folder
    with TemporaryDirectory() as folder, mock.patch.dict(os.environ, LOGPROBE_HOME=folder):
        # What is kept of these folders goes with them.
        for kind in [*STATES][:1] if options.is_smoke else STATES:
            saved = save_state(opened, kind, Path(folder))
            for layout in [*LAYOUTS][:1] if options.is_smoke else LAYOUTS:
                figures += speed_figures(options, kind, (opened, saved), layout)
            figures.append(memory_figure(options, kind, (opened, saved)))
    publish(Path(__file__).stem, figures, options)


if __name__ == "__main__":
    main()
