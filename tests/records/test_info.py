from __future__ import annotations

from typing import Any

import pytest

from logprobe.errors import InputError
from logprobe.records import LogprobsInfo


def test_an_info_survives_json_and_equals_by_value() -> None:
    info = LogprobsInfo(
        stages=("raw", "processed"),
        num_logprobs_asked=-1,
        num_logprobs=49_152,
        temperature=0.7,
        generator="philox4x64-10",
        model="smollm2",
        verified_against="reference",
    )
    assert LogprobsInfo.from_json(info.to_json()) == info
    assert info != LogprobsInfo()
    assert info.to_dict()["stages"] == ("raw", "processed")
    assert info.to_dict()["unit"] == "nats"


def test_an_info_of_a_version_before_reads_without_what_it_did_not_say() -> None:
    info = LogprobsInfo.from_json(
        '{"engine":"native","weights":"checkpoint","layers":"2 by the native decoder"}'
    )
    assert (info.weights, info.weight_version) == ("checkpoint", None)
    assert (info.arithmetic, info.logprobe_version) == (None, None)
    assert LogprobsInfo.from_json(LogprobsInfo(weight_version="é 1").to_json()).weight_version == "é 1"


def test_what_is_not_known_is_not_written() -> None:
    assert LogprobsInfo().to_json() == "{}"


@pytest.mark.parametrize(
    "text", ["", "[]", '{"stages": ["cooked"]}', '{"temprature": 1.0}', '{"top_k": "x"}']
)
def test_what_is_no_info_is_refused(text: Any) -> None:
    with pytest.raises(InputError, match="LogprobsInfo"):
        LogprobsInfo.from_json(text)
