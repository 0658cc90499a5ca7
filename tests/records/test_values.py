from __future__ import annotations

import json
from dataclasses import asdict, is_dataclass, replace

from logprobe.records import Logprob


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
