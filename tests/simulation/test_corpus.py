"""Simulations that have found a fault, each reduced and printed by `make simulate`."""

from __future__ import annotations

from simulation.plan import Ask, Plan, Settings, Swap, Visit
from simulation.world import simulate


def test_rows_of_old_weights_come_before_the_swap_is_acknowledged() -> None:
    """With overlapped steps, `load_weights` returned while the last old rows were still being published."""
    twice = (103, 97, 104, 98, 103, 101, 100, 98, 100, 97, 102, 97, 100)
    visit = Visit(
        at=0.1673,
        name="visit2",
        path="/v1/completions",
        body={
            "prompt": [[98, 101, 102, 100, 100, 101, 98, 101, 99, 104, 104, 99, 100]],
            "max_tokens": 3,
            "temperature": 0,
            "seed": 4,
            "logprobs": None,
            "stream": True,
            "n": 1,
        },
        caller="10.0.0.2",
        leaves_s=0.0,
        slow_s=0.01,
    )
    events = (
        Ask(
            at=0.0927,
            name="ask2",
            prompts=((103, 97, 104, 98, 103, 101, 100, 98),),
            params={"temperature": 0, "seed": 2},
        ),
        visit,
        Swap(at=0.1803, weights=2),
        Ask(
            at=0.1813,
            name="ask21",
            prompts=((98, 97, 97, 98), twice, (*twice, 98), (98, 101, 102, 100, 100, 97)),
            params={"temperature": 0, "seed": 4},
            loop=1,
        ),
        Ask(
            at=0.2739,
            name="ask10",
            prompts=((98, 102, 102, 98, 98, 99, 98),),
            params={"max_tokens": 2, "temperature": 0, "seed": 2},
        ),
        Ask(
            at=0.2768,
            name="ask13",
            prompts=((98, 101, 102, 100, 100, 101, 98, 101, 99, 104),),
            params={"temperature": 0, "seed": 2, "prompt_logprobs": 1},
            caller="bob",
            streams=True,
            delay_s=0.01,
            leave_after=1,
            loop=1,
        ),
    )
    settings = Settings(num_replicas=2, num_slots=16, overlap=True, eagerness=0.5, high_water=4)
    simulate(Plan(0, settings, events))
