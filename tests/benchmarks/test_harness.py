import json
import sys
from pathlib import Path
from typing import Any

import bench_real
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
from process import RIVALS, Rival, RivalError

from logprobe.kernels.native import library


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


BFLOAT16_LABELS = {"logprobe bf16x3", "transformers bfloat16", "vllm bfloat16"}


def install_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each rival have an environment."""
    everything = {
        name: Rival(**(vars(rival) | {"python": Path(sys.executable)})) for name, rival in RIVALS.items()
    }
    monkeypatch.setattr(harness, "RIVALS", everything)
    monkeypatch.setattr(bench_real, "RIVALS", everything)


def options_of(*, is_bfloat16: bool) -> Options:
    return Options(
        is_smoke=False, is_json=True, rounds=1, model="", rivals=tuple(RIVALS), is_bfloat16=is_bfloat16
    )


@pytest.mark.parametrize(("has_tiles", "is_asked"), [(False, False), (False, True), (True, False)])
def test_bfloat16_takes_part_on_processors_with_tiles_or_when_asked_for(
    has_tiles: bool, is_asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_all(monkeypatch)
    monkeypatch.setitem(library().__dict__, "has_tiles", has_tiles)
    arena = object.__new__(harness.Arena)
    arena.options = options_of(is_bfloat16=is_asked)
    wanted = (OURS, "transformers", "vllm", "llama_cpp")
    usual, all_labels = arena.labels(*wanted), arena.labels(*wanted, bfloat16=True)
    assert {OURS, "transformers best", "vllm best", "vllm default", "llama_cpp q8_0"} <= usual.keys()
    assert not usual.keys() & BFLOAT16_LABELS
    further = BFLOAT16_LABELS if has_tiles or is_asked else set()
    assert all_labels.keys() == usual.keys() | further
    paths = {"folder": Path("model"), "q8_0": Path("model.gguf")}
    racing = {(one.label, one.form) for one in bench_real.contestants(paths, arena.options)}
    assert {(OURS, "q8_0"), ("transformers float32", "bfloat16"), ("vllm bfloat16", "bfloat16")} <= racing
    more = {("logprobe bf16x3", "q8_0"), ("logprobe bf16x3", "bfloat16"), ("vllm float32", "bfloat16")}
    assert racing & more == (more if has_tiles or is_asked else set())


def test_each_rival_in_bfloat16_has_a_process_of_its_own_that_is_opened_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: dict[str, Any] = {}

    class FakeProcess:
        def __init__(self, _rival: Rival, *, log_name: str) -> None:
            opened[log_name] = self
            self.jobs: list[dict[str, Any]] = []
            self.is_paused = self.is_closed = False

        def ask(self, job: dict[str, Any]) -> dict[str, Any]:
            assert not self.is_paused
            self.jobs.append(job)
            return {}

        def pause(self) -> None:
            self.is_paused = True

        def resume(self) -> None:
            self.is_paused = False

        def close(self) -> None:
            self.is_closed = True

    install_all(monkeypatch)
    monkeypatch.setattr(harness, "RivalProcess", FakeProcess)
    arena = object.__new__(harness.Arena)
    arena.options, arena._running, arena._warm = options_of(is_bfloat16=True), {}, set()
    arena.model_folder = arena.float_folder = Path("model")
    for contestant in arena.labels(OURS, "vllm", bfloat16=True).values():
        arena.ask(contestant, "score", [])
    told = {name: [(job["variant"], job.get("options")) for job in one.jobs] for name, one in opened.items()}
    assert told == {
        "logprobe": [("default", None)],
        "logprobe bf16x3": [("default", {"arithmetic": "bf16x3"})],
        "vllm": [("best", None), ("default", None)],
        "vllm bfloat16": [("best", {"dtype": "bfloat16"})],
    }
    assert [name for name, one in opened.items() if not one.is_paused] == ["vllm bfloat16"]
    arena.close("vllm")
    assert [name for name, one in opened.items() if one.is_closed] == ["vllm", "vllm bfloat16"]


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
    for is_bfloat16 in (False, True):
        options = Options(
            is_smoke=False, is_json=True, rounds=1, model=model, rivals=rivals, is_bfloat16=is_bfloat16
        )
        publish("bench_a", [figure()], options)
    assert saved == [name, f"{name} --bfloat16"]


def test_a_figure_as_json_carries_spreads_ratios_and_verdicts() -> None:
    content = as_json(figure(targets=[Target(against="rival best", at_least=2.0)]))
    assert json.loads(json.dumps(content)) == content
    assert content["spreads"][OURS] == {"median": 20.0, "minimum": 10.0, "maximum": 30.0}
    assert content["ratios"]["rival best"]["median"] == 2.0
    assert content["targets"][0]["text"] == "≥ 2 x rival best"
    assert content["targets"][0]["verdict"] == "met"
