"""Routing of requests: to the engine with the prompt's prefix cached, unless another is much less loaded."""

from __future__ import annotations

import numpy as np
import pytest

from logprobe.engine.backends.router import BLOCK, DOWN, SILENT, UP, Router
from logprobe.sampling import SamplingParams
from logprobe.transport.messages import Admitted, Request

ALL_UP = [UP, UP, UP]


def admitted(ids: list[int], lora: int | None = None) -> Admitted:
    request = Request(
        request_id="r", prompt_token_ids=np.array(ids, np.int32), params=SamplingParams(max_tokens=4)
    )
    return Admitted(request, {}, lora or 0)


def prompt(seed: int, length: int = 10 * BLOCK) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, length).tolist()


def test_strangers_go_where_the_fewest_tokens_wait_and_equals_take_turns() -> None:
    router = Router(3)
    assert [router.choose(admitted(prompt(seed)), [0, 0, 0], ALL_UP) for seed in range(6)] == [
        0,
        1,
        2,
        0,
        1,
        2,
    ]
    assert router.choose(admitted(prompt(7)), [9, 4, 8], ALL_UP) == 1


def test_a_prompt_goes_where_its_longest_prefix_is_known() -> None:
    router = Router(3)
    for seed in range(3):
        router.choose(admitted(prompt(seed)), [0, 0, 0], ALL_UP)
    for seed in (2, 0, 1, 1, 2):
        assert router.choose(admitted([*prompt(seed), 5, 6]), [0, 0, 0], ALL_UP) == seed
    begun = [*prompt(1)[: 3 * BLOCK], *prompt(2)[3 * BLOCK :]]
    assert router.choose(admitted(begun), [0, 0, 0], ALL_UP) == 1, "what counts is the beginning"


def test_what_a_known_prefix_saves_is_weighed_against_what_waits() -> None:
    router = Router(3)
    assert router.choose(admitted(prompt(0)), [0, 0, 0], ALL_UP) == 0
    saved = 10 * BLOCK
    assert router.choose(admitted(prompt(0)), [saved - 1, 0, 0], ALL_UP) == 0
    assert router.choose(admitted(prompt(0)), [saved + 1, 0, 0], ALL_UP) == 1


def test_other_lora_weights_make_another_prefix() -> None:
    router = Router(3)
    assert router.choose(admitted(prompt(0), lora=1), [0, 0, 0], ALL_UP) == 0
    assert router.choose(admitted(prompt(0), lora=2), [0, 0, 0], ALL_UP) == 1
    assert router.choose(admitted(prompt(0)), [0, 0, 0], ALL_UP) == 2
    assert router.choose(admitted(prompt(0), lora=1), [0, 0, 0], ALL_UP) == 0


@pytest.mark.parametrize("engine", [0, None])
def test_what_was_forgotten_saves_nothing(engine: int | None) -> None:
    router = Router(3)
    router.choose(admitted(prompt(0)), [0, 0, 0], ALL_UP)
    router.forget(engine)
    assert router.choose(admitted(prompt(0)), [1, 1, 0], ALL_UP) == 2


def test_an_engine_that_is_down_is_chosen_only_where_all_are() -> None:
    router = Router(3)
    router.choose(admitted(prompt(0)), [0, 0, 0], ALL_UP)
    assert router.choose(admitted(prompt(0)), [0, 900, 500], [DOWN, UP, UP]) == 2
    assert router.choose(admitted(prompt(1)), [3, 2, 1], [DOWN, DOWN, DOWN]) == 2


def test_an_engine_that_is_silent_is_chosen_before_one_that_is_down() -> None:
    router = Router(3)
    assert router.choose(admitted(prompt(0)), [0, 900, 500], [DOWN, SILENT, SILENT]) == 2
    assert router.choose(admitted(prompt(1)), [0, 900, 500], [DOWN, UP, SILENT]) == 1
