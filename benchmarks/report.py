"""Write docs/performance.md and its picture from the newest result of each benchmark in results/."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from chart import chart
from harness import DEFAULT_MODEL, OURS, RESULTS, ROOT, number
from headlines import Row, rows
from misses import REASONS

PAGE = ROOT / "docs" / "performance.md"
PICTURE = ROOT / "docs" / "pictures" / "performance.svg"

OPENING = f"""# Performance

![The table below as a picture: a bar for each ratio](pictures/{PICTURE.name})

Tasks of a user with the model `{DEFAULT_MODEL}`, each beside the other library that was best at it of those
measured. The ratio says how many times as good ours is: over 1 it is better, whichever way the unit counts;
in brackets stand the worst and the best round. The last column says when it was measured and at which commit
of ours, and leads to all figures of the benchmark.

"""

HOW = """
## How it is measured

Written by `make bench`, which runs every `benchmarks/bench_*.py` but one: `make bench-real` runs
`bench_real.py`, on a model of real size that it makes of random weights. Each rival runs in a process and
environment of its own, on the same weights, prompts, number type (unless its label names another) and number
of threads; the contestants take turns, and a ratio is the median over the rounds of ours against theirs in
the same round. Above 1 means that ours is better, whichever way the unit counts. `best` is a rival's best
public configuration, `default` what it does unasked, `q8_0` llama.cpp's own 8-bit weights. Seconds and rates
belong to the machine named; the ratios are the claim.

## All figures
"""

HEADLINE_HEADINGS = ("task", "logprobe", "the best other", "ours against it", "measured")

HEADINGS = ("figure", "target", "ours", "others", "ours against them", "verdict")


def newest_results(folder: Path = RESULTS) -> dict[str, Mapping[str, Any]]:
    """Benchmark -> the content of its latest run, and its day; later files win."""
    found: dict[str, Mapping[str, Any]] = {}
    for path in sorted(folder.glob("[0-9]*.json")):
        benches = json.loads(path.read_text(encoding="utf-8"))["benches"]
        found |= {bench: content | {"day": path.stem} for bench, content in benches.items()}
    return dict(sorted(found.items()))


ELSEWHERE = {"attacks", "gpu"}
"""Whose figures docs/reliability.md and docs/gpu.md show."""


def without_gone(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The results of benchmarks whose script is still here, and whose page this is: old files keep others."""
    scripts = {
        path.stem.removeprefix("bench_") for path in Path(__file__).parent.glob("bench_*.py")
    } - ELSEWHERE
    return {
        bench: one for bench, one in results.items() if bench.split()[0].removeprefix("bench_") in scripts
    }


def _spread(spread: Mapping[str, float]) -> str:
    median, low, high = (number(spread[key]) for key in ("median", "minimum", "maximum"))
    return median if low == high else f"{median} ({low} - {high})"


def figure_line(figure: Mapping[str, Any]) -> str:
    """One figure as a line of the table."""
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
    """What something was measured on."""
    return f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_bytes'] / 2**30:.0f} GiB"


def versions(facts: Mapping[str, Any]) -> str:
    """What was measured, as far as it runs beside us."""
    return ", ".join(f"{name} {version}" for name, version in facts["versions"].items())


def commit(facts: Mapping[str, Any]) -> str:
    """Ours when something was measured, shortened."""
    return (facts["commit"] or "unknown")[:10]


def machine(facts: Mapping[str, Any]) -> str:
    """Where something was measured, in a line."""
    load = f"load average {facts['load_average']:.1f} at the end"
    return f"{processor(facts)}, {load}; {versions(facts)}; commit {commit(facts)}"


def misses_any(content: Mapping[str, Any]) -> bool:
    """Whether a target of a benchmark is missed."""
    return any(target["verdict"] == "missed" for figure in content["figures"] for target in figure["targets"])


def section(bench: str, content: Mapping[str, Any]) -> Iterator[str]:
    """The lines of one benchmark: table, notes, machine."""
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
    """One task as a line of the first table."""
    median, low, high = (f"{row.ratio[key]:.2f}" for key in ("median", "minimum", "maximum"))
    cells = (
        row.task,
        f"{number(row.ours)} {row.unit}",
        f"{row.rival}: {number(row.theirs)}",
        f"**{median} x** ({low} - {high})",
        f"{row.day}, [{commit(row.machine)}](#{row.bench})",
    )
    return "| " + " | ".join(cells) + " |"


def places(headlines: Sequence[Row]) -> dict[str, list[str]]:
    """Processor and versions -> the tasks that were measured so."""
    tasks: dict[str, list[str]] = {}
    for row in headlines:
        tasks.setdefault(f"{processor(row.machine)}; {versions(row.machine)}", []).append(row.task)
    return tasks


def first_table(headlines: Sequence[Row]) -> Iterator[str]:
    """The lines of what a user decides by, and on what it was measured."""
    yield "| " + " | ".join(HEADLINE_HEADINGS) + " |"
    yield "|---" * len(HEADLINE_HEADINGS) + "|"
    yield from map(headline_line, headlines)
    for place, tasks in places(headlines).items():
        which = "" if len(tasks) == len(headlines) else f" ({'; '.join(tasks)})"
        yield f"\nMeasured on {place}{which}."


def page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The whole page."""
    first = "\n".join(first_table(rows(results))) + "\n"
    lines = [line for bench, content in results.items() for line in section(bench, content)]
    return OPENING + first + HOW + "\n".join(lines) + "\n"


def picture(results: Mapping[str, Mapping[str, Any]]) -> str:
    """The headlines drawn, with their days and what they were measured on."""
    headlines = rows(results)
    days = ", ".join(sorted({row.day for row in headlines}))
    legend = f"{DEFAULT_MODEL}, measured {days}; bar: median of the rounds, thin line: their range"
    return chart(headlines, [legend, *places(headlines)])


def main() -> None:
    """Write the page and its picture."""
    results = without_gone(newest_results())
    for path, content in ((PAGE, page(results)), (PICTURE, picture(results))):
        path.write_text(content, encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
