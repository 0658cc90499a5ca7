from __future__ import annotations

import copy
import pickle
from itertools import repeat
from typing import Any

import numpy as np
import pytest

from logprobe.errors import InputError, ParameterError
from logprobe.records import FlatLogprobs, Logprob, LogprobsInfo
from logprobe.records.forms.wire import read_header

INFO = LogprobsInfo(
    stages=("raw", "processed"),
    temperature=0.5,
    generator="philox4x64-10",
    model="m",
    weight_version="step 2",
)


@pytest.fixture(
    params=["empty", "none", "packed", "narrow", "fast", "dicts", "wide", "side", "slice", "steps"]
)
def record(request: pytest.FixtureRequest, step: Any) -> FlatLogprobs:
    flat = FlatLogprobs([None], info=INFO)
    kind = request.param
    if kind == "empty":
        return FlatLogprobs()
    if kind in {"packed", "slice", "steps"}:
        flat.append_rows(*step(700, 20, 90))
    if kind == "narrow":
        flat.append_rows(*step(700, 3, 90))
    if kind == "side":
        flat.append_rows(*step(2, 3, 90), entropy=[1.5, 2.5], given=([0, 1, 1], [7], [-3.0], [4]))
        flat.append_rows(*step(2, 3, 90))
    if kind == "fast":
        flat.append_fast([7, 7, 8], [-1.0, -1.0, -1.25], [3, 1, 2], repeat(None))
    if kind == "dicts":
        flat.extend(
            [{}, {2**40: Logprob(-0.1, None, "ü")}, None, {3: Logprob(-np.inf, 2, ""), 4: Logprob(-2.0, 7)}]
        )
    if kind == "wide":
        flat.append_rows([[2**31, 5]], [[-1.0, -0.5]], [2])
    return {"slice": flat[40:600], "steps": flat[::-3]}.get(kind, flat)


CARRIERS = {
    "bytes": lambda flat: FlatLogprobs.from_bytes(flat.to_bytes()),
    "memoryview": lambda flat: FlatLogprobs.from_bytes(memoryview(bytearray(flat.to_bytes()))),
    "pickle": lambda flat: pickle.loads(pickle.dumps(flat)),  # noqa: S301 - its own bytes
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
}


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_record_comes_back_exactly(record: Any, carrier: Any) -> None:
    back = CARRIERS[carrier](record)
    assert back == record
    for name in ("start_indices", "end_indices", "token_ids", "logprobs", "ranks", "decoded_tokens"):
        assert getattr(back, name) == getattr(record, name)
    assert back.info == record.info
    assert back.given == record.given
    assert (back.entropy is None) == (record.entropy is None)
    if record.entropy is not None:
        np.testing.assert_array_equal(back.entropy, record.entropy)
    assert back.nbytes == record.nbytes


@pytest.mark.parametrize("carrier", ["bytes", "pickle"])
def test_what_came_back_can_grow(record: Any, carrier: Any, step: Any, as_dicts: Any) -> None:
    back, arrays = CARRIERS[carrier](record), step(3, 20, 90)
    back.append_rows(*arrays)
    back.append({2**41: Logprob(-0.3, 1, "new")})
    assert back == [*record, *as_dicts(*arrays), {2**41: Logprob(-0.3, 1, "new")}]


def test_bytes_cost_what_the_columns_cost(step: Any) -> None:
    flat = FlatLogprobs()
    flat.append_rows(*step(5000, 20, 90))
    assert len(flat.to_bytes()) < 6.5 * flat.num_entries + 1000


@pytest.mark.parametrize(
    "damage",
    [
        lambda _: b"",
        lambda data: b"XXXX" + data[4:],
        lambda data: data[:20],
        lambda data: data[:-800],
        lambda data: data.replace(b'"version":1', b'"version":3'),
        lambda data: data.replace(b'"name":"ranks"', b'"name":"rnaks"'),
        lambda data: data.replace(b'"<f4"', b'"<x4"'),
    ],
)
def test_damaged_bytes_are_refused(damage: Any, step: Any) -> None:
    flat = FlatLogprobs()
    flat.append_rows(*step(60, 20, 90))
    with pytest.raises(InputError):
        FlatLogprobs.from_bytes(damage(flat.to_bytes()))


@pytest.mark.parametrize(("precision", "limit", "size"), [("float16", 0.01, 4.4), ("uint8", 0.06, 3.8)])
def test_smaller_bytes_keep_their_stated_error(step: Any, precision: Any, limit: float, size: Any) -> None:
    flat = FlatLogprobs([None])
    arrays = step(700, 20, 400)
    arrays[1][5, -1] = -np.inf
    flat.append_rows(*arrays)
    data = flat.to_bytes(precision)
    stated = read_header(data)[0].max_abs_error
    back = FlatLogprobs.from_bytes(data)
    exact = flat.arrays.logprobs
    finite = np.isfinite(exact)
    wrong = np.abs(exact[finite] - back.arrays.logprobs[finite])
    assert 0 < wrong.max() == pytest.approx(stated, rel=1e-3)
    assert stated <= limit
    assert np.isneginf(back.arrays.logprobs[~finite]).all()
    assert back.token_ids == flat.token_ids
    assert back.ranks == flat.ranks
    assert len(data) <= size * flat.num_entries + 1000


@pytest.mark.parametrize("precision", ["float16", "uint8"])
def test_every_kind_of_record_has_smaller_bytes(record: Any, precision: Any) -> None:
    data = record.to_bytes(precision)
    back = FlatLogprobs.from_bytes(data)
    error = read_header(data)[0].max_abs_error
    assert back.token_ids == record.token_ids
    assert back.ranks == record.ranks
    np.testing.assert_allclose(list(back.logprobs), list(record.logprobs), atol=error * 1.01 + 1e-12, rtol=0)
    assert [position is None for position in back] == [position is None for position in record]


def test_a_finite_value_never_becomes_infinite() -> None:
    flat = FlatLogprobs([{1: Logprob(-1e6, 1)}])
    data = flat.to_bytes("float16")
    assert FlatLogprobs.from_bytes(data).logprobs == [-65504.0]
    assert read_header(data)[0].max_abs_error == 1e6 - 65504


@pytest.mark.parametrize(("value", "precision"), [(np.nan, "float16"), (0.5, "uint8"), (-1.0, "int4")])
def test_what_has_no_smaller_form_is_refused(value: float, precision: Any) -> None:
    with pytest.raises(ParameterError, match="precision"):
        FlatLogprobs([{1: Logprob(value, 1)}]).to_bytes(precision)


@pytest.mark.parametrize("is_beside", [False, True])
def test_what_travels_of_a_record_is_what_it_held_when_asked(step: Any, is_beside: bool) -> None:
    record = FlatLogprobs([None])

    def grow() -> None:
        beside = {"entropy": [1.5], "given": ([0, 1], [7], [-3.0], [4]), "kept": ([0, 2], [1, 9])}
        record.append_rows(*step(1, 3, 40), **(beside if is_beside else {}))

    for _ in range(3):
        grow()
    before, copied = record.to_bytes(), record.copy()
    for _ in range(3):
        grow()
    record.append_fast([7, 8], [-1.0, -2.0], [1, 2], ["a", "b"])
    assert copied.to_bytes() == before
    assert len(record) == 8
    grow()
    back = FlatLogprobs.from_bytes(record.to_bytes())
    assert back == record
    assert back.given == record.given
