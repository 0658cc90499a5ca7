"""This measures what an engine process costs, and what two of them do: tokens a second, and memory.

Decoding at batch 32, tokens alone, with 20 logprobs and with the whole vocabulary: an engine in a process of
its own (ours) beside one on a thread of the caller's process and beside two replicas; all are open at once
and take turns. Beside the rate the CPU time of all processes a token, which is steadier where others use the
machine. Before it, the memory of the processes once they have answered, each layout alone, as PSS: what
several processes have in common counts for each by its part. The last lines are a table.
"""

import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from harness import OURS, Arena, Figure, Options, Target, alternate, parse_options, publish
from prompts import prompts

from logprobe import LLM, SamplingParams

THREAD, REPLICAS = "thread", "two replicas"
LAYOUTS: dict[str, dict[str, Any]] = {
    OURS: {"process": True},
    THREAD: {},
    REPLICAS: {"data_parallel_size": 2},
}
ASKED: dict[str, dict[str, Any]] = {
    "tokens alone": {},
    "`logprobs=20`": {"logprobs": 20},
    "`logprobs=-1`, the whole vocabulary": {"logprobs": -1},
}
BATCH, PROMPT_LEN, NEW_TOKENS = 32, 32, 24
WEIGHTS = ("checkpoint", "plain")


def rate(
    llm: LLM,
    folder: Path,
    batch: int,
    new_tokens: int,
    asked: Mapping[str, Any],
    cpu_ms: list[float],
    number: int,
) -> float:
    """Tokens a second from the step after the first tokens on; their CPU time, ms a token, joins `cpu_ms`."""
    ids = prompts(folder, batch, PROMPT_LEN, number)
    seconds, cpu = [], []
    for count in (1, new_tokens):
        params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, **asked)
        llm.engine.forget_prefixes()
        start, cpu_start = time.perf_counter(), cpu_seconds(llm)
        llm.generate(ids, params, progress=False)
        seconds.append(time.perf_counter() - start)
        cpu.append(cpu_seconds(llm) - cpu_start)
    num_tokens = batch * (new_tokens - 1)
    if number >= 0:
        cpu_ms.append(1000 * (cpu[1] - cpu[0]) / num_tokens)
    return num_tokens / (seconds[1] - seconds[0])


def cpu_seconds(llm: LLM) -> float:
    """CPU time so far of this process and of the model's engine processes."""
    ticks = 0
    for pid in engine_pids(llm):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])  # user and system
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def engine_pids(llm: LLM) -> list[int]:
    """The model's engine processes."""
    return [replica.pid for replica in getattr(llm.engine, "_replicas", ())]


def speed_figures(arena: Arena) -> Iterator[Figure]:
    """Tokens a second of each layout."""
    options = arena.options
    batch, new_tokens = (4, 4) if options.is_smoke else (BATCH, NEW_TOKENS)
    with ExitStack() as stack:
        llms = {
            name: stack.enter_context(LLM(options.model, kv_cache_memory_bytes=1 << 28, **settings))
            for name, settings in _layouts(options).items()
        }
        for title, asked in ASKED.items():
            cpu_ms: dict[str, list[float]] = {name: [] for name in llms}
            contestants = {
                name: partial(rate, llm, arena.model_folder, batch, new_tokens, asked, cpu_ms[name])
                for name, llm in llms.items()
            }
            for measure in contestants.values():
                measure(-1)  # warms up
            samples, notes = alternate(contestants, options.rounds)
            yield Figure(
                name=f"decode, batch {batch}, {title}, an engine process (ours)",
                unit="tokens/s",
                better="higher",
                samples=samples,
                targets=[Target(against=THREAD, at_least=0.95)],
                notes=notes,
            )
            yield Figure(
                name=f"CPU time of all processes, batch {batch}, {title}, an engine process (ours)",
                unit="ms/token",
                better="lower",
                samples=cpu_ms,
            )


def pss_bytes(pid: int) -> int:
    """A process's share of memory."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def memory_figures(options: Options) -> Iterator[Figure]:
    """PSS of all engine processes and of the front, one layout at a time."""
    for weights in WEIGHTS[:1] if options.is_smoke else WEIGHTS:
        fronts: dict[str, list[float]] = {}
        engines: dict[str, list[float]] = {}
        for name, settings in _layouts(options).items():
            if name == THREAD:
                continue
            with LLM(options.model, kv_cache_memory_bytes=1 << 26, weights=weights, **settings) as llm:
                llm.generate([[5, 6, 7]] * 8, SamplingParams(max_tokens=4))
                fronts[name] = [pss_bytes(os.getpid()) / 1e6]
                engines[name] = [sum(pss_bytes(pid) for pid in engine_pids(llm)) / 1e6]
        for what, samples in (("engine processes", engines), ("front", fronts)):
            name = f"PSS, {weights} weights, {what}: one engine process (ours)"
            yield Figure(name=name, unit="MB", better="lower", samples=samples)


def _layouts(options: Options) -> dict[str, dict[str, Any]]:
    return {name: LAYOUTS[name] for name in ([OURS, THREAD] if options.is_smoke else LAYOUTS)}


def page_lines(figures: list[Figure]) -> Iterator[str]:
    """The lines of a table."""
    for title, speed, cpu in zip(ASKED, figures[::2], figures[1::2], strict=False):
        medians = [statistics.median(speed.samples[name]) for name in (THREAD, OURS, REPLICAS)]
        ratios = [
            statistics.median(a / b for a, b in zip(one.samples[name], one.samples[THREAD], strict=True))
            for one, name in ((speed, OURS), (speed, REPLICAS), (cpu, OURS))
        ]
        cells = [title, *(f"{median:,.1f}" for median in medians), *(f"{ratio:.2f}" for ratio in ratios)]
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    """Weigh the layouts, then race them."""
    options = parse_options(__doc__ or "")
    memory = [*memory_figures(options)]  # while this process has held no model of its own
    with Arena(options) as arena:
        figures = [*speed_figures(arena), *memory]
    publish(Path(__file__).stem, figures, options)
    if not options.is_smoke:
        print(*page_lines(figures), sep="\n", file=sys.stderr)


if __name__ == "__main__":
    main()
