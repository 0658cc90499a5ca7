import json
from pathlib import Path

from harness import OURS, Figure, Target, as_json
from misses import REASONS
from report import everything, misses_any, newest_results, without_gone

MACHINE = {
    "cpu": "Imagined CPU",
    "cores": 2,
    "memory_bytes": 8 << 30,
    "load_average": 0.25,
    "commit": "0123456789abcdef",
    "versions": {"python": "3.11.7", "torch": "2.13.0"},
}


def content(ours: float) -> dict[str, object]:
    measured = Figure(
        name="decode, batch 1",
        unit="tokens/s",
        better="higher",
        samples={OURS: [ours, ours + 1], "rival best": [10.0, 10.0], "floor": [4000.0, 4000.0]},
        targets=[Target(against="rival best", at_least=2.0), Target(against="other", at_least=1.0)],
        notes=["other is not installed"],
    )
    return {"machine": MACHINE, "figures": [as_json(measured)]}


def newest(ours: float) -> dict[str, dict[str, object]]:
    """Return the results of one benchmark as read from a file."""
    return {"bench_decode": content(ours) | {"day": "2026-01-02"}}


def write(folder: Path, name: str, benches: dict[str, object]) -> None:
    (folder / name).write_text(json.dumps({"benches": benches}), encoding="utf-8")


def test_the_newest_file_wins_bench_by_bench(tmp_path: Path) -> None:
    write(tmp_path, "2026-01-02.json", {"bench_a": content(2.0)})
    write(tmp_path, "2026-01-01.json", {"bench_b": content(3.0), "bench_a": content(1.0)})
    assert newest_results(tmp_path) == {
        "bench_a": content(2.0) | {"day": "2026-01-02"},
        "bench_b": content(3.0) | {"day": "2026-01-01"},
    }


def test_a_benchmark_that_is_gone_is_left_out() -> None:
    here = ["bench_decode", "bench_decode --model gemma3-270m", "extract"]
    assert list(without_gone(dict.fromkeys(["bench_gone", *here], content(2.0)))) == here


def test_everything_states_figure_target_ours_rivals_ratio_verdict_and_machine() -> None:
    lines = everything(newest(20.0)).splitlines()
    assert "### `bench_decode`" in lines
    row = next(line for line in lines if line.startswith("| decode"))
    assert row == (
        "| decode, batch 1, tokens/s | ≥ 2 x rival best<br>≥ 1 x other | 20.5 (20 - 21) "
        "| rival best: 10<br>floor: 4,000 | rival best: 2.05 x<br>floor: 0.01 x | met<br>not measured |"
    )
    assert "Note: other is not installed." in lines
    assert lines[-1] == (
        "Measured 2026-01-02 on Imagined CPU, 2 cores, 8 GiB, load average 0.2 at the end; "
        "python 3.11.7, torch 2.13.0; commit 0123456789."
    )


def test_a_missed_target_is_shown_with_its_reason() -> None:
    assert f"Missed: {REASONS['bench_decode']}" in everything(newest(10.0)).splitlines()
    assert "Missed" not in everything(newest(20.0))
    lacking = {
        bench for bench, one in without_gone(newest_results()).items() if misses_any(one)
    } - REASONS.keys()
    assert not lacking, "say in benchmarks/misses.py why"
