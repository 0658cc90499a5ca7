from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from logprobe.processors import PenaltiesLogitsProcessor
from logprobe.processors.arguments import PenaltiesArgs

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    Floats = NDArray[np.float32]


def slow(before: Floats, args: PenaltiesArgs, prompt: list[int], output: list[int]) -> Floats:
    """Compute one row token by token, as in the documentation."""
    after = before.copy()
    for token_id in {*prompt, *output}:
        value = float(before[token_id])
        value = value / args.repetition_penalty if value > 0 else value * args.repetition_penalty
        count = output.count(token_id)
        value -= args.frequency_penalty * count + args.presence_penalty * (count > 0)
        after[token_id] = value
    return after


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 300])
def test_many_rows_at_once_equal_the_definition_token_by_token(
    make: Callable[..., Any],
    row: Callable[..., Any],
    run: Callable[..., Any],
    logits: Callable[..., Any],
    num_tokens: int,
) -> None:
    rng = np.random.default_rng(num_tokens)
    args = [
        PenaltiesArgs(repetition_penalty=1.3, presence_penalty=-0.5, frequency_penalty=0.25),
        PenaltiesArgs(frequency_penalty=2.0),
        PenaltiesArgs(repetition_penalty=0.7),
    ]
    prompts = [rng.integers(0, 400, 5).tolist() for _ in args]
    outputs = [rng.integers(0, 400, num_tokens).tolist() for _ in args]
    rows = [row(str(at), *three) for at, three in enumerate(zip(args, prompts, outputs, strict=True))]
    before = logits(3, 400)
    after = run(make(PenaltiesLogitsProcessor), rows, before)
    for place, three in enumerate(zip(args, prompts, outputs, strict=True)):
        np.testing.assert_allclose(after[place], slow(before[place], *three), atol=1e-5, rtol=1e-5)


def test_counting_step_by_step_equals_counting_all_at_once(
    make: Callable[..., Any], row: Callable[..., Any], run: Callable[..., Any]
) -> None:
    args = PenaltiesArgs(repetition_penalty=1.5, frequency_penalty=0.5)
    output: list[int] = []
    stepped = make(PenaltiesLogitsProcessor)
    for token_id in [1, 2, 1, 8, 8, 8]:
        output.append(token_id)
        at_once = run(make(PenaltiesLogitsProcessor), [row("a", args, [3], list(output))])
        assert np.array_equal(run(stepped, [row("a", args, [3], output)]), at_once)


def test_a_request_that_was_away_comes_back_with_the_right_counts(
    make: Callable[..., Any], row: Callable[..., Any], run: Callable[..., Any]
) -> None:
    args = PenaltiesArgs(presence_penalty=1.0, frequency_penalty=1.0)
    processor = make(PenaltiesLogitsProcessor)
    mine, other = row("a", args, [], [5, 5]), row("b", args, [], [6])
    run(processor, [mine, other])
    run(processor, [other])
    back = run(processor, [row("a", args, [], [5, 5, 7])])
    fresh = run(make(PenaltiesLogitsProcessor), [row("a", args, [], [5, 5, 7])])
    assert np.array_equal(back, fresh)
