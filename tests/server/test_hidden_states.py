"""`/v1/hidden_states`: hidden states in binary."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from logprobe import SamplingParams

PROMPTS: list[Any] = ["the cat", [5, 6, 7], "a dog and the cat"]


@pytest.mark.parametrize("layers", ["last", [0, 1], [-1, 0]])
def test_states_are_those_of_the_library(server: Any, layers: Any) -> None:
    from safetensors.numpy import load

    reply = server.post("/v1/hidden_states", prompts=PROMPTS, layers=layers)
    assert reply.headers["content-type"] == "application/vnd.safetensors"
    tensors = load(reply.content)
    params = SamplingParams(max_tokens=0, return_hidden_states=layers)
    for number, prompt in enumerate(PROMPTS):
        [output] = server.llm.generate([prompt], params)
        np.testing.assert_array_equal(tensors[str(number)], output.prompt_hidden_states)
    header = json.loads(reply.content[8 : 8 + int.from_bytes(reply.content[:8], "little")])["__metadata__"]
    assert len(json.loads(header["layers"])) == tensors["0"].shape[1]
    assert header["arithmetic"] == "fma"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompts": ["a"], "layers": [99]}, "layers"),
        ({"prompts": ["a"], "layers": [0, 0]}, "layers"),
        ({"prompts": ["a"], "layers": []}, "layers"),
        ({"prompts": ["a"], "layers": "all"}, "layers"),
        ({"prompts": [[]]}, "prompts"),
        ({"prompts": []}, "prompts"),
    ],
)
def test_a_faulty_body_is_a_400_that_names_the_field(server: Any, body: dict[str, Any], param: str) -> None:
    reply = server.post("/v1/hidden_states", **body)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"].startswith(param)


def test_states_beyond_the_limit_are_refused(new_server: Any) -> None:
    with new_server(max_logprob_bytes=20_000) as server:
        reply = server.post("/v1/hidden_states", prompts=["the cat"], layers=[0, 1, 2])
        assert reply.status_code == 200
        reply = server.post("/v1/hidden_states", prompts=["the cat and the dog"] * 9, layers=[0, 1, 2])
        assert reply.status_code == 400
        assert "max_logprob_bytes" in reply.json()["error"]["message"]
