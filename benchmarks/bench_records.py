"""This measures a request's record: bytes an entry, building, reading, chat JSON, and growth.

Rivals, each in a process of its own: a list of dicts, a column store of Python lists (the loop of vLLM's
`append_fast`), vLLM's container where its environment is installed, our other ways of filling, and pydantic
for chat JSON.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from harness import OURS, Figure, Options, Target, alternate, parse_options, publish
from process import RIVALS, RivalError

WORKER = Path(__file__).with_name("records_worker.py")
VLLM, LISTS, DICTS = "vllm append_fast", "column store of lists", "list of dicts"
FAST, TEXTS, APPEND = "logprobe append_fast", "logprobe append_fast with texts", "logprobe append of dicts"
WORKERS = {
    OURS: "logprobe",
    FAST: "logprobe fast",
    TEXTS: "logprobe texts",
    APPEND: "logprobe dicts",
    LISTS: "lists",
    DICTS: "list of dicts",
    VLLM: "vllm",
}
SMALL_VOCABULARY, LARGE_VOCABULARY = 49_152, 151_936
K = 20


class Worker:
    """Owns one contestant's process."""

    def __init__(self, label: str) -> None:
        self.label = label
        program = RIVALS["vllm"].python if label == VLLM else sys.executable
        self._process = subprocess.Popen(
            [program, str(WORKER), WORKERS[label]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, job: str, **given: Any) -> float:
        """One job's figure."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"job": job, "k": K, "rows_a_call": 1, **given}) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):
                return float(json.loads(line)["value"])
        raise RivalError(f"{self.label} ended with status {self._process.wait()}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


Workers = Mapping[str, Worker]


def race(workers: Workers, labels: Sequence[str], rounds: int, job: str, **given: Any) -> dict[str, Any]:
    """Samples and notes of the contestants that are there, in turn."""
    there = [label for label in labels if label in workers]
    measures = {label: lambda _, label=label: workers[label].ask(job, **given) for label in there}
    samples, notes = alternate(measures, rounds)
    missing = [f"{label}: its environment is not present" for label in labels if label not in workers]
    return {"samples": samples, "notes": [*notes, *missing]}


def as_ours(measured: dict[str, Any], label: str) -> dict[str, Any]:
    """The same samples, those of one of our ways of filling under `OURS`."""
    samples = {OURS if name == label else name: values for name, values in measured["samples"].items()}
    return {**measured, "samples": samples}


def size_figures(workers: Workers, options: Options) -> list[Figure]:
    """Bytes an entry at k = 20, for both widths of token ids."""
    num_rows = 256 if options.is_smoke else 20_000
    figures = []
    for vocab_size, limit in ((SMALL_VOCABULARY, 6.4), (LARGE_VOCABULARY, 8.6)):
        given = {"num_rows": num_rows, "vocab_size": vocab_size}
        for label, way in ((OURS, "a step's rows"), (TEXTS, "append_fast with texts"), (APPEND, "dicts")):
            values = as_ours(race(workers, [label], 1, "value_bytes", **given), label)
            figures.append(
                Figure(
                    name=f"values an entry, {way}, V = {vocab_size:,}",
                    unit="bytes",
                    better="lower",
                    targets=[Target(at_most=limit)],
                    **values,
                )
            )
        figures.append(
            Figure(
                name=f"memory held an entry, spare room counted, V = {vocab_size:,}",
                unit="bytes",
                better="lower",
                **race(workers, [OURS, FAST, TEXTS, LISTS, DICTS, VLLM], 1, "held_bytes", **given),
            )
        )
    return figures


def speed_figures(workers: Workers, options: Options) -> list[Figure]:
    """Building many rows a call, reading every position, chat JSON."""
    given = {"num_rows": 256 if options.is_smoke else 8_192, "vocab_size": SMALL_VOCABULARY}
    figures = [
        Figure(
            name=f"build, {rows_a_call} rows a call",
            unit="rows/s",
            better="higher",
            targets=[Target(against=name, at_least=5.0) for name in (LISTS, VLLM)],
            **race(
                workers,
                [OURS, FAST, LISTS, DICTS, VLLM],
                options.rounds,
                "build",
                rows_a_call=rows_a_call,
                **given,
            ),
        )
        for rows_a_call in (64, 512)
    ]
    read = race(workers, [OURS, LISTS, DICTS, VLLM], options.rounds, "index", **given)
    figures.append(Figure(name="read each position as a dict", unit="positions/s", better="higher", **read))
    kinds = {OURS: "dataclass", "msgspec Struct": "msgspec Struct", "frozen dataclass": "frozen dataclass"}
    made = {
        label: race(workers, [OURS], options.rounds, "make_values", kind=kind)["samples"][OURS]
        for label, kind in kinds.items()
    }
    figures.append(Figure(name="make a Logprob", unit="values/s", better="higher", samples=made))
    chat = race(workers, [OURS], options.rounds, "chat_json", **given)
    pydantic = race(workers, [OURS], options.rounds, "pydantic_json", **given)
    chat["samples"]["pydantic"] = pydantic["samples"][OURS]
    figures.append(
        Figure(
            name="record to chat JSON",
            unit="positions/s",
            better="higher",
            targets=[Target(against="pydantic", at_least=10.0)],
            **chat,
        )
    )
    return figures


def append_figures(workers: Workers, options: Options) -> list[Figure]:
    """One position a call from Python columns, and from a step's arrays."""
    figures = []
    for k in (5, K):
        given = {"num_rows": 256 if options.is_smoke else 8_192, "vocab_size": SMALL_VOCABULARY, "k": k}
        fast = race(workers, [FAST, TEXTS, LISTS, APPEND, VLLM], options.rounds, "build", **given)
        row = race(workers, [OURS, LISTS, VLLM], options.rounds, "build", **given)
        targets = [Target(against=name, at_least=0.7) for name in (LISTS, VLLM)]
        common: dict[str, Any] = {"unit": "rows/s", "better": "higher"}
        figures += [
            Figure(
                name=f"append_fast, k = {k}",
                targets=[*targets, Target(against=APPEND, at_least=3.0)],
                **common,
                **as_ours(fast, FAST),
            ),
            Figure(
                name=f"one row from a step's arrays, k = {k}",
                targets=[Target(against=name, at_least=1.0) for name in (LISTS, VLLM)],
                **common,
                **row,
            ),
        ]
    return figures


def growth_figures(workers: Workers, options: Options) -> list[Figure]:
    """Time a position late over early in one record, memory late over early in a data set."""
    given = {"vocab_size": SMALL_VOCABULARY}
    positions, rows = (2_000, 10_000) if options.is_smoke else (100_000, 1_000_000)
    return [
        Figure(
            name=f"time a position, last tenth of {positions:,} over first tenth",
            unit="ratio",
            better="lower",
            targets=[Target(at_most=1.1)],
            **race(workers, [OURS], options.rounds, "growth", num_rows=positions, **given),
        ),
        *(
            Figure(
                name=f"peak memory of a data set's run, all {rows:,} rows over the first {part}",
                unit="ratio",
                better="lower",
                targets=[Target(at_most=1.1)],
                **memory(share=share, num_rows=rows, **given),
            )
            for part, share in (("tenth", 0.1), ("half", 0.5))
        ),
    ]


def memory(**given: Any) -> dict[str, Any]:
    """One sample of the data set's run, in a new process, since a peak never falls."""
    with Worker(OURS) as worker:
        return {"samples": {OURS: [worker.ask("data_set", **given)]}}


def main() -> None:
    """Run all figures."""
    options = parse_options(__doc__ or "")
    labels = [OURS, FAST, TEXTS, APPEND, LISTS, DICTS]
    if "vllm" in options.rivals and RIVALS["vllm"].is_installed:
        labels.append(VLLM)
    with ExitStack() as stack:
        workers = {label: stack.enter_context(Worker(label)) for label in labels}
        figures = [
            figure
            for family in (size_figures, speed_figures, append_figures, growth_figures)
            for figure in family(workers, options)
        ]
    publish(Path(__file__).stem, figures, options)


if __name__ == "__main__":
    main()
