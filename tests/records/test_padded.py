"""Records of different lengths, padded to arrays of one shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from logprobe import LLM, SamplingParams
from logprobe.errors import ParameterError
from logprobe.records import FlatLogprobs, Logprob, to_padded

if TYPE_CHECKING:
    from logprobe.records import PaddedLogprobs


@pytest.fixture
def records() -> list[FlatLogprobs]:
    """Records of two, one and no positions."""
    two, one = FlatLogprobs(), FlatLogprobs()
    two.append_rows([[7, 1], [8, 2]], [[-1.0, -0.5], [-2.0, -0.5]], [2, 2], entropy=[1.5, 2.5])
    one.append_rows([[9, 3]], [[-3.0, -0.5]], [2], entropy=[0.5])
    empty = FlatLogprobs()
    return [two, one, empty]


def test_shorter_records_are_filled_up_and_masked(records: list[FlatLogprobs]) -> None:
    padded = to_padded(records, pad_token_id=5)
    assert padded.token_ids.tolist() == [[7, 8], [9, 5], [5, 5]]
    assert padded.logprobs.tolist() == [[-1, -2], [-3, 0], [0, 0]]
    assert padded.mask.tolist() == [[True, True], [True, False], [False, False]]
    assert padded.entropy is None  # the last record has none
    assert (padded.token_ids.dtype, padded.logprobs.dtype) == (np.int64, np.float32)


def test_the_padding_may_stand_left_and_be_wider(records: list[FlatLogprobs]) -> None:
    padded = to_padded(records[:2], length=3, side="left")
    assert padded.token_ids.tolist() == [[0, 7, 8], [0, 0, 9]]
    assert padded.mask.sum(1).tolist() == [2, 1]
    tensors = padded.to("cpu")
    assert torch.equal(tensors.token_ids, torch.tensor([[0, 7, 8], [0, 0, 9]]))
    assert tensors.mask.dtype == torch.bool
    assert tensors.extras["entropy"].dtype == torch.float32
    assert padded.entropy is not None
    assert padded.entropy.tolist() == [[0, 1.5, 2.5], [0, 0, 0.5]]


def test_no_records_have_no_rows() -> None:
    assert to_padded([]).mask.shape == (0, 0)
    assert to_padded([FlatLogprobs()]).mask.shape == (1, 0)


@pytest.mark.parametrize(("options", "parameter"), [({"length": 1}, "length"), ({"side": "middle"}, "side")])
def test_what_has_no_shape_is_refused(
    records: list[FlatLogprobs], options: dict[str, Any], parameter: str
) -> None:
    with pytest.raises(ParameterError) as caught:
        to_padded(records, **options)
    assert caught.value.parameter == parameter
    for one in (FlatLogprobs([None, {1: Logprob(-1.0, 1)}]), FlatLogprobs([{1: Logprob(-1.0, 1)}])):
        with pytest.raises(ParameterError, match="records: must be a list of records"):
            to_padded(one)  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="record 0 has a position without entries"):
        to_padded([FlatLogprobs([None])])


def test_the_numbers_are_those_of_the_completions(tiny_llm: LLM) -> None:
    asked = SamplingParams(
        n=3, max_tokens=12, seed=1, top_p=0.8, logprobs=0, logprobs_mode="processed_logprobs", entropy=True
    )
    completions = tiny_llm.generate("the cat", asked)[0].outputs
    padded: PaddedLogprobs = to_padded([one.logprobs for one in completions if one.logprobs is not None])
    assert padded.log_kept_mass is not None
    assert padded.entropy is not None
    for row, one in enumerate(completions):
        assert padded.token_ids[row][padded.mask[row]].tolist() == one.token_ids
        assert padded.logprobs[row].sum(dtype=np.float64) == pytest.approx(one.cumulative_logprob, abs=1e-4)
