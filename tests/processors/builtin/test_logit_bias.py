from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from logprobe.processors import LogitBiasLogitsProcessor
from logprobe.processors.arguments import LogitBiasArgs

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_SLOTS = 16


def bias(**values: float) -> LogitBiasArgs:
    return LogitBiasArgs(logit_bias={int(name[1:]): value for name, value in values.items()})


def test_five_phases_over_sixteen_slots_move_exactly_the_cells_asked(
    make: Callable[..., Any], logits: Callable[..., Any]
) -> None:
    processor = make(LogitBiasLogitsProcessor)
    stopped = [[True]] * NUM_SLOTS
    args: list[Any] = [None] * NUM_SLOTS

    def changed(num_rows: int) -> dict[tuple[int, int], float]:
        processor.update_state({"stop_flags": stopped, "logits_processors_args": args})
        before = logits(num_rows)
        after = processor.apply(before.copy())
        cells = np.argwhere(after != before).tolist()
        for at, token_id in cells:
            expected = before[at, token_id] + np.float32(expected_biases[at, token_id])
            assert after[at, token_id] == expected
        return {(at, token_id): expected_biases[at, token_id] for at, token_id in cells}

    expected_biases: dict[tuple[int, int], float] = {}
    assert changed(NUM_SLOTS) == {}  # no request is running
    stopped[0], args[0] = [False], {"logit_bias": {3: 2.5}}
    expected_biases = {(0, 3): 2.5}
    assert changed(1) == expected_biases
    stopped[1], args[1] = [False], {"logit_bias": {1: -1.0, "5": 0.25, 9: 100.0}}
    expected_biases = {(0, 3): 2.5, (1, 1): -1.0, (1, 5): 0.25, (1, 9): 100.0}
    assert changed(2) == expected_biases
    stopped[0], args[0] = [True], None  # the first request stops, and the second's row becomes row 0
    expected_biases = {(0, 1): -1.0, (0, 5): 0.25, (0, 9): 100.0}
    assert changed(1) == expected_biases
    stopped[0], args[0] = [False], {"logit_bias": None}  # a new request without bias in the freed slot
    expected_biases = {(1, 1): -1.0, (1, 5): 0.25, (1, 9): 100.0}
    assert changed(2) == expected_biases


def test_a_bias_follows_its_request_when_rows_are_reordered_and_reused(
    make: Callable[..., Any], row: Callable[..., Any], run: Callable[..., Any], logits: Callable[..., Any]
) -> None:
    processor = make(LogitBiasLogitsProcessor)
    a, b, c = row("a", bias(t1=1.0)), row("b", bias(t2=2.0)), row("c", bias())
    for rows in ([a, b, c], [c, b, a], [b], [c, a], [], [row("a", bias(t4=4.0)), b]):
        before = logits(len(rows))
        expected = before.copy()
        for place, one in enumerate(rows):
            for token_id, value in one.args.logit_bias.items():
                expected[place, token_id] += value
        assert np.array_equal(run(processor, rows, before), expected)


def test_an_impossible_token_stays_impossible(
    make: Callable[..., Any], row: Callable[..., Any], run: Callable[..., Any]
) -> None:
    before = np.zeros((1, 10), np.float32)
    before[0, 1] = -np.inf
    after = run(make(LogitBiasLogitsProcessor), [row("a", bias(t1=100.0))], before)
    assert np.array_equal(after, before)
