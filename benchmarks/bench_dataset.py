"""This measures data sets and long texts: rows a second, memory, and how soon the first numbers are there."""

import json
import os
import random
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from harness import OURS, Figure, Options, Target, parse_options, publish

from logprobe import LLM, SamplingParams
from logprobe.analysis import score_dataset
from logprobe.analysis.datasets.run import DatasetRun, OneModel
from logprobe.analysis.datasets.settings import DataSettings
from logprobe.analysis.io.sources import find_sources
from logprobe.analysis.score import Score
from logprobe.analysis.windows import TextTally, WindowSettings, score_windows

MIB = 1 << 20
NUM_ROWS, NUM_MANY, TEXT_BYTES = 2000, 1_000_000, 48_000_000
NUM_PARTS = 8  # of windows; the first window comes in six
KV_BYTES = 1 << 29
WORDS = (
    "the",
    "sea",
    "a",
    "pier",
    "of",
    "keys",
    "light",
    "and",
    "long",
    "grey",
    "stood",
    "in",
    "wind",
    "under",
)


def resident_bytes() -> int:
    """What this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def sentence(chance: random.Random) -> str:
    """Some ten words."""
    return " ".join(chance.choice(WORDS) for _ in range(chance.randrange(6, 16))).capitalize() + "."


def in_one_call_and_as_data(llm: LLM, options: Options, folder: Path) -> list[Figure]:
    """The same kind of rows, none seen before, through `LLM.score` at once and through a data set."""
    samples: dict[str, list[float]] = {OURS: [], "one call": []}
    count = 20 if options.is_smoke else NUM_ROWS
    for number in range(-1, options.rounds):  # the first warms up
        texts = [[sentence(random.Random(f"{number} {kind} {row}")) for row in range(count)] for kind in "ab"]  # noqa: S311
        llm.engine.forget_prefixes()
        began = time.perf_counter()
        llm.score([("", text) for text in texts[0]])
        alone_s = time.perf_counter() - began
        path = folder / "rows.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[1]))
        llm.engine.forget_prefixes()
        began = time.perf_counter()
        score_dataset(llm, str(path), folder / "out.parquet", settings=DataSettings(bos=True), force=True)
        data_s = time.perf_counter() - began
        if number >= 0:
            samples["one call"].append(count / alone_s)
            samples[OURS].append(count / data_s)
    return [
        Figure(
            name=f"{count} short rows, files and all, beside LLM.score of as many at once",
            unit="rows/s",
            better="higher",
            samples=samples,
            targets=[Target(against="one call", at_least=0.9)],
        ),
    ]


class NoModel:
    """Gives every pair numbers at once: what is left is the data set's own work and memory."""

    def __init__(self, llm: LLM) -> None:
        self.text, self.engine, self.lora = llm.text, llm.engine, llm.lora

    def score(self, pairs: Sequence[tuple[Any, Any]], **_: Any) -> list[Score]:
        """Numbers that mean nothing."""
        return [
            Score(
                logprob=-1.5 * len(ids),
                token_logprobs=[-1.5] * len(ids),
                token_ids=ids.tolist(),
                ranks=[1] * len(ids),
                is_greedy=True,
                num_tokens=len(ids),
                num_bytes=4 * len(ids),
                num_chars=4 * len(ids),
            )
            for _, ids in pairs
        ]


def growth_over_many_rows(llm: LLM, options: Options, folder: Path) -> list[Figure]:
    """Resident memory and time from a tenth of the rows to all of them."""
    count = 4000 if options.is_smoke else NUM_MANY
    path = folder / "many.jsonl"
    with path.open("w") as file:
        for row in range(count):
            file.write(json.dumps({"text": f"Row {row} of many, the sea and the pier."}) + "\n")
    seen: list[tuple[int, float, int]] = []  # rows, seconds, bytes

    def advance(_bytes: int, rows: int) -> None:
        done = rows + (seen[-1][0] if seen else 0)
        seen.append((done, time.perf_counter(), resident_bytes()))

    work = OneModel(NoModel(llm), find_sources([str(path)]), DataSettings(tokens=False))
    run = DatasetRun(work, advance=advance)
    run.to_file(folder / "many.parquet", force=True)
    tenth = next(one for one in seen if one[0] >= count / 10)
    half = next(one for one in seen if one[0] >= count / 2)
    most = max(one[2] for one in seen if one[0] >= count / 10)
    last = seen[-1]
    pace = [(half[1] - tenth[1]) / (half[0] - tenth[0]), (last[1] - half[1]) / (last[0] - half[0])]
    return [
        Figure(
            name=f"memory from 10 % to 100 % of {count:,} rows",
            unit="MiB more",
            better="lower",
            samples={OURS: [(most - tenth[2]) / MIB]},
            targets=[Target(at_most=32)],
        ),
        Figure(
            name=f"seconds a row in the second half of {count:,} rows over those in the first",
            unit="x",
            better="lower",
            samples={OURS: [pace[1] / pace[0]]},
            targets=[Target(at_most=1.1)],
        ),
    ]


def long_text(folder: Path, num_bytes: int) -> Path:
    """A file of sentences."""
    path, chance = folder / "long.txt", random.Random(0)  # noqa: S311
    block = " ".join(sentence(chance) for _ in range(20_000)) + "\n"
    with path.open("w") as file:
        for _ in range(num_bytes // len(block) + 1):
            file.write(block)
    return path


def parts(path: Path) -> Iterator[str]:
    """The file piece by piece."""
    with path.open() as file:
        while part := file.read(1 << 18):
            yield part


def of_a_long_text(llm: LLM, options: Options, folder: Path) -> list[Figure]:
    """First numbers, and memory over the loaded model and its key/value pool after some windows."""
    path = long_text(folder, 100_000 if options.is_smoke else TEXT_BYTES)
    llm.generate("The", SamplingParams(max_tokens=1))  # a mapped model comes into memory with its first step
    rss = resident_bytes()
    settings = WindowSettings.of(llm, window=256 if options.is_smoke else None)
    first_s: list[float] = []
    for _ in range(options.rounds):
        llm.engine.forget_prefixes()
        began = time.perf_counter()
        tally = TextTally(llm, settings)
        results = score_windows(llm, tally.pieces(parts(path)), settings)
        next(results)
        first_s.append(time.perf_counter() - began)
        results.close()
    results = score_windows(llm, TextTally(llm, settings).pieces(parts(path)), settings)
    for _, (window, _score) in zip(range(NUM_PARTS), results, strict=False):
        last = window.start
    results.close()
    num_read = sum(len(ids) for ids in TextTally(llm, settings).pieces(parts(path)))
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    size = path.stat().st_size / 1e6
    return [
        Figure(
            name=f"first numbers of a {size:.0f} MB text",
            unit="s",
            better="lower",
            samples={OURS: first_s},
            targets=[Target(at_most=5)],
        ),
        Figure(
            name=f"memory of a {size:.0f} MB text over the model and its key/value pool",
            unit="MiB",
            better="lower",
            samples={OURS: [max(most - rss - KV_BYTES, 0) / MIB]},
            targets=[Target(at_most=200)],
            notes=[f"scored up to token {last:,}; all {num_read:,} tokens were made"],
        ),
    ]


def measured(measure: Callable[[LLM, Options, Path], list[Figure]], options: Options) -> list[Figure]:
    """What `measure` finds with a model and a folder of its own."""
    with tempfile.TemporaryDirectory() as name, LLM(options.model, kv_cache_memory_bytes=KV_BYTES) as llm:
        return measure(llm, options, Path(name))


def main() -> None:
    """Run the figures, each kind in a process of its own: memory that one frees is a hole for the next."""
    options = parse_options(__doc__ or "")
    figures: list[Figure] = []
    for measure in (growth_over_many_rows, of_a_long_text, in_one_call_and_as_data):
        if options.is_smoke:
            figures += measured(measure, options)
            continue
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as own:
            figures += own.submit(measured, measure, options).result()
    publish(Path(__file__).stem, figures, options)


if __name__ == "__main__":
    main()
