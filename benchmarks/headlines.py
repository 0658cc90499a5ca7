"""Figures of docs/performance.md: the main tasks, each compared with the best other library.

The recorded figures decide which library that is.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from harness import OURS
from process import RIVALS

# Task -> the benchmark and the figure that measures it.
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
    "1.2B in bfloat16: generate, one prompt": (
        "bench_real --model llama-1b",
        "bfloat16, 2,472 MB: decode, batch 1, logprobs 20",
    ),
    "1.2B in bfloat16: generate, 32 prompts at once": (
        "bench_real --model llama-1b",
        "bfloat16, 2,472 MB: decode, batch 32, logprobs 20",
    ),
    "1.2B in bfloat16: score texts of 512 tokens": (
        "bench_real --model llama-1b",
        "bfloat16, 2,472 MB: prompts of 512 tokens, top 20",
    ),
    "1.2B in Q4_K_M: generate, one prompt": (
        "bench_real --model llama-1b --rivals llama_cpp",
        "q4_k_m, 803 MB: decode, batch 1, logprobs 20",
    ),
}
TITLES = {
    "genlm": "genlm-backend",
    "llama_cpp": "llama.cpp",
    "lm_eval": "lm-evaluation-harness",
    "vllm": "vLLM",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One task: the figures of logprobe and of the best other library, and their ratio."""

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
        """Return the row of a recorded figure."""
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
    """Return the name of a contestant for readers."""
    library = _library(contestant)
    return TITLES.get(library, library) + contestant.removeprefix(library)


def rivals(figure: Mapping[str, Any]) -> list[str]:
    """Return the contestants that are other libraries, the best one first."""
    others = [name for name in figure["ratios"] if _library(name) in RIVALS.keys() - {OURS}]
    return sorted(others, key=lambda name: figure["ratios"][name]["median"])


def rows(results: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Return the tasks for which the results compare logprobe with another library, in order."""
    return [
        Row.of(task, bench, figure, results[bench])
        for task, (bench, name) in HEADLINES.items()
        for figure in results.get(bench, {"figures": []})["figures"]
        if figure["name"] == name and rivals(figure)
    ]
