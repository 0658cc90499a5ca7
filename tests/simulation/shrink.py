"""Reduce a plan that fails to a smaller one that fails, too."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from simulation.plan import Ask, Plan, Settings
from simulation.world import simulate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DRAWN_WITH = {"seed", "temperature"}  # without a seed, tokens depend on the number of the request
NUM_SEEDS = 2  # orders of threads that are tried for each smaller plan


def shrink(plan: Plan, is_over: Callable[[], bool]) -> Plan:
    """Return the smallest plan that fails and is found before `is_over`, which is called for each plan.

    Raises:
        AssertionError: the plan passes, so that its failure cannot be repeated.
    """
    reason = reason_of(plan)
    assert reason, f"seed {plan.seed} does not fail again: the simulation is not deterministic"
    size = max(len(plan.events) // 2, 1)
    while not is_over():
        if smaller := _first_failing(_without(plan, size), reason, is_over):
            plan = smaller
        elif size > 1:
            size //= 2
        else:
            break
    while simpler := _first_failing(_simpler(plan), reason, is_over):
        plan = simpler
    return plan


def _first_failing(plans: Iterator[Plan], reason: str, is_over: Callable[[], bool]) -> Plan | None:
    for plan in plans:
        if is_over():
            return None
        if failing := _failing(plan, reason):
            return failing
    return None


def reason_of(plan: Plan) -> str:
    """Return why a plan fails, without names and numbers; an empty string if it passes."""
    try:
        simulate(plan)
    except Exception as error:  # noqa: BLE001 - any failure counts
        shown = f"{type(error).__name__}: {error}".partition("\n")[0]
        return re.sub(r"\w*\d[\w.]*", "#", shown)[:80]
    return ""


def _failing(plan: Plan, reason: str) -> Plan | None:
    """Return the plan with a seed with which it fails for this reason; None if there is none."""
    for seed in [plan.seed, *range(NUM_SEEDS - 1)]:
        tried = replace(plan, seed=seed)
        if reason_of(tried) == reason:
            return tried
    return None


def _without(plan: Plan, size: int) -> Iterator[Plan]:
    """Yield the plan without each run of `size` events."""
    for start in range(0, len(plan.events), size):
        yield replace(plan, events=plan.events[:start] + plan.events[start + size :])


def _simpler(plan: Plan) -> Iterator[Plan]:
    """Yield plans in which one request or one setting is simpler."""
    plain = Settings(num_replicas=plan.settings.num_replicas, num_slots=plan.settings.num_slots)
    for name in Settings.__dataclass_fields__:
        if getattr(plan.settings, name) != getattr(plain, name):
            yield replace(plan, settings=replace(plan.settings, **{name: getattr(plain, name)}))
    for index, event in enumerate(plan.events):
        if not isinstance(event, Ask):
            continue
        changed = [
            replace(event, params=_less(event.params, name))
            for name in event.params
            if name not in DRAWN_WITH
        ]
        if len(event.prompts) > 1:
            changed += [replace(event, prompts=_less_of(event.prompts, i)) for i in range(len(event.prompts))]
        changed += [replace(event, caller="")] if event.caller else []
        if event.streams:
            changed.append(replace(event, streams=False, buffer_rows=64, delay_s=0, leave_after=None))
        for ask in changed:
            yield replace(plan, events=(*plan.events[:index], ask, *plan.events[index + 1 :]))


def _less(params: dict, name: str) -> dict:  # type: ignore[type-arg]
    return {key: value for key, value in params.items() if key != name}


def _less_of(items: tuple, index: int) -> tuple:  # type: ignore[type-arg]
    return items[:index] + items[index + 1 :]
