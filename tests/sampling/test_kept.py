"""Tokens kept by masks and truncation: raw (with temperature) and processed rows can be converted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from logprobe import LLM, SamplingParams
from logprobe.errors import ParameterError
from logprobe.records import FlatLogprobs
from logprobe.sampling import Sampler
from refusals import raises

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPES: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 7},
    {"temperature": 0.6, "top_p": 0.8},
    {"temperature": 2.0, "min_p": 0.05},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.8, "top_p": 0.95, "allowed_token_ids": list(range(20, 120))},
    {"temperature": 0.0, "allowed_token_ids": list(range(20, 120))},
]


@pytest.mark.parametrize("shape", SHAPES, ids="-".join)
def test_processed_is_raw_at_the_temperature_less_the_kept_mass(tiny_llm: LLM, shape: dict[str, Any]) -> None:
    asked = SamplingParams(
        max_tokens=6, ignore_eos=True, seed=5, logprobs=-1, logprobs_mode="both", kept_ids=True, **shape
    )
    (output,) = tiny_llm.generate("the cat and the dog", asked)
    completion = output.outputs[0]
    assert completion.logprobs is not None
    assert completion.logprobs.log_kept_mass is None
    record = completion.processed_logprobs
    assert record is not None
    assert record.log_kept_mass is not None
    assert record.kept is not None
    temperature = shape["temperature"] or 1.0
    for position, row in enumerate(record):
        raw = _row(completion.logprobs, position) / temperature
        raw -= np.logaddexp.reduce(raw)
        assert row is not None
        ids = sorted(token_id for token_id, one in row.items() if one.logprob > -np.inf)
        assert record.kept[position].tolist() == ids
        mass = float(record.log_kept_mass[position])
        assert mass == pytest.approx(np.logaddexp.reduce(raw[ids]), abs=1e-5)
        for token_id in ids:
            assert row[token_id].logprob == pytest.approx(raw[token_id] - mass, abs=1e-5)


def _row(record: FlatLogprobs, position: int) -> np.ndarray:
    found = record[position]
    assert found is not None
    return np.array([found[token_id].logprob for token_id in range(len(found))])


@given(
    logits=st.lists(st.floats(-30, 30, width=32), min_size=3, max_size=40),
    temperature=st.floats(0.05, 5),
    top_k=st.integers(0, 9),
    top_p=st.floats(0.05, 1),
    min_p=st.floats(0, 0.9),
)
def test_the_mass_of_any_row_is_that_of_the_tokens_kept(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    asked = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        logprobs=-1,
        logprobs_mode="processed_logprobs",
        kept_ids=True,
    )
    row = torch.tensor([logits])
    output = Sampler().sample(row, [asked], np.array([0.4]))
    processed = output.processed_logprobs
    assert processed is not None
    assert processed.kept is not None
    raw = (row[0].double() / np.float32(temperature)).log_softmax(0)
    kept = processed.kept.token_ids.astype(np.int64)
    assert float(processed.extras["log_kept_mass"][0]) == pytest.approx(
        float(raw[kept].logsumexp(0)), abs=2e-5
    )


def test_rows_of_one_step_keep_their_own(tiny_llm: LLM) -> None:
    """Some rows are truncated, some are not, and some are not processed at all."""
    asked = [
        SamplingParams(max_tokens=3, seed=1, ignore_eos=True, logprobs=0, **more)
        for more in (
            {"top_k": 3, "logprobs_mode": "processed_logprobs", "kept_ids": True},
            {},
            {"logprobs_mode": "both"},
            {"top_p": 0.5, "logprobs_mode": "processed_logprobs"},
        )
    ]
    together = [one.outputs[0] for one in tiny_llm.generate(["the cat"] * 4, asked)]
    for output, params in zip(together, asked, strict=True):
        (alone,) = tiny_llm.generate("the cat", params)
        assert output.token_ids == alone.outputs[0].token_ids
        for name in ("logprobs", "processed_logprobs"):
            mine, other = getattr(output, name), getattr(alone.outputs[0], name)
            if mine is None:
                assert other is None
                continue
            np.testing.assert_array_equal(mine.log_kept_mass, other.log_kept_mass)
    first, raw, both, last = (output.logprobs for output in together)
    assert first is not None
    assert first.kept is not None
    assert [len(ids) for ids in (first.kept[0], first.kept[1])] == [3, 3]
    assert raw is not None
    assert raw.log_kept_mass is None
    assert both is not None
    assert together[2].processed_logprobs is not None
    np.testing.assert_array_equal(together[2].processed_logprobs.log_kept_mass, np.zeros(3, np.float32))
    assert last is not None
    assert last.kept is None
    assert last.log_kept_mass is not None
    assert (last.log_kept_mass < 0).all()


def test_kept_ids_need_processed_numbers() -> None:
    for more in ({}, {"logprobs": 0}):
        with raises(ParameterError, parameter="kept_ids"):
            SamplingParams(kept_ids=True, **more)  # type: ignore[arg-type]


@pytest.fixture
def record(tiny_llm: LLM) -> FlatLogprobs:
    """A record of six processed positions with the kept ids."""
    asked = SamplingParams(
        max_tokens=6, seed=2, top_p=0.7, ignore_eos=True, logprobs=2, logprobs_mode="processed_logprobs",
        kept_ids=True,
    )  # fmt: skip
    (output,) = tiny_llm.generate("the dog", asked)
    assert output.outputs[0].logprobs is not None
    return output.outputs[0].logprobs.with_table(None)


def same(one: FlatLogprobs, other: FlatLogprobs) -> None:
    assert one == other
    np.testing.assert_array_equal(one.log_kept_mass, other.log_kept_mass)
    assert one.kept is not None
    assert other.kept is not None
    assert one.kept == other.kept


def _through_arrow(record: FlatLogprobs) -> FlatLogprobs:
    from logprobe.records import from_arrow, to_arrow

    return from_arrow(to_arrow(record))


@pytest.mark.parametrize(
    "travel",
    [
        lambda record: FlatLogprobs.from_bytes(record.to_bytes()),
        _through_arrow,
        lambda record: record[:2] + record[2:],
        lambda record: record[::-1][::-1],
    ],
    ids=["bytes", "arrow", "slices", "backwards"],
)
def test_what_was_kept_travels_with_the_record(
    record: FlatLogprobs, travel: Callable[[FlatLogprobs], FlatLogprobs]
) -> None:
    same(travel(record), record)
    assert record.nbytes > record[:1].nbytes


def test_positions_without_it_have_none_of_it(record: FlatLogprobs) -> None:
    joined = FlatLogprobs([{5: record[0][next(iter(record[0]))]}]) + record  # type: ignore[index,arg-type]
    assert joined.kept is not None
    assert joined.log_kept_mass is not None
    assert record.kept is not None
    assert np.isnan(joined.log_kept_mass[0])
    assert len(joined.kept[0]) == 0
    assert joined.kept[1].tolist() == record.kept[0].tolist()
