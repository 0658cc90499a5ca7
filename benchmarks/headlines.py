"""The eight figures that a user decides by, each beside the best of the other libraries measured at it.

Which library that is, the figures say: nobody chooses the one that a row looks good beside.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from harness import OURS
from process import RIVALS

# Task, in a user's words -> the benchmark and the figure that measures it.
HEADLINES = {
    "generate, one prompt, 20 alternatives a token": ("bench_decode", "decode, batch 1, logprobs 20"),
    "generate, 32 prompts at once, 20 alternatives": ("bench_decode", "decode, batch 32, logprobs 20"),
    "score texts of 512 tokens, 20 alternatives": ("bench_score", "scoring, 512-token prompts, top 20"),
    "score 4 answers to a context of 256 tokens": (
        "bench_shared_prefix",
        "4 continuations to one 256-token context, ours in process",
    ),
    "whole next-token distributions of 64 prefixes": (
        "bench_next_token",
        "next-token rows, 64 prefixes of 32 tokens sharing 24",
    ),
    "serve 32 chat streams, 20 alternatives a token": (
        "bench_server",
        "chat streams, 32 at once, logprobs 20",
    ),
    "start a process, until its first token": ("bench_start", "process start to first token"),
    "memory in use at the first token": ("bench_start", "resident memory at the first token"),
}
TITLES = {
    "genlm": "genlm-backend",
    "llama_cpp": "llama.cpp",
    "lm_eval": "lm-evaluation-harness",
    "vllm": "vLLM",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One task: ours, the best other library's, and how many times as good ours is."""

    task: str
    bench: str
    unit: str
    ours: float  # median
    theirs: float  # median
    rival: str
    ratio: Mapping[str, float]  # median, minimum and maximum over the rounds; above 1 where ours is better
    day: str
    machine: Mapping[str, Any]

    @classmethod
    def of(cls, task: str, bench: str, figure: Mapping[str, Any], content: Mapping[str, Any]) -> Self:
        """The row of a figure that a benchmark recorded."""
        rival = rivals(figure)[0]
        return cls(
            task=task,
            bench=bench,
            unit=figure["unit"],
            ours=figure["spreads"][OURS]["median"],
            theirs=figure["spreads"][rival]["median"],
            rival=title(rival),
            ratio=figure["ratios"][rival],
            day=content["day"],
            machine=content["machine"],
        )


def _library(contestant: str) -> str:
    return contestant.split(maxsplit=1)[0]


def title(contestant: str) -> str:
    """A contestant under the name that its library goes by."""
    library = _library(contestant)
    return TITLES.get(library, library) + contestant.removeprefix(library)


def rivals(figure: Mapping[str, Any]) -> list[str]:
    """The contestants that are other libraries, the one that ours is the least ahead of first."""
    others = [name for name in figure["ratios"] if _library(name) in RIVALS.keys() - {OURS}]
    return sorted(others, key=lambda name: figure["ratios"][name]["median"])


def rows(results: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """The tasks, in their order, of which the results hold a figure beside another library's."""
    return [
        Row.of(task, bench, figure, results[bench])
        for task, (bench, name) in HEADLINES.items()
        for figure in results.get(bench, {"figures": []})["figures"]
        if figure["name"] == name and rivals(figure)
    ]
