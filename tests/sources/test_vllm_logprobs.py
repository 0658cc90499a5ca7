"""vLLM's flat container and helpers, used as its users do."""

import dataclasses
import json
from itertools import chain
from typing import Any

import pytest

from logprobe.compat.vllm_logprobs import (
    FlatLogprobs,
    Logprob,
    LogprobsOnePosition,
    PromptLogprobs,
    SampleLogprobs,
    append_logprobs_for_next_position,
    create_prompt_logprobs,
    create_sample_logprobs,
)
from logprobe.errors import ParameterError
from logprobe.records import ChatEncoder

COLUMNS: dict[str, list[Any]] = {
    "start_indices": [0, 1, 3],
    "end_indices": [1, 3, 6],
    "token_ids": [1, 2, 3, 4, 5, 6],
    "logprobs": [-0.125, -0.25, -0.5, -0.75, -1.0, -2.0],
    "ranks": [10, 20, 30, 40, 50, 60],
    "decoded_tokens": ["10", "20", "30", "40", "50", "60"],
}


@pytest.mark.parametrize(
    "flat", [FlatLogprobs(**COLUMNS), FlatLogprobs(*COLUMNS.values())], ids=["names", "places"]
)
def test_a_record_is_made_of_its_six_fields(flat: FlatLogprobs) -> None:
    assert len(flat) == 3
    assert flat[1] == {2: Logprob(-0.25, 20, "20"), 3: Logprob(-0.5, 30, "30")}
    assert flat[2] == {
        token_id: Logprob(COLUMNS["logprobs"][token_id - 1], 10 * token_id, f"{token_id}0")
        for token_id in (4, 5, 6)
    }
    assert {name: getattr(flat, name) for name in COLUMNS} == COLUMNS
    assert flat == FlatLogprobs.from_columns(**COLUMNS)


def test_a_record_is_a_dataclass() -> None:
    flat = FlatLogprobs(**COLUMNS)
    assert dataclasses.is_dataclass(flat)
    assert [field.name for field in dataclasses.fields(flat)] == list(COLUMNS)
    assert dataclasses.asdict(flat) == COLUMNS
    assert json.loads(json.dumps(dataclasses.asdict(flat))) == COLUMNS
    assert json.loads(json.dumps(flat.token_ids)) == COLUMNS["token_ids"]
    changed = dataclasses.replace(flat, token_ids=[7, 8, 9, 10, 11, 12])
    assert type(changed) is FlatLogprobs
    assert changed.token_ids == [7, 8, 9, 10, 11, 12]
    assert changed.logprobs == flat.logprobs


def test_an_empty_record_grows_and_fields_left_out_are_empty() -> None:
    assert (
        FlatLogprobs() == FlatLogprobs(start_indices=[], end_indices=[]) == FlatLogprobs([], [], [], []) == []
    )
    flat = FlatLogprobs(start_indices=[0], end_indices=[2], token_ids=[5, 6], logprobs=[-1.0, -2.0])
    assert flat == [{5: Logprob(-1.0), 6: Logprob(-2.0)}]
    flat.append({7: Logprob(-3.0, 1, "a")})
    assert len(flat) == 2


@pytest.mark.parametrize(
    "columns",
    [
        {"token_ids": [5]},
        {"start_indices": [0], "end_indices": [1]},
        {"start_indices": [0], "end_indices": []},
    ],
)
def test_fields_that_do_not_agree_are_refused(columns: dict[str, Any]) -> None:
    if columns == {"token_ids": [5]}:
        columns = columns | {"logprobs": []}
    with pytest.raises(ParameterError):
        FlatLogprobs(**columns)


@pytest.mark.parametrize("is_flat", [True, False])
def test_helpers_start_and_grow_either_form(is_flat: bool) -> None:
    prompt: PromptLogprobs = create_prompt_logprobs(is_flat)
    assert len(prompt) == 1
    assert prompt[0] is None
    sample: SampleLogprobs = create_sample_logprobs(flat_logprobs=is_flat)
    append_logprobs_for_next_position(sample, [1, 2, 3], [-0.25, -0.5, -4.0], chain(["a"], ["b", "c"]), 10, 1)
    assert [*sample] == [{1: Logprob(-0.25, 10, "a"), 2: Logprob(-0.5, 1, "b")}]
    append_logprobs_for_next_position(sample, [1, 2, 3], [-0.25, -0.5, -4.0], ["a", "b", "c"], 1, -1)
    second: LogprobsOnePosition | None = sample[1]
    assert second == {1: Logprob(-0.25, 1, "a"), 2: Logprob(-0.5, 1, "b"), 3: Logprob(-4.0, 2, "c")}


def test_a_record_with_texts_is_written_as_a_chat_reply() -> None:
    """Without a vocabulary: uses the texts that came with the entries, which may differ for one id."""
    flat = FlatLogprobs([{1: Logprob(-0.5, 2, "é"), 2: Logprob(-0.25, 1, "b")}, {1: Logprob(-1.0, 1, " É")}])
    first, second = json.loads(ChatEncoder().content(flat))
    assert first == {
        "token": "é", "bytes": [195, 169], "logprob": -0.5,
        "top_logprobs": [{"token": "b", "bytes": [98], "logprob": -0.25}],
    }  # fmt: skip
    assert {**second, "token": " É"} == second
    many = FlatLogprobs([*flat] * 10)
    assert json.loads(ChatEncoder().content(many)) == [first, second] * 10
    assert json.loads(ChatEncoder(has_bytes=False).content(flat[1:]))[0].keys() == {
        "token",
        "logprob",
        "top_logprobs",
    }
    with pytest.raises(ParameterError, match="token 5 has no text"):
        ChatEncoder().content(FlatLogprobs([{5: Logprob(-0.5, 1)}]))
