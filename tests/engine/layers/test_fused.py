"""Fused decoder layers: which models get them, and that the numbers stay transformers' own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from logprobe.config import EngineConfig
from logprobe.engine.forward.native import NativeForward
from logprobe.engine.layers import fused as fused_module
from logprobe.engine.layers.fused import FusedLayer
from logprobe.engine.plan.scheduler import Span, StepPlan
from logprobe.models import resolve
from placed import Placed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TOLERANCE = 2e-4  # nats; float32 itself is 1e-4 from float64 on some of these
LAYERS = 4
HALF_ROTATES = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
# Model → settings that make it special, and how many of its layers are of the usual form.
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "Llama": ({"attention_bias": True, "mlp_bias": True}, LAYERS),
    "Qwen2": ({}, LAYERS),  # biases of the projections
    "Qwen3": ({"head_dim": 16}, LAYERS),  # norms of the heads
    "Mistral": ({"sliding_window": 9}, LAYERS),
    "SmolLM3": ({"no_rope_layers": [1, 1, 0, 1]}, LAYERS),  # a layer without rotation
    # Joined projections, and half of a head rotates.
    "Phi3": ({"rope_parameters": HALF_ROTATES}, LAYERS),
    "GPT2": ({"n_inner": 96}, LAYERS),  # no rotation, no gates
    "GPTNeoX": ({"rope_parameters": HALF_ROTATES}, LAYERS),  # projections by head, both parts read the same
    "Granite": ({"residual_multiplier": 0.3, "attention_multiplier": 0.2}, 0),
    "Olmo2": ({}, LAYERS),  # norms after the parts, and of all heads together
    "Olmo3": ({"sliding_window": 9}, LAYERS),
    "Gemma2": ({"head_dim": 12, "query_pre_attn_scalar": 10, "sliding_window": 9}, LAYERS),  # four norms
    "Gemma3Text": ({"head_dim": 12, "query_pre_attn_scalar": 10, "sliding_window": 9}, LAYERS),
    "Glm4": ({"head_dim": 12}, 0),  # four norms of other names
    "Glm": ({"head_dim": 12, "partial_rotary_factor": 0.5}, 0),  # half of a head rotates
    "Ernie4_5": ({"head_dim": 12}, 0),  # neighbours rotate, not halves
}
# Model → the layers that its LoRA weights change here: all that it has.
ADAPTED = {
    "Phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "GPTNeoX": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
}


def spread_out(model: Any) -> None:
    """Weights whose errors would show."""
    for name, weight in model.named_parameters():
        torch.nn.init.normal_(weight, mean=float("norm" in name and "bias" not in name), std=0.2)


@pytest.fixture(scope="module")
def folder(small_model: Callable[..., Path]) -> Callable[[str], Path]:
    """A small random model of a kind."""
    return lambda kind: small_model(kind, MODELS[kind][0], spread_out)


def run(forward: NativeForward, prompts: list[Any], *, split: int, lora: Any = None) -> Any:
    """Log-probabilities of all tokens of all prompts, `split` tokens of each prompt a step."""
    ends = np.cumsum([len(ids) for ids in prompts])
    places = [np.arange(end - len(ids), end, dtype=np.int32) for ids, end in zip(prompts, ends, strict=True)]
    sequences: list[Any] = [Placed(ids, own, lora) for ids, own in zip(prompts, places, strict=True)]
    for start in range(0, max(map(len, prompts)), split):
        spans = [Span(one, start, min(start + split, len(one.token_ids))) for one in sequences]
        forward.run(StepPlan(tokens=[span for span in spans if span.start < span.end]).batch())
    with torch.inference_mode():
        rows = forward.hidden_rows(np.concatenate(places))
        return forward.head(rows).double().log_softmax(-1)


@pytest.mark.parametrize("kind", MODELS)
def test_layers_of_the_usual_form_are_fused_and_give_the_numbers_of_transformers(
    folder: Callable[[str], Path], kind: str
) -> None:
    path = folder(kind)
    forward = NativeForward(
        EngineConfig(model=str(path), weights="packed", kv_bytes=1 << 21), resolve(str(path))
    )
    layers = next(module for module in forward.model.modules() if isinstance(module, torch.nn.ModuleList))
    kinds = [type(layer) for layer in layers]
    assert kinds.count(FusedLayer) == MODELS[kind][1]
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 280, length).astype(np.int32) for length in (1, 7, 40, 90)]
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    with torch.inference_mode():
        rows = [model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0] for ids in prompts]
    want = torch.cat(rows).double().log_softmax(-1)
    for split in (1, 13, 1000):
        torch.testing.assert_close(run(forward, prompts, split=split), want, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("weights", ["packed", "published"])
@pytest.mark.parametrize("kind", ADAPTED)
def test_lora_weights_of_layers_with_other_names_are_pefts(
    folder: Callable[[str], Path], kind: str, weights: Any, tmp_path: Path
) -> None:
    path = folder(kind)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=ADAPTED[kind])
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager"), config)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.2)
    model.eval().save_pretrained(tmp_path)
    forward = NativeForward(
        EngineConfig(model=str(path), weights=weights, kv_bytes=1 << 21), resolve(str(path))
    )
    lora = forward.load_lora("own", str(tmp_path), 1)
    forward.make_room(lora)
    ids = np.arange(3, 43, dtype=np.int32)
    with torch.inference_mode():
        want = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].double().log_softmax(-1)
    got = run(forward, [ids], split=13, lora=lora)
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)
    assert (run(forward, [ids], split=13) - want).abs().max() > 1e-2


def test_plain_weights_leave_the_layers_as_they_are(tiny_model_folder: Path) -> None:
    name = str(tiny_model_folder)
    forward = NativeForward(EngineConfig(model=name, weights="plain", kv_bytes=1 << 21), resolve(name))
    assert not any(isinstance(module, FusedLayer) for module in forward.model.modules())


def test_a_layer_whose_trial_differs_stays_as_it_is(
    tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = fused_module.rotate_and_store
    monkeypatch.setattr(fused_module, "rotate_and_store", lambda *args: own(*args) * 1.001)
    name = str(tiny_model_folder)
    forward = NativeForward(EngineConfig(model=name, weights="packed", kv_bytes=1 << 21), resolve(name))
    assert not any(isinstance(module, FusedLayer) for module in forward.model.modules())
