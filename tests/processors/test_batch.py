from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from logprobe.processors import ArgsView, BatchState
from logprobe.processors.arguments import LogitBiasArgs
from logprobe.processors.batch import as_batch

if TYPE_CHECKING:
    from collections.abc import Callable


def test_an_argument_reads_as_an_item_and_as_an_attribute_and_none_where_missing() -> None:
    view = ArgsView({"budget": 3, "items": 4})
    assert (view["budget"], view.budget, view.get("budget")) == (3, 3, 3)
    assert (view["other"], view.other, view.get("other"), view.get("other", 5)) == (None, None, None, 5)
    assert view["items"] == 4
    assert "budget" in view
    assert "other" not in view
    assert dict(view) == {"budget": 3, "items": 4}
    assert not ArgsView()


def test_arguments_can_be_copied_and_pickled() -> None:
    view = ArgsView({"budget": 3})
    assert dict(copy.deepcopy(view)) == dict(pickle.loads(pickle.dumps(view))) == {"budget": 3}  # noqa: S301


def test_added_removed_and_moved_follow_from_two_steps(row: Callable[..., Any]) -> None:
    a, b, c, d = (row(name) for name in "abcd")
    batch = BatchState([c, a, d], [a, b, c])
    assert batch.added == [2]
    assert [one.request_id for one in batch.removed] == ["b"]
    assert batch.moved == [(2, 0), (0, 1)]
    assert not batch.is_same
    assert BatchState([a, b], [a, b]).is_same


def test_the_same_request_with_other_arguments_is_not_the_same_batch(row: Callable[..., Any]) -> None:
    before, now = row("a", LogitBiasArgs(logit_bias={1: 1.0})), row("a", LogitBiasArgs(logit_bias={1: 2.0}))
    assert before.key == now.key
    assert not BatchState([now], [before]).is_same


def test_samples_of_one_request_and_two_lives_of_one_id_have_keys_of_their_own(
    row: Callable[..., Any],
) -> None:
    rows = [row("a"), row("a", sample=1), row("a", serial=7)]
    assert len({one.key for one in rows}) == 3
    assert [one.name for one in rows] == ["a", "a#1", "a"]


def test_a_batch_reads_as_the_inputs_of_a_slot_based_engine(row: Callable[..., Any]) -> None:
    rows = [
        row("a", prompt=np.array([1, 2, 3], dtype=np.int32), output=[4], arguments=ArgsView({"x": 1})),
        row("b", prompt=[5], output=[6, 7]),
    ]
    inputs = BatchState(rows)
    assert inputs["req_ids"] == ["a", "b"]
    assert torch.equal(inputs["stop_flags"], torch.zeros((2, 1), dtype=torch.bool))
    assert [args.x for args in inputs["logits_processors_args"]] == [1, None]
    assert inputs["prompt_ids"].tolist() == [[1, 2, 3], [5, -1, -1]]
    assert inputs["prompt_lens"].tolist() == [[3], [1]]
    assert inputs["pre_ids"].tolist() == [[4, -1], [6, 7]]
    assert inputs["next_tokens"].tolist() == [[4], [7]]
    assert inputs["step_idx"].tolist() == [[1], [2]]
    assert inputs.get("seq_lens") is None
    assert BatchState([])["pre_ids"].shape == (0, 0)


def test_a_slot_based_engines_inputs_become_rows_of_the_slots_that_run() -> None:
    inputs = {
        "stop_flags": np.array([[True], [False], [False]]),
        "logits_processors_args": [None, {"logit_bias": {"3": 1}, "other": 2}, {"logit_bias": None}],
        "req_ids": ["x", "y", "z"],
        "prompt_ids": torch.tensor([[0, 0], [1, 2], [3, -1]]),
        "pre_ids": [[0, 0], [7, 8], [9, 9]],
        "step_idx": [[0], [1], [0]],
    }
    rows = as_batch(inputs, LogitBiasArgs).rows
    assert [(row.request_id, row.args.logit_bias) for row in rows] == [("y", {3: 1.0}), ("z", {})]
    assert [row.prompt_token_ids for row in rows] == [[1, 2], [3]]
    assert [row.output_token_ids for row in rows] == [[7], []]
    assert rows[0].arguments.other == 2
