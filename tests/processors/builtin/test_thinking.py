from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from logprobe.config import EngineConfig
from logprobe.errors import ParameterError
from logprobe.processors import BatchRow, BatchState, ModelFacts, ThinkingBudgetLogitsProcessor
from logprobe.processors.arguments import ThinkingBudgetArgs

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from logprobe import LLM

    Floats = NDArray[np.float32]

START, END = [0], [1]  # one token each
LONG_START, LONG_END = [0, 2], [3, 2, 1, 4]


def args(budget: int | None, sentence: str = "", *, is_long: bool = False) -> ThinkingBudgetArgs:
    return ThinkingBudgetArgs(
        thinking_budget=budget,
        think_stop_sentence=sentence or None,
        think_start_token_ids=LONG_START if is_long else START,
        think_end_token_ids=LONG_END if is_long else END,
    )


def forced(after: Floats, before: Floats) -> list[int | None]:
    """Return the forced token of each row; rows without one must be unchanged."""
    found: list[int | None] = []
    for row, untouched in zip(after, before, strict=True):
        places = np.flatnonzero(np.isfinite(row)).tolist()
        if len(places) == 1:
            assert row[places[0]] == 0.0
            found.append(places[0])
        else:
            assert np.array_equal(row, untouched)
            found.append(None)
    return found


@pytest.fixture
def play(
    make: Callable[..., Any], row: Callable[..., Any], run: Callable[..., Any], logits: Callable[..., Any]
) -> Callable[..., list[int | None]]:
    """Return the tokens forced at each step, while an unconstrained model generates `said`."""

    def go(asked: ThinkingBudgetArgs, prompt: list[int], said: list[int]) -> list[int | None]:
        processor, output, found = make(ThinkingBudgetLogitsProcessor), [], []
        free = iter(said)
        while True:
            step = forced(run(processor, [row("a", asked, prompt, output)]), logits(1))[0]
            whole = run(make(ThinkingBudgetLogitsProcessor), [row("b", asked, prompt, list(output))])
            assert forced(whole, logits(1)) == [step], "the state follows from the tokens alone"
            found.append(step)
            token_id = next(free, None) if step is None else step
            if token_id is None:
                return found
            output.append(token_id)

    return go


_ = None


@pytest.mark.parametrize(
    ("budget", "prompt", "said", "expected"),
    [
        (0, [5, 0], [6], [1, _, _]),  # ended at once
        (1, [5, 0], [6, 7], [_, 1, _, _]),
        (3, [5, 0], [6, 6, 6, 7], [_, _, _, 1, _, _]),  # equal tokens count too
        (5, [5, 0], [6, 7], [_, _, _]),  # not reached
        (3, [5, 0], [6, 1, 7, 7, 7, 7], [_] * 7),  # ended by the model
        (1, [5, 0], [1, 0, 7, 8], [_, _, _, 1, _, _]),  # a second thinking block has its own budget
        (2, [5], [6, 0, 7, 8, 9], [_, _, _, _, 1, _, _]),  # the model starts to think
        (2, [0, 5, 6, 7], [8, 8], [_, _, 1, _]),  # tokens of the prompt are free
        (0, [0, 5, 1], [6, 7], [_, _, _]),  # already ended in the prompt
        (0, [5], [6, 7], [_, _, _]),  # never thinks
        (None, [5, 0], [6, 7], [_, _, _]),  # no budget
    ],
)
def test_thinking_ends_after_the_budget(
    play: Callable[..., Any],
    budget: int | None,
    prompt: list[int],
    said: list[int],
    expected: list[int | None],
) -> None:
    assert play(args(budget), prompt, said) == expected


@pytest.mark.parametrize(
    ("budget", "said", "expected"),
    [
        (5, [6, 7], [_, _, 2, 3, 4, 1, _]),  # the sentence cde, within the budget
        (1, [6], [2, 3, 4, 1, _, _]),  # longer than the budget: forced at once
        (0, [], [2, 3, 4, 1, _]),
    ],
)
def test_the_stop_sentence_is_written_before_the_end_marker(
    play: Callable[..., Any], budget: int, said: list[int], expected: list[int | None]
) -> None:
    assert play(args(budget, "cde"), [0], said) == expected


@pytest.mark.parametrize(
    ("prompt", "said", "expected"),
    [
        ([0, 2], [6, 7], [_, 3, 2, 1, 4, _, _]),  # token by token, then free
        ([0, 2], [3, 7], [_, 2, 1, 4, _, _]),  # the model had begun the marker itself
        ([0], [2, 6, 7], [_, _, 3, 2, 1, 4, _, _]),  # the start marker spans prompt and completion
        ([0, 6, 2], [6, 7], [_, _, _]),  # not a marker
    ],
)
def test_markers_of_several_tokens_are_found_and_forced(
    play: Callable[..., Any], prompt: list[int], said: list[int], expected: list[int | None]
) -> None:
    assert play(args(1, is_long=True), prompt, said) == expected


JOINED = {10: b"ab", 11: b" a", 12: b"b\n", 13: b"dc", 14: b"c ", 15: b"xabcd"}  # besides a = 0 ... j = 9


@pytest.fixture
def joining(facts: ModelFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Add tokens of several letters, which the tokenizer never produces itself."""
    letters: Any = facts.text
    one_letter = letters.token_bytes
    monkeypatch.setattr(
        type(letters), "token_bytes", lambda _, token_id: JOINED.get(token_id) or one_letter(token_id)
    )


@pytest.mark.usefixtures("joining")
@pytest.mark.parametrize(
    ("prompt", "said", "expected"),
    [
        ([0, 1], [6, 7], [_, 2, 3, _, _]),  # the marker's own tokens
        ([10], [6, 7], [_, 2, 3, _, _]),  # one token
        ([11, 1], [6, 7], [_, 2, 3, _, _]),  # joined with the space before it
        ([0, 12], [6, 7], [_, 2, 3, _, _]),  # joined with the newline after it
        ([5], [11, 12, 6, 7], [_, _, _, 2, 3, _, _]),  # as generated by the model
        ([10], [2, 6], [_, 3, _, _]),  # the model had begun the end marker itself
        ([10, 2, 13], [6, 7], [_, _, _]),  # ended in the prompt, within a token
        ([10, 2, 3, 5, 11, 12], [6], [_, 2, 3, _]),  # a second thinking block
        ([15], [6, 7], [_, _, _]),  # begun and ended within a token
        ([0, 14, 1], [6, 7], [_, _, _]),  # not a marker
    ],
)
def test_markers_are_found_in_the_text_whatever_tokens_it_is_cut_into(
    play: Callable[..., Any], prompt: list[int], said: list[int], expected: list[int | None]
) -> None:
    asked = ThinkingBudgetArgs(thinking_budget=1, think_start="ab", think_end="cd")
    assert play(asked, prompt, said) == expected


@pytest.mark.parametrize("before", ["", "I am ", "a\n"])
def test_a_start_marker_of_a_prompt_is_found_behind_a_space(tiny_llm: LLM, before: str) -> None:
    text = tiny_llm.text
    facts = ModelFacts(vocab_size=len(text.vocabulary), eos_token_ids=frozenset(), text=text)
    processor: Any = ThinkingBudgetLogitsProcessor(EngineConfig())
    processor.bind(facts)
    start, end = "the cat", "the dog"
    asked = ThinkingBudgetArgs(thinking_budget=0, think_start=start, think_end=end)
    row = BatchRow(
        request_id="x", args=asked, prompt_token_ids=facts.encode(before + start), output_token_ids=[]
    )
    processor.update_state(BatchState([row]))
    after = processor.apply(np.zeros((1, facts.vocab_size), np.float32))
    assert np.flatnonzero(np.isfinite(after[0])).tolist() == facts.encode(end)[:1]


def test_three_requests_with_budgets_two_none_and_one(
    make: Callable[..., Any], row: Callable[..., Any], run: Callable[..., Any], logits: Callable[..., Any]
) -> None:
    rows = [row("a", args(2), [0], [6]), row("b", args(None), [0], [6]), row("c", args(1), [0], [6])]
    processor = make(ThinkingBudgetLogitsProcessor)
    assert forced(run(processor, rows), logits(3)) == [None, None, 1]
    # The rows swap places; the states follow the requests.
    for one in rows:
        one.output_token_ids.append(1 if one.request_id == "c" else 7)
    assert forced(run(processor, rows[::-1]), logits(3)) == [None, None, 1]


def test_a_budget_that_is_taken_away_half_way_leaves_the_row_alone(
    make: Callable[..., Any], row: Callable[..., Any], run: Callable[..., Any], logits: Callable[..., Any]
) -> None:
    processor = make(ThinkingBudgetLogitsProcessor)
    assert forced(run(processor, [row("a", args(1), [0], [6])]), logits(1)) == [1]
    assert forced(run(processor, [row("a", args(None), [0], [6])]), logits(1)) == [None]
    assert forced(run(processor, [row("a", args(1), [0], [6])]), logits(1)) == [1]


def test_another_token_where_one_was_forced_is_an_error(
    make: Callable[..., Any], row: Callable[..., Any], run: Callable[..., Any]
) -> None:
    with pytest.raises(ValueError, match="token 6 was drawn where 1 was forced"):
        run(make(ThinkingBudgetLogitsProcessor), [row("a", args(0), [0], [6])])


@pytest.mark.parametrize(
    ("given", "parameter"),
    [
        ({"think_start": "?"}, "think_start"),
        ({"think_start": "a", "think_end": "?"}, "think_end"),
        ({"think_start": "ab", "think_end": "ab"}, "think_end"),
    ],
)
def test_markers_that_cannot_be_found_are_refused(
    make: Callable[..., Any], given: dict[str, str], parameter: str
) -> None:
    with pytest.raises(ParameterError) as raised:
        make(ThinkingBudgetLogitsProcessor).check_args(ThinkingBudgetArgs(thinking_budget=1, **given))
    assert raised.value.parameter == parameter
