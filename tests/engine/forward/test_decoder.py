"""The native decoder: the models it supports, with the same numbers as transformers."""

from __future__ import annotations

import copy
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from decoders import EXPERTS, NATIVE, TRANSFORMERS, hidden, loaded, logprobs, spread_out
from families.tiny import model_of
from families.trials import load
from logprobe.engine.forward.cpu import decoder as decoder_module
from logprobe.errors import UnsupportedModelError
from logprobe.kernels.info import cpu_arithmetics
from logprobe.models import resolve
from logprobe.models.loading import load_state
from logprobe.models.lora import LoraWeights, LowRank

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TOLERANCE = 2e-4  # nats; some of these differ by 1e-4 between float32 and float64
FORMS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Kind → layers with LoRA weights in this test: all that the decoder adapts.
ADAPTED = {
    "Llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "Phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "GPTNeoX": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "Granite": ["q_proj", "o_proj", "down_proj"],  # scales before the residual
    "Gemma2": ["v_proj", "o_proj", "up_proj", "down_proj"],  # norms after the products
    "Qwen2Moe": ["q_proj", "gate_proj", "down_proj", "shared_expert_gate"],
}


@pytest.fixture(scope="module")
def folder(small_model: Callable[..., Path]) -> Callable[[str], Path]:
    """Make a small random model of a kind."""
    return lambda kind: small_model(kind, (NATIVE | EXPERTS | TRANSFORMERS)[kind], spread_out)


def transformers_logprobs(model: Any, prompts: list[Any]) -> torch.Tensor:
    """Compute `logprobs` by transformers, each prompt separately."""
    with torch.inference_mode():
        rows = [model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0] for ids in prompts]
    return torch.cat(rows).double().log_softmax(-1)


@pytest.mark.parametrize("kind", [*NATIVE, *EXPERTS, *TRANSFORMERS])
def test_a_model_gives_the_numbers_of_transformers_however_its_tokens_are_split(
    folder: Callable[[str], Path], kind: str
) -> None:
    path = folder(kind)
    forward = loaded(path)
    assert (forward.layout.why_transformers is None) == (kind not in TRANSFORMERS)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(2, 280, length).astype(np.int32) for length in (1, 7, 40, 90)]
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    want = transformers_logprobs(model, prompts)
    for split in (1, 13, 1000):
        got = logprobs(forward, prompts, split=split)
        torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)


def test_another_models_load_beside_a_step_changes_no_bit(folder: Callable[[str], Path]) -> None:
    """Transformers sets torch's default dtype for all threads while it loads a model."""
    forward = loaded(folder("Ernie4_5"))
    ids = np.arange(3, 83, dtype=np.int32)
    want = logprobs(forward, [ids], split=70)
    torch.set_default_dtype(torch.bfloat16)
    try:
        got = logprobs(forward, [ids], split=70)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(got, want)


@pytest.mark.parametrize("kind", ADAPTED)
def test_lora_weights_are_pefts_and_leave_the_rows_beside_them_alone(
    folder: Callable[[str], Path], kind: str, tmp_path: Path
) -> None:
    path = folder(kind)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=ADAPTED[kind])
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager"), config)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.2)
    model.eval().save_pretrained(tmp_path)
    forward = loaded(path)
    lora = forward.load_lora("own", str(tmp_path), 1)
    forward.make_room(lora)
    ids, other = np.arange(3, 43, dtype=np.int32), np.arange(50, 90, dtype=np.int32)
    want = transformers_logprobs(model, [ids])
    for split in (1, 13, 1000):
        got = logprobs(forward, [ids, other], split=split, loras=[lora, None])[: len(ids)]
        torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)
        _, beside = hidden(forward, [ids, other], split=split, loras=[lora, None])
        _, alone = hidden(forward, [ids, other], split=split)
        assert torch.equal(beside, alone)
        assert torch.equal(hidden(forward, [other], split=split)[0], alone)
    assert (logprobs(forward, [ids], split=13) - want).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("form", "arithmetic"), [*((form, "fma") for form in FORMS), ("bfloat16", cpu_arithmetics()[-1])]
)
@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Gemma", "Olmo2"])
def test_models_keep_their_numbers_in_every_form(
    small_model: Callable[..., Path], tmp_path: Path, kind: str, form: str, arithmetic: str
) -> None:
    path = shutil.copytree(small_model(kind, {}), tmp_path, dirs_exist_ok=True)
    AutoModelForCausalLM.from_pretrained(path, dtype=FORMS[form]).save_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    forward = loaded(path, arithmetic=arithmetic)
    assert forward.layout.arithmetic == arithmetic
    linears = [
        linear
        for layer in forward.decoder.layers
        for linear in (layer.projection, layer.output, layer.mlp.down)
    ]
    assert {part.form.name for linear in linears for part in linear.parts} == {form}
    prompts = [np.arange(2, 42, dtype=np.int32)]
    want = transformers_logprobs(model, prompts)
    torch.testing.assert_close(logprobs(forward, prompts, split=13), want, rtol=0, atol=TOLERANCE)


@pytest.mark.skipif(cpu_arithmetics() == ("fma",), reason="bf16x3 products are for x86-64")
def test_a_model_without_weights_for_bf16x3_runs_with_fma(
    tiny_model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    forward = loaded(tiny_model_folder, arithmetic="bf16x3")  # its weights are float32
    assert forward.layout.arithmetic == "fma"
    assert "no matrix is in a format for bf16x3; using fma" in caplog.text


def test_lora_weights_of_a_layer_that_takes_none_are_refused_by_its_name(
    folder: Callable[[str], Path],
) -> None:
    forward = loaded(folder("Mixtral"))
    part = LowRank(np.zeros((2, 1), np.float32), np.zeros((1, 2), np.float32))
    names = ["model.layers.1.self_attn.q_proj", "vision.layers.0.fc", "model.layers.1.mlp.gate"]
    forward.decoder.check_lora(LoraWeights("own", "", 1, dict.fromkeys(names[:2], part)))
    with pytest.raises(UnsupportedModelError, match="gate, which is not supported"):
        forward.decoder.check_lora(LoraWeights("own", "", 1, dict.fromkeys(names, part)))


def test_plain_weights_run_by_transformers_modules(tiny_model_folder: Path) -> None:
    layout = loaded(tiny_model_folder, "plain").layout
    assert (layout.weights, layout.why_transformers) == ("plain", "plain weights were requested")


def test_a_model_that_our_decoder_gives_other_numbers_for_runs_by_transformers_modules(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = decoder_module.norm_stage
    monkeypatch.setattr(
        decoder_module,
        "norm_stage",
        lambda x, weight, out, epsilon, *rest, **options: own(
            x, weight, out, epsilon + 1e-2, *rest, **options
        ),
    )
    path = folder("Llama")
    forward = loaded(path)
    assert forward.layout.why_transformers is not None
    assert "the native decoder did not pass verification" in forward.layout.why_transformers
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()
    prompts = [np.arange(2, 42, dtype=np.int32)]
    want = transformers_logprobs(model, prompts)
    torch.testing.assert_close(logprobs(forward, prompts, split=13), want, rtol=0, atol=TOLERANCE)


def test_an_error_of_the_native_decoder_is_not_taken_for_other_logits(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("a fault of the kernel")

    monkeypatch.setattr(decoder_module, "norm_stage", fail)
    with pytest.raises(UnsupportedModelError, match="a fault of the kernel"):
        loaded(folder("Llama"))


def with_a_tensor(model: Any) -> None:
    attention = model.model.layers[1].self_attn
    attention.register_parameter("extra", torch.nn.Parameter(torch.ones(4), requires_grad=False))


def with_a_bias_of_a_norm(model: Any) -> None:
    model.model.layers[1].input_layernorm.bias = torch.nn.Parameter(torch.ones(64), requires_grad=False)


def with_a_wider_layer(model: Any) -> None:
    config = copy.deepcopy(model.config)
    config.num_key_value_heads *= 2
    attention = LlamaAttention(config, 1).requires_grad_(requires_grad=False)
    attention.config = model.config
    model.model.layers[1].self_attn = attention


def with_a_setting(model: Any) -> None:
    model.config.extra_factor = 2.0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_a_bias_of_a_norm, "its tensor model.layers.1.input_layernorm.bias is not supported"),
        (with_a_tensor, "its tensor model.layers.1.self_attn.extra is not supported"),
        (
            with_a_wider_layer,
            "its structure is not supported (ValueError: its layers have different sizes)",
        ),
        (with_a_setting, "extra_factor of its configuration is not supported"),
    ],
)
def test_what_has_no_place_in_the_native_decoder_runs_by_the_transformers_decoder_with_the_reason(
    change: Callable[[Any], None], reason: str
) -> None:
    model = model_of("llama")
    assert load(model, "checkpoint").layout.why_transformers is None
    change(model)
    layout = load(model, "checkpoint").layout
    assert layout.why_transformers == reason
    assert reason in layout.layers


@pytest.mark.parametrize("kind", ["Llama", "Phi3", "GPT2", "Gemma2"])
def test_a_decoder_gives_the_tensors_of_transformers_module_back(
    folder: Callable[[str], Path], kind: str
) -> None:
    path = folder(kind)
    state = {name: torch.from_numpy(one) for name, one in loaded(path).decoder.state().items()}
    want = AutoModelForCausalLM.from_pretrained(path).state_dict()
    assert load_file(path / "model.safetensors").keys() <= want.keys()  # without the head if it is tied
    again = load_state(resolve(str(path)), state, dtype=torch.float32).state_dict()
    assert state.keys() == again.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(state[name], tensor), name
        assert torch.equal(again[name], tensor), name
