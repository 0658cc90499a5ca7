"""This measures the time from starting a process to its first token, on a converted model.

`logprobe generate` is the command line; the others are a script that loads the model and asks for one token.
"""

import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from harness import OURS, Arena, Contestant, Figure, Measure, Target, alternate, parse_options, publish
from process import RIVALS, RivalProcess
from prompts import prompts

LIBRARY = "logprobe, library"
WANTED = (OURS, "vllm", "transformers")


def command_s(arena: Arena) -> float:
    """Seconds of `logprobe generate` with one token."""
    program = str(Path(sys.executable).with_name("logprobe"))
    asked = {"--model": str(arena.model_folder), "--max-tokens": "1", "--temperature": "0", "--logprobs": "5"}
    command = [
        program,
        "generate",
        "The capital of France is",
        *(word for pair in asked.items() for word in pair),
    ]
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def process_s(arena: Arena, contestant: Contestant, _number: int) -> float:
    """Seconds from starting a rival's process to its answer of one token."""
    name, variant = contestant
    asked = {"prompts": prompts(arena.model_folder, 1, 8, seed=0), "new_tokens": 1, "logprobs": 5}
    with RivalProcess(RIVALS[name]) as process:
        model = {"variant": variant, "model_folder": str(arena.model_folder)}
        process.ask({"verb": "decode", "inputs": [asked], **model})
        return time.perf_counter() - process.started


def figure(arena: Arena) -> Figure:
    """Seconds to the first token."""
    labels = {
        LIBRARY if name == OURS else name: one
        for name, one in arena.labels(*WANTED).items()
        if one[1] == "best" or name == OURS
    }
    contestants: dict[str, Measure] = {OURS: lambda _: command_s(arena)}
    for name, one in labels.items():
        contestants[name] = partial(process_s, arena, one)
    samples, notes = alternate(contestants, arena.options.rounds)
    return Figure(
        name="process start to first token",
        unit="s",
        better="lower",
        samples=samples,
        targets=[Target(at_most=6.0)],
        notes=[*notes, *arena.missing(*WANTED)],
    )


def main() -> None:
    """Run the figure."""
    options = parse_options(__doc__ or "")
    with Arena(options) as arena:
        figures = [figure(arena)]
    publish(Path(__file__).stem, figures, options)


if __name__ == "__main__":
    main()
