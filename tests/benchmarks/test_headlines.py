"""The table of docs/performance.md and its chart match the recorded results."""

import json
import re
from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from chart import chart
from harness import OURS, RESULTS, Figure, as_json
from headlines import HEADLINES, Row, rows, title
from process import RIVALS
from report import (
    PAGE,
    PICTURE,
    README,
    README_TASKS,
    newest_results,
    page,
    picture,
    places,
    readme,
    without_gone,
)

TASK = next(iter(HEADLINES))
BENCH, FIGURE = HEADLINES[TASK]


def recorded(bench: str, name: str) -> tuple[str, Mapping[str, Any]]:
    """Return day and figure from the newest file with the benchmark, read independently of the report."""
    for path in sorted(RESULTS.glob("[0-9]*.json"), reverse=True):
        benches = json.loads(path.read_text(encoding="utf-8"))["benches"]
        if bench in benches:
            return path.stem, next(one for one in benches[bench]["figures"] if one["name"] == name)
    raise AssertionError(f"nothing recorded of {bench}")


def row(**samples: list[float]) -> list[Row]:
    """Return the rows of one benchmark with one figure."""
    measured = Figure(name=FIGURE, unit="tokens/s", better="higher", samples={OURS: [8.0, 6.0], **samples})
    machine = {"cpu": "Imagined CPU", "cores": 2, "memory_bytes": 8 << 30, "versions": {}, "commit": None}
    return rows({BENCH: {"day": "2026-01-02", "machine": machine, "figures": [as_json(measured)]}})


def test_the_page_its_picture_and_the_readme_hold_the_recorded_figures() -> None:
    results = without_gone(newest_results())
    assert PAGE.read_text(encoding="utf-8") == page(results), "run `python benchmarks/report.py`"
    assert PICTURE.read_text(encoding="utf-8") == picture(results), "run `python benchmarks/report.py`"
    text = README.read_text(encoding="utf-8")
    assert text == readme(text, results), "run `python benchmarks/report.py`"
    assert set(README_TASKS) <= set(HEADLINES)


@pytest.mark.parametrize("task", HEADLINES)
def test_a_row_says_what_was_recorded_beside_the_best_other_library(task: str) -> None:
    day, figure = recorded(*HEADLINES[task])
    line = next(
        line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {task} |")
    )
    _, _, ours, theirs, ratio, measured, _ = line.split("|")
    others = {
        name: spread["median"]
        for name, spread in figure["ratios"].items()
        if name.split()[0] in RIVALS and name.split()[0] != OURS
    }
    best = min(others, key=lambda name: others[name])
    name, _, value = theirs.strip().rpartition(": ")
    assert name == title(best)
    assert float(value.replace(",", "")) == pytest.approx(figure["spreads"][best]["median"], rel=0.005)
    number, _, unit = ours.strip().partition(" ")
    assert float(number.replace(",", "")) == pytest.approx(figure["spreads"][OURS]["median"], rel=0.005)
    assert unit == figure["unit"]
    median, low, high = map(float, re.findall(r"\d+\.\d+", ratio))
    spread = figure["ratios"][best]
    assert [median, low, high] == pytest.approx(
        [spread["median"], spread["minimum"], spread["maximum"]], abs=0.005
    )
    assert measured.strip().startswith(day)


def test_every_task_is_recorded_beside_another_library() -> None:
    assert [row.task for row in rows(newest_results())] == list(HEADLINES)


def test_of_several_contestants_the_best_other_library_is_taken() -> None:
    samples = {"floor": [99.0, 99.0], "logprobe over HTTP": [9.0, 9.0], "vllm best": [2.0, 3.0]}
    [only] = row(**samples, **{"transformers best": [1.0, 1.0]})
    assert (only.rival, only.ours, only.theirs, only.ratio["median"]) == ("vLLM best", 7.0, 2.5, 3.0)


def test_where_no_other_library_was_measured_there_is_no_row() -> None:
    assert row(floor=[1.0, 1.0]) == []
    assert rows({}) == []


def test_each_processor_is_told_with_its_tasks() -> None:
    [first] = row(**{"vllm best": [2.0, 3.0]})
    other = Row(**(vars(first) | {"task": "another", "machine": {**first.machine, "cpu": "Older CPU"}}))
    told = {place.partition(",")[0]: tasks for place, tasks in places([first, other]).items()}
    assert told == {"Imagined CPU": [TASK], "Older CPU": ["another"]}


def test_a_bar_leads_from_one_to_the_ratio_whichever_side_it_is_on() -> None:
    for theirs, kind, side in (([2.0, 2.0], "better", 1), ([32.0, 32.0], "worse", -1)):
        root = ET.fromstring(chart(row(**{"vllm best": theirs}), ["<a note> & more"]))  # noqa: S314
        bar = next(line for line in root.iter() if line.get("class") == f"bar {kind}")
        assert (float(bar.attrib["x2"]) - float(bar.attrib["x1"])) * side > 0
        assert "<a note> & more" in [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
