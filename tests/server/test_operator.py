"""Loading and replacing weights over HTTP: only with an operator key, effective from the next request."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from logprobe import LLM
from server_process import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

KEY = "an-operators-own-key"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
UPDATE = "/update_weights_from_disk"
RESET = "/reset_prefix_cache"
ASK = {"prompt": "the cat", "max_tokens": 3, "logprobs": 0, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def served(tiny_model_folder: Path, serve_llm: Any) -> Iterator[Any]:
    """A separate server, as its weights change."""
    with (
        LLM(str(tiny_model_folder), kv_cache_memory_bytes=1 << 20) as llm,
        serve_llm(llm, model_name="base", operator_key=(KEY,), api_key=("a-client-of-it",)) as running,
    ):
        yield running


def order(server: Any, path: str, key: str | None = KEY, **body: Any) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx.post(server.url + path, json=body, headers=headers, timeout=PATIENCE_S)


def numbers(server: Any, **fields: Any) -> list[float]:
    reply = order(server, "/v1/completions", "a-client-of-it", **ASK, **fields)
    assert reply.status_code == 200, reply.text
    found: list[float] = reply.json()["choices"][0]["logprobs"]["token_logprobs"]
    return found


def test_who_is_no_operator_may_do_nothing(served: Any, server: Any) -> None:
    bodies = {
        LOAD: {"lora_name": "a", "lora_path": "/"},
        UNLOAD: {"lora_name": "a"},
        UPDATE: {"model_path": "/"},
        RESET: {},
    }
    for path, body in bodies.items():
        for key in (None, "a-client-of-it", KEY + "x"):
            refused = order(served, path, key, **body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        refused = order(server, path, **body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "no_operator_key")
    assert order(served, "/v1/completions", KEY, **ASK).status_code == 401


def test_an_emptied_cache_changes_no_number(served: Any) -> None:
    ask = ASK | {"prompt": [*range(5, 60)], "prompt_logprobs": 2}
    first, cached, _, cold = (
        order(served, "/v1/completions", "a-client-of-it", **ask).json()["choices"][0],
        order(served, "/v1/completions", "a-client-of-it", **ask).json()["choices"][0],
        order(served, RESET),
        order(served, "/v1/completions", "a-client-of-it", **ask).json()["choices"][0],
    )
    assert order(served, RESET).json() == {"success": True}
    for one in (cached, cold):
        assert one["text"] == first["text"]
        for mine, theirs in zip(one["prompt_logprobs"][1:], first["prompt_logprobs"][1:], strict=True):
            assert {key: row["logprob"] for key, row in mine.items()} == pytest.approx(
                {key: row["logprob"] for key, row in theirs.items()}, abs=1e-5
            )


def test_lora_weights_are_loaded_replaced_and_dropped(served: Any, adapter_folders: dict[str, Path]) -> None:
    wide, narrow = (str(adapter_folders[name]) for name in ("wide", "narrow"))
    base = numbers(served)
    loaded = order(served, LOAD, lora_name="mine", lora_path=wide)
    assert loaded.json() == {"id": "mine", "object": "model", "root": wide}
    with_wide = numbers(served, model="mine")
    refused = order(served, LOAD, lora_name="mine", lora_path=narrow)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_name")
    assert numbers(served, model="mine") == with_wide
    replaced = order(served, LOAD, lora_name="mine", lora_path=narrow, load_inplace=True)
    assert replaced.status_code == 200, replaced.text
    with_narrow = numbers(served, lora="mine")
    assert len({tuple(base), tuple(with_wide), tuple(with_narrow)}) == 3
    assert order(served, UNLOAD, lora_name="mine").status_code == 200
    assert order(served, "/v1/completions", "a-client-of-it", **ASK, model="mine").status_code == 404
    assert numbers(served) == base


@pytest.mark.parametrize("wants_to_end", [False, True])
def test_the_models_weights_are_replaced(
    served: Any, tiny_model_folder: Path, tmp_path: Path, *, wants_to_end: bool
) -> None:
    before = numbers(served)
    state = load_file(tiny_model_folder / "model.safetensors")
    noise = torch.Generator().manual_seed(0)
    name = "model.layers.0.mlp.down_proj.weight"
    state[name] = state[name] + 0.3 * torch.randn(state[name].shape, generator=noise)
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((tiny_model_folder / "config.json").read_bytes())
    asked = {"model_path": str(tmp_path), "weight_version": "step 2", "abort_all_requests": wants_to_end}
    assert order(served, UPDATE, **asked).json() == {"success": True, "weight_version": "step 2"}
    assert numbers(served) != before
    headers = {"Authorization": "Bearer a-client-of-it"}
    told = httpx.get(f"{served.url}/v1/models", headers=headers, timeout=PATIENCE_S).json()
    assert told["data"][0]["weight_version"] == "step 2"
    assert told["data"][0]["quantization"] is None


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (LOAD, {"lora_name": "a", "lora_path": "/nowhere"}, "lora_path"),
        (LOAD, {"lora_name": "base", "lora_path": "/"}, "lora_name"),
        (LOAD, {"lora_name": "a\nb", "lora_path": "/"}, "lora_name"),
        (LOAD, {"lora_name": "a"}, "lora_path"),
        (UNLOAD, {"lora_name": "nobody"}, "lora_name"),
        (UPDATE, {"model_path": "/nowhere"}, "model_path"),
        (UPDATE, {"model_path": "/", "weight_version": "a\nb"}, "weight_version"),
    ],
)
def test_what_cannot_be_done_names_the_field_and_changes_nothing(
    served: Any, path: str, body: dict[str, Any], param: str
) -> None:
    before = numbers(served)
    refused = order(served, path, **body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), json.dumps(refused.json())
    assert numbers(served) == before
