from __future__ import annotations

import json
from dataclasses import asdict, dataclass, is_dataclass, replace
from typing import Any

import numpy as np

from logprobe.records import Logprob
from logprobe.records.values import EqualByValue


def test_a_logprob_is_a_dataclass_with_a_fixed_field_order() -> None:
    assert Logprob(-1.0) == Logprob(-1.0, None, None)
    value = Logprob(-1.0, 2, "a")
    assert value == Logprob(logprob=-1.0, rank=2, decoded_token="a")  # noqa: S106 - a piece of text
    assert Logprob(-1.0, 2) != Logprob(-1.0, 3)
    assert is_dataclass(Logprob)
    assert list(asdict(value)) == ["logprob", "rank", "decoded_token"]
    assert json.dumps(asdict(value)) == '{"logprob": -1.0, "rank": 2, "decoded_token": "a"}'
    assert replace(value, rank=3) == Logprob(-1.0, 3, "a")
    assert not hasattr(value, "__dict__")


@dataclass(frozen=True, slots=True, eq=False)
class Numbers(EqualByValue):
    name: str
    values: np.ndarray[Any, Any]
    inner: Numbers | None = None


def test_results_with_arrays_are_equal_if_all_their_numbers_are() -> None:
    values = np.array([1.0, np.nan])
    one = Numbers("a", values, Numbers("b", np.arange(2)))
    assert one == Numbers("a", values.copy(), Numbers("b", np.arange(2)))
    assert one in [Numbers("c", values), Numbers("a", values.copy(), one.inner)]
    others = [
        Numbers("c", values, one.inner),
        Numbers("a", np.array([1.0, 2.0]), one.inner),
        Numbers("a", values[:1], one.inner),
        Numbers("a", values, Numbers("b", np.arange(3))),
        Numbers("a", values),
    ]
    assert all(one != other for other in others)
    assert one != "a"
