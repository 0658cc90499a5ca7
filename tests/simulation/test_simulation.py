"""The simulation: a few seeds, equal traces of equal seeds, and the reduction of a failing plan."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from logprobe import runtime
from logprobe.engine.plan.scheduler import Scheduler
from simulation import plan as plan_module
from simulation import world as world_module
from simulation.mutations import MUTATIONS, ROOT, Mutation
from simulation.plan import Plan, draw_plan
from simulation.shrink import shrink
from simulation.world import simulate

TESTS = Path(__file__).parents[1]
IMPORTS = "from simulation.world import simulate\nfrom simulation.plan import draw_plan\nimport sys\n"


@pytest.mark.parametrize("seed", range(1, 41))
def test_the_first_seeds_find_nothing(seed: int) -> None:
    plan = draw_plan(seed)
    try:
        simulate(plan)
    except Exception as error:
        error.add_note(plan.code())
        raise


def test_the_same_seed_gives_the_same_trace_in_any_process() -> None:
    seeds = [3, 8, 21, 30]
    traces = [simulate(draw_plan(seed)).digest for seed in seeds]
    assert [simulate(draw_plan(seed)).digest for seed in seeds] == traces
    code = IMPORTS + f"print(*[simulate(draw_plan(seed)).digest for seed in {seeds}])"
    env = os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    shown = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert list(map(int, shown.stdout.split())) == traces


def test_a_failing_plan_is_reduced_to_a_test_that_fails_for_the_same_reason() -> None:
    def lose(scheduler: Scheduler, sample: object) -> None:
        scheduler._stop(sample)  # type: ignore[arg-type]
        scheduler.num_preempted += 1

    with mock.patch.object(Scheduler, "_preempt", lose):
        plan = next(plan for plan in map(draw_plan, range(100)) if _fails(plan))
        budget = iter(range(100))
        small = shrink(plan, lambda: next(budget, None) is None)
        assert len(small.events) < len(plan.events)
        names = vars(plan_module) | {"simulate": simulate}
        exec(small.code(), names)  # noqa: S102 - the code that would be pasted
        replay = names[f"test_replayed_{small.seed}"]
        with pytest.raises(AssertionError):
            replay()
    replay()


def test_a_plan_that_passes_is_not_reduced() -> None:
    with pytest.raises(AssertionError, match="does not fail again"):
        shrink(draw_plan(1), lambda: False)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_changes_one_place(mutation: Mutation) -> None:
    assert (ROOT / "src/logprobe" / mutation.file).read_text().count(mutation.old) == 1


def _fails(plan: Plan) -> bool:
    try:
        simulate(plan)
    except Exception:  # noqa: BLE001 - any failure counts
        return True
    return False


def test_a_simulation_that_fails_restores_the_clock() -> None:
    before = dict(vars(runtime))
    broken = mock.patch.object(world_module.World, "_play", side_effect=AssertionError("on purpose"))
    with broken, pytest.raises(AssertionError, match="on purpose"):
        simulate(draw_plan(1))
    assert vars(runtime) == before
