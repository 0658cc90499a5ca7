"""Write docs/performance.md and its picture from the newest result of each benchmark in results/.

`--all` prints every recorded figure with its targets instead.
"""

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from areas import AREAS, PREFIXES
from chart import chart
from harness import DEFAULT_MODEL, OURS, RESULTS, ROOT, number
from headlines import Row, rows, title
from misses import REASONS

PAGE = ROOT / "docs" / "performance.md"
PICTURE = ROOT / "docs" / "pictures" / "performance.svg"

OPENING = f"""# Performance

![The table below as a picture: a bar for each ratio](pictures/{PICTURE.name})

Typical tasks with the model `{DEFAULT_MODEL}` (SmolLM2-135M-Instruct, Q4_1), each compared with the best of
the other libraries that were measured. The ratio says how many times as good logprobe is: above 1 it is
better, whether the unit counts up or down. The worst and the best round are in parentheses. The last column
gives the day and the commit.

"""

AREA_OPENING = """
## Results by area

Medians over the rounds, and for each other library or variant the median and the ratio. `best` is the
best public configuration of a library, `default` its defaults, `q8_0` llama.cpp's own 8-bit weights;
`floor` is what reading the weights once per step would allow, `multiply-adds alone` what the arithmetic
would. GPU figures are on the page about [NVIDIA GPUs](gpu.md), delays under attack on
[reliability](reliability.md).
"""

MISSED = """
## Missed targets

Benchmarks have targets. Those that the newest run misses, and why:

"""

HOW = """
## How it is measured

`make rivals` installs the other libraries, `make bench` runs every `benchmarks/bench_*.py` except
`bench_real.py` and `bench_gpu.py`, and `make bench-real` runs `bench_real.py` on a model of real size
with random weights. Every run is saved in `benchmarks/results`, and `python benchmarks/report.py` writes
this page from the newest result of each benchmark; `python benchmarks/report.py --all` prints every
figure with its spread, targets and notes.

- Each library runs in its own process and environment, on the same weights, prompts and number of
  threads, and with the same number type unless its label names another.
- The libraries take turns; the others are stopped meanwhile. A ratio is the median over the rounds of
  logprobe against the other library in the same round.
- Rates and seconds belong to the machine; the ratios are what can be compared.

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
"""Benchmarks whose figures are on docs/reliability.md and docs/gpu.md."""


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


AREA_HEADINGS = ("figure", "logprobe", "others", "measured")


def area_lines(title_: str, results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the heading and table of an area; empty if none of its figures is recorded."""
    lines = [
        area_line(bench, figure, results[bench])
        for bench, names in AREAS[title_].items()
        if bench in results
        for name in names
        for figure in results[bench]["figures"]
        if figure["name"] == name
    ]
    if not lines:
        return []
    head = ["| " + " | ".join(AREA_HEADINGS) + " |", "|---" * len(AREA_HEADINGS) + "|"]
    return [f"\n### {title_}\n", *head, *lines]


def area_line(bench: str, figure: Mapping[str, Any], content: Mapping[str, Any]) -> str:
    """Return one figure as a row of an area's table."""
    spreads, ratios = figure["spreads"], figure["ratios"]
    ours = f"{number(spreads[OURS]['median'])} {figure['unit']}" if OURS in spreads else ""
    others = [
        f"{title(name)}: {number(spread['median'])}"
        + (f" ({ratios[name]['median']:.2f} x)" if name in ratios else "")
        for name, spread in spreads.items()
        if name != OURS
    ]
    model = bench.partition("--model ")[2].split()
    name = PREFIXES.get(bench, "") + figure["name"] + (f" ({model[0]})" if model else "")
    cells = (name, ours, "<br>".join(others), f"{content['day']}, {commit(content['machine'])}")
    return "| " + " | ".join(cells) + " |"


def missed_lines(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the table of the targets that are missed, one benchmark per row."""
    yield "| benchmark | missed | reason |"
    yield "|---|---|---|"
    for bench, content in results.items():
        if misses_any(content):
            missed = [
                f"{figure['name']}: {target['text']}"
                for figure in content["figures"]
                for target in figure["targets"]
                if target["verdict"] == "missed"
            ]
            yield f"| `{bench}` | {'<br>'.join(missed)} | {REASONS[bench]} |"


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
        f"{row.day}, {commit(row.machine)}",
    )
    return "| " + " | ".join(cells) + " |"


def places(headlines: Sequence[Row]) -> dict[str, list[str]]:
    """Processor and versions -> the tasks that were measured so."""
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
    areas = [line for name in AREAS for line in area_lines(name, results)]
    parts = [OPENING, _text(first_table(rows(results)))]
    parts += [AREA_OPENING, _text(areas)] if areas else []
    if any(map(misses_any, results.values())):
        parts += [MISSED, _text(missed_lines(results))]
    return "".join([*parts, HOW, _text(machines(results))])


def machines(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield on what the benchmarks of the page were measured, one machine and set of versions per line."""
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
    """The headlines drawn, with their days and what they were measured on."""
    headlines = rows(results)
    days = ", ".join(sorted({row.day for row in headlines}))
    legend = f"{DEFAULT_MODEL}, measured {days}; bar: median of the rounds, thin line: their range"
    return chart(headlines, [legend, *places(headlines)])


def main() -> None:
    """Write the page and its picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--all", action="store_true", help="print every recorded figure; write nothing")
    results = without_gone(newest_results())
    if parser.parse_args().all:
        print(everything(results), end="")
        return
    for path, content in ((PAGE, page(results)), (PICTURE, picture(results))):
        path.write_text(content, encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
