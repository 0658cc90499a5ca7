import json
from pathlib import Path
from typing import Any

import harness
import pytest
from harness import (
    DEFAULT_MODEL,
    FLOOR,
    OURS,
    ROOT,
    Figure,
    Options,
    Spread,
    Target,
    alternate,
    as_json,
    publish,
    save,
)
from process import RIVALS, RivalError


def figure(**changes: Any) -> Figure:
    common: dict[str, Any] = {
        "name": "decode",
        "unit": "tokens/s",
        "better": "higher",
        "samples": {OURS: [10.0, 30.0, 20.0], "rival best": [5.0, 10.0, 10.0]},
    }
    return Figure(**(common | changes))


def test_contestants_take_turns_in_each_round() -> None:
    calls: list[tuple[str, int]] = []

    def contestant(name: str) -> harness.Measure:
        def measure(number: int) -> float:
            calls.append((name, number))
            return float(number)

        return measure

    samples, notes = alternate({"a": contestant("a"), "b": contestant("b")}, rounds=2)
    assert calls == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert samples == {"a": [0.0, 1.0], "b": [0.0, 1.0]}
    assert notes == []


def test_a_failing_rival_leaves_the_race_with_a_note_and_the_rest_goes_on() -> None:
    def fail(number: int) -> float:
        if number == 1:
            raise RivalError("out of memory")
        return 1.0

    samples, notes = alternate({OURS: lambda _: 2.0, "rival best": fail}, rounds=3)
    assert samples == {OURS: [2.0, 2.0, 2.0]}
    assert notes == ["rival best left the race: out of memory"]


def test_our_own_failure_fails_the_run() -> None:
    def fail(_number: int) -> float:
        raise RivalError("broken")

    with pytest.raises(RivalError, match="broken"):
        alternate({OURS: fail, "rival best": lambda _: 1.0}, rounds=1)


def test_ratios_are_taken_pair_by_pair() -> None:
    assert figure().ratio("rival best") == Spread(median=2.0, minimum=2.0, maximum=3.0)


def test_a_smaller_time_is_a_ratio_above_one() -> None:
    quick = figure(better="lower", samples={OURS: [1.0], "rival best": [4.0]})
    assert quick.ratio("rival best") == Spread(median=4.0, minimum=4.0, maximum=4.0)


def test_the_floor_is_measured_while_nobody_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    class Racing:
        is_paused = False

        def pause(self) -> None:
            self.is_paused = True

    racing = Racing()
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    arena = object.__new__(harness.Arena)
    arena.float_folder, arena._running = tmp_path, {"rival": racing}  # type: ignore[dict-item]
    monkeypatch.setattr(harness, "read_bandwidth", lambda: 1000.0 if racing.is_paused else 0.0)
    assert arena.floor(8)(0) == 80.0


@pytest.mark.parametrize(
    ("target", "verdict"),
    [
        (Target(against="rival best", at_least=2.0), "met"),
        (Target(against="rival best", at_least=2.1), "missed"),
        (Target(against="absent best", at_least=2.0), "not measured"),
        (Target(against=FLOOR, at_least=0.5), "not measured"),
        (Target(at_most=20.0), "met"),
        (Target(at_most=19.0), "missed"),
    ],
)
def test_a_target_is_met_missed_or_not_measured(target: Target, verdict: str) -> None:
    assert figure().verdict(target) == verdict


def test_a_day_holds_the_newest_content_of_each_bench(tmp_path: Any) -> None:
    save("bench_a", {"figures": [1]}, tmp_path)
    save("bench_b", {"figures": [2]}, tmp_path)
    path = save("bench_a", {"figures": [3]}, tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert json.loads(path.read_text()) == {
        "benches": {"bench_a": {"figures": [3]}, "bench_b": {"figures": [2]}}
    }


@pytest.mark.parametrize(
    ("model", "rivals", "name"),
    [
        (DEFAULT_MODEL, tuple(RIVALS), "bench_a"),
        ("gemma3-270m", tuple(RIVALS), "bench_a --model gemma3-270m"),
        ("/x/own", tuple(RIVALS), "bench_a --model own"),
        ("/x/own", (OURS, "vllm"), "bench_a --model own --rivals vllm"),
    ],
)
def test_another_model_or_race_has_figures_of_its_own(
    model: str, rivals: tuple[str, ...], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[str] = []

    def note(bench: str, _content: object) -> Path:
        saved.append(bench)
        return ROOT / "result.json"

    monkeypatch.setattr(harness, "save", note)
    options = Options(is_smoke=False, is_json=True, rounds=1, model=model, rivals=rivals)
    publish("bench_a", [figure()], options)
    assert saved == [name]


def test_a_figure_as_json_carries_spreads_ratios_and_verdicts() -> None:
    content = as_json(figure(targets=[Target(against="rival best", at_least=2.0)]))
    assert json.loads(json.dumps(content)) == content
    assert content["spreads"][OURS] == {"median": 20.0, "minimum": 10.0, "maximum": 30.0}
    assert content["ratios"]["rival best"]["median"] == 2.0
    assert content["targets"][0]["text"] == "≥ 2 x rival best"
    assert content["targets"][0]["verdict"] == "met"
