"""Write docs/performance.md, its picture and a table of README.md from the newest results in results/.

`--all` prints every recorded figure with its targets, and the reason for each missed target, instead.
"""

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from chart import chart
from harness import DEFAULT_MODEL, OURS, RESULTS, ROOT, number
from headlines import Row, rows
from misses import REASONS

PAGE = ROOT / "docs" / "performance.md"
README = ROOT / "README.md"
PICTURE = ROOT / "docs" / "pictures" / "performance.svg"

OPENING = f"""# Performance

![The table below as a picture: a bar for each ratio](pictures/{PICTURE.name})

Each row compares logprobe on a CPU with the best of the other libraries that were measured. The model is
`{DEFAULT_MODEL}` (SmolLM2-135M-Instruct, Q4_1); rows that start with "1.2B" use a model of 1.2 billion random
weights. A ratio above 1 means that logprobe is better, whether higher or lower values are better. The lowest
and highest ratios of single rounds are in parentheses. Figures for a GPU are on [NVIDIA GPUs](gpu.md).

"""

HOW = """
## How it is measured

`make rivals` installs the other libraries; `make bench` and `make bench-real` run the benchmarks.
`python benchmarks/report.py --all` prints every figure with its spread, its target and, if the target is
missed, the reason.

- Each library runs in its own process and environment, on the same weights, prompts and number of
  threads, and computes in the same dtype unless its label names another. `best` is a library with its
  fastest public options, such as vLLM with flat log-probabilities and without detokenization.
- The libraries take turns; the processes of the others are paused meanwhile. Each round gives one ratio of
  logprobe to the other library; the table shows the median of these.
- Rates and seconds depend on the machine; compare the ratios.

"""

BEGIN, END = "<!-- begin: benchmarks/report.py -->\n", "<!-- end: benchmarks/report.py -->"

README_OPENING = """
Medians on two CPU cores, with `smollm2` or, where marked "1.2B", a model with 1.2 billion randomly
initialized parameters. A ratio is the median of the ratios of single rounds, so it can differ from the ratio
of the two medians; above 1 x, logprobe is faster. "vLLM best" is vLLM with the fastest of the settings that
were measured.
[Performance](docs/performance.md) has all tasks and explains the measurements.

"""

README_TASKS = (
    "generate, one prompt, 20 alternatives a token",
    "generate, 32 prompts at once, 20 alternatives",
    "score 4 answers to a context of 256 tokens",
    "whole next-token distributions of 64 prefixes",
    "1.2B in bfloat16: generate, 32 prompts at once",
    "1.2B in Q4_K_M: generate, one prompt",
)

HEADLINE_HEADINGS = ("task", "logprobe", "best other library", "ratio", "measured")

HEADINGS = ("figure", "target", "ours", "others", "ours against them", "verdict")


def newest_results(folder: Path = RESULTS) -> dict[str, Mapping[str, Any]]:
    """Return the content and the day of each benchmark's latest run."""
    found: dict[str, Mapping[str, Any]] = {}
    for path in sorted(folder.glob("[0-9]*.json")):
        benches = json.loads(path.read_text(encoding="utf-8"))["benches"]
        found |= {bench: content | {"day": path.stem} for bench, content in benches.items()}
    return dict(sorted(found.items()))


def without_gone(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the results of benchmarks whose scripts still exist; old files hold others too."""
    scripts = {path.stem.removeprefix("bench_") for path in Path(__file__).parent.glob("bench_*.py")}
    return {
        bench: one for bench, one in results.items() if bench.split()[0].removeprefix("bench_") in scripts
    }


def _spread(spread: Mapping[str, float]) -> str:
    median, low, high = (number(spread[key]) for key in ("median", "minimum", "maximum"))
    return median if low == high else f"{median} ({low} - {high})"


def figure_line(figure: Mapping[str, Any]) -> str:
    """Return one figure as a row of the table."""
    spreads, ratios, targets = figure["spreads"], figure["ratios"], figure["targets"]
    others = [f"{name}: {number(spread['median'])}" for name, spread in spreads.items() if name != OURS]
    cells = (
        f"{figure['name']}, {figure['unit']}",
        "<br>".join(target["text"] for target in targets),
        _spread(spreads[OURS]) if OURS in spreads else "",
        "<br>".join(others),
        "<br>".join(f"{name}: {ratio['median']:.2f} x" for name, ratio in ratios.items()),
        "<br>".join(target["verdict"] for target in targets),
    )
    return "| " + " | ".join(cells) + " |"


def processor(facts: Mapping[str, Any]) -> str:
    """Return the processor, cores and memory of a machine."""
    return f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_bytes'] / 2**30:.0f} GiB"


def versions(facts: Mapping[str, Any]) -> str:
    """Return the measured versions of Python and the libraries."""
    return ", ".join(f"{name} {version}" for name, version in facts["versions"].items())


def commit(facts: Mapping[str, Any]) -> str:
    """Return the abbreviated commit of logprobe that was measured."""
    return (facts["commit"] or "unknown")[:10]


def machine(facts: Mapping[str, Any]) -> str:
    """Return the machine, versions and commit of a measurement on one line."""
    load = f"load average {facts['load_average']:.1f} at the end"
    return f"{processor(facts)}, {load}; {versions(facts)}; commit {commit(facts)}"


def misses_any(content: Mapping[str, Any]) -> bool:
    """Return True if a target of a benchmark is missed."""
    return any(target["verdict"] == "missed" for figure in content["figures"] for target in figure["targets"])


def section(bench: str, content: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of one benchmark: table, notes, machine."""
    yield f"\n### `{bench}`\n"
    yield "| " + " | ".join(HEADINGS) + " |"
    yield "|---" * len(HEADINGS) + "|"
    yield from map(figure_line, content["figures"])
    notes = dict.fromkeys(note for figure in content["figures"] for note in figure["notes"])
    yield from (f"\nNote: {note}." for note in notes)
    if misses_any(content):
        yield f"\nMissed: {REASONS[bench]}"
    yield f"\nMeasured {content['day']} on {machine(content['machine'])}."


def headline_line(row: Row) -> str:
    """Return one task as a row of the table."""
    median, low, high = (f"{row.ratio[key]:.2f}" for key in ("median", "minimum", "maximum"))
    cells = (
        row.task,
        f"{number(row.ours)} {row.unit}",
        f"{row.rival}: {number(row.theirs)}",
        f"**{median} x** ({low} - {high})",
        f"{row.day}, {commit(row.machine)}",
    )
    return "| " + " | ".join(cells) + " |"


def places(headlines: Sequence[Row]) -> dict[str, list[str]]:
    """Return the tasks measured on each processor with each set of versions."""
    tasks: dict[str, list[str]] = {}
    for row in headlines:
        tasks.setdefault(f"{processor(row.machine)}; {versions(row.machine)}", []).append(row.task)
    return tasks


def first_table(headlines: Sequence[Row]) -> Iterator[str]:
    """Yield the table of headlines."""
    yield "| " + " | ".join(HEADLINE_HEADINGS) + " |"
    yield "|---" * len(HEADLINE_HEADINGS) + "|"
    yield from map(headline_line, headlines)


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the whole page."""
    headlines = rows(results)
    measured = {row.bench: results[row.bench] for row in headlines}
    return "".join([OPENING, _text(first_table(headlines)), HOW, _text(machines(measured))])


def readme(text: str, results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the text of README.md with the current table."""
    head, begin, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    lines = ["| task | logprobe | best other library | ratio |", "|---|---|---|---|"]
    for row in rows(results):
        if row.task in README_TASKS:
            ours, theirs = f"{number(row.ours)} {row.unit}", f"{row.rival}: {number(row.theirs)}"
            lines.append(f"| {row.task} | {ours} | {theirs} | {row.ratio['median']:.2f} x |")
    return "".join([head, begin, README_OPENING, _text([*lines, ""]), end, tail])


def machines(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the machines and versions of the benchmarks on the page, one per line."""
    benches: dict[str, list[str]] = {}
    for bench, content in results.items():
        facts = content["machine"]
        benches.setdefault(f"{processor(facts)}; {versions(facts)}", []).append(bench)
    for place, names in benches.items():
        which = "" if len(benches) == 1 else f" ({', '.join(names)})"
        yield f"Measured on {place}{which}."


def everything(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return every recorded figure, with targets and notes, one section per benchmark."""
    return _text(line for bench, content in results.items() for line in section(bench, content))


def _text(lines: Iterable[str]) -> str:
    return "\n".join(lines) + "\n"


def picture(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the headlines as an SVG picture, with the days and machines of the measurements."""
    headlines = rows(results)
    days = ", ".join(sorted({row.day for row in headlines}))
    legend = f"{DEFAULT_MODEL}, measured {days}; bar: median of the rounds, thin line: their range"
    return chart(headlines, [legend, *places(headlines)])


def main() -> None:
    """Write the page, its picture and the table of the README."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--all", action="store_true", help="print every recorded figure; write nothing")
    results = without_gone(newest_results())
    if parser.parse_args().all:
        print(everything(results), end="")
        return
    texts = {
        PAGE: page(results),
        PICTURE: picture(results),
        README: readme(README.read_text(encoding="utf-8"), results),
    }
    for path, content in texts.items():
        path.write_text(content, encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
