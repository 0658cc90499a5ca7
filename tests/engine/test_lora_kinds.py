"""Every kind of LoRA that peft can merge into linear layers, compared with peft's own forward pass."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from logprobe import LLM, SamplingParams
from logprobe.errors import ParameterError, UnsupportedModelError
from refusals import raises

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

TOLERANCE = 5e-5  # nats
LAYERS = ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
BIASES = {"attention_bias": True, "mlp_bias": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "biases": ("llama", BIASES),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "scaled": ("gemma3_text", {"sliding_window": 16, "layer_types": ["full_attention"] * 2}),
    "joined": ("phi3", {}),  # gates and values, and queries, keys and values, in one matrix each
}
KINDS: dict[str, dict[str, Any]] = {
    "DoRA": {"target_modules": LAYERS, "use_dora": True, "lora_alpha": 5},
    "DoRA with biases": {"target_modules": LAYERS, "use_dora": True, "bias": "all"},
    "all biases": {"target_modules": ["q_proj", "down_proj"], "bias": "all"},
    "biases of LoRA": {"target_modules": ["v_proj", "down_proj"], "bias": "lora_only", "use_rslora": True},
    "lora_bias": {"target_modules": ["q_proj", "down_proj", "up_proj"], "lora_bias": True},
    "head": {"target_modules": ["lm_head", "q_proj"], "lora_alpha": 6},
    "embedding": {"target_modules": ["embed_tokens"], "lora_alpha": 6},
    "both ends with DoRA": {"target_modules": ["embed_tokens", "lm_head", "v_proj"], "use_dora": True},
    "saved head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "saved ends": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    "patterns": {
        "target_modules": "all-linear",
        "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\..*": 5},
        "alpha_pattern": {r"layers\.\d+\.mlp\.down_proj": 9},
    },
    "some layers": {
        "target_modules": r".*\.(q|v|up)_proj",
        "exclude_modules": ["layers.0.self_attn.q_proj"],
    },
    "one layer": {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [1], "lora_alpha": 4},
    "joined DoRA": {"target_modules": ["gate_up_proj", "qkv_proj", "down_proj"], "use_dora": True},
}
CASES = [
    *(("biases", kind) for kind in KINDS if kind != "joined DoRA"),
    *(("tied", kind) for kind in ("head", "embedding", "both ends with DoRA", "saved head", "saved ends")),
    *(("scaled", kind) for kind in ("embedding", "both ends with DoRA", "saved ends", "DoRA")),
    ("joined", "joined DoRA"),
]


def trained(folder: Path, out: Path, seed: int, **options: Any) -> tuple[Path, Any]:
    """Save random LoRA weights to a folder; return it with peft's model."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    model = get_peft_model(base, LoraConfig(r=3, **options))
    torch.manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            scale = 0.5 if "magnitude" in name or "modules_to_save" in name else 0.1
            with torch.no_grad():
                weight.add_(scale * torch.randn_like(weight))
    model.save_pretrained(out)
    return out, model.eval()


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(
    request: Any, tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, Any, Any]:
    """A model folder, a LoRA folder, and peft's models with and without the LoRA."""
    from transformers import AutoConfig, AutoModelForCausalLM

    name, kind = request.param
    family, options = MODELS[name]
    folder = shutil.copytree(tiny_model_folder, tmp_path_factory.mktemp("model") / "m")
    vocab_size = AutoConfig.from_pretrained(folder).vocab_size
    torch.manual_seed(1)
    config = AutoConfig.for_model(family, **(SHAPE | {"vocab_size": vocab_size} | options))
    base = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for weight_name, weight in base.named_parameters():
            if weight_name.endswith("bias"):
                weight.normal_(std=0.2)
    base.save_pretrained(folder)
    lora, model = trained(folder, tmp_path_factory.mktemp("lora") / "l", 2, **KINDS[kind])
    return folder, lora, model, base


def expected(model: Any, ids: list[int]) -> np.ndarray[Any, Any]:
    """Return log-probabilities of ids[1:] by a whole forward pass."""
    with torch.inference_mode():
        rows = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return rows[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()


def found(outputs: list[Any]) -> list[np.ndarray[Any, Any]]:
    return [output.prompt_logprobs[1:].chosen_entries().logprobs for output in outputs]


@pytest.mark.parametrize("weights", ["checkpoint", "plain"])
@pytest.mark.filterwarnings("ignore")  # peft warns that it saves embeddings, and that they are tied
def test_the_numbers_are_pefts_alone_batched_and_on_cached_prefixes(
    case: tuple[Path, Path, Any, Any], weights: Any
) -> None:
    folder, lora, tuned, base = case
    rng = np.random.default_rng(0)
    vocab_size = base.config.vocab_size
    prompts = [rng.integers(2, vocab_size, size).tolist() for size in (6, 40, 3, 70)]
    prompts.append([*prompts[1], *prompts[2]])
    params = [
        SamplingParams(max_tokens=1, prompt_logprobs=0, logprobs=0, temperature=0, lora=one)
        for one in ("x", None)
    ]
    with LLM(str(folder), kv_cache_memory_bytes=1 << 21, weights=weights, max_num_batched_tokens=64) as llm:
        [before] = found(llm.generate([prompts[0]], params[1]))
        llm.add_lora("x", lora)
        for _ in range(2):  # cold, then with cached prefixes
            outputs = llm.generate([ids for ids in prompts for _ in params], params * len(prompts))
            for index, rows in enumerate(found(outputs)):
                ids, model = prompts[index // 2], (tuned, base)[index % 2]
                np.testing.assert_allclose(rows, expected(model, ids), atol=TOLERANCE, rtol=0)
                drawn = outputs[index].outputs[0]
                want = expected(model, [*ids, *drawn.token_ids])[-1]
                assert drawn.cumulative_logprob == pytest.approx(want, abs=TOLERANCE)
        alone = found(llm.generate([prompts[1]], params[0]))[0]
        np.testing.assert_allclose(alone, expected(tuned, prompts[1]), atol=TOLERANCE, rtol=0)
        assert np.abs(alone - expected(base, prompts[1])).max() > 1e-3
        processed = SamplingParams(temperature=1.0)
        [score] = llm.with_lora("x").score([(prompts[1][:20], prompts[1][20:])], sampling_params=processed)
        assert score.token_logprobs == pytest.approx(expected(tuned, prompts[1])[19:], abs=TOLERANCE)
        [after] = found(llm.generate([prompts[0]], params[1]))
        np.testing.assert_allclose(after, before, atol=1e-6, rtol=0)


@pytest.fixture(scope="module")
def tiny_kinds(
    tiny_model_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Path, Any]]:
    """Make LoRA weights for the tiny Llama."""
    return lambda **options: trained(tiny_model_folder, tmp_path_factory.mktemp("kind") / "l", 3, **options)


@pytest.fixture(scope="module")
def llm(tiny_model_folder: Path) -> Iterator[LLM]:
    with LLM(str(tiny_model_folder), kv_cache_memory_bytes=1 << 21) as llm:
        yield llm


@pytest.mark.filterwarnings("ignore")
def test_norms_of_dora_are_of_the_weights_that_run(tiny_model_folder: Path, tiny_kinds: Any) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder, _ = tiny_kinds(target_modules=[*LAYERS, "lm_head"], use_dora=True)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    ids = [5, 60, 61, 70, 71, 72, 9]
    with LLM(str(tiny_model_folder), kv_cache_memory_bytes=1 << 20) as llm:
        llm.add_lora("x", folder)
        llm.load_weights(model.state_dict())
        outputs = llm.generate([ids], SamplingParams(max_tokens=1, prompt_logprobs=0, lora="x"))
    # The folder has a copy of the head that it was trained on, which peft puts into the model.
    tuned = PeftModel.from_pretrained(model, folder).eval()
    np.testing.assert_allclose(found(outputs)[0], expected(tuned, ids), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("trainable_token_indices", [5]),
        ("layer_replication", [[0, 2], [1, 2]]),
        ("target_parameters", ["model.layers.0.mlp.gate_proj.weight"]),
        ("alora_invocation_tokens", [5]),
        ("ensure_weight_tying", True),
    ],
)
def test_what_is_not_merged_into_linear_layers_is_refused_by_name(
    llm: LLM, adapter_folders: dict[str, Path], tmp_path: Path, option: str, value: Any
) -> None:
    folder = shutil.copytree(adapter_folders["narrow"], tmp_path / "l")
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {option: value}))
    with pytest.raises(UnsupportedModelError, match=option):
        llm.add_lora("odd", folder)
    assert "odd" not in llm.list_loras()


@pytest.mark.filterwarnings("ignore")
def test_other_saved_modules_and_norms_are_refused_by_name(llm: LLM, tiny_kinds: Any) -> None:
    folder, _ = tiny_kinds(target_modules=["q_proj"], modules_to_save=["norm"])
    with pytest.raises(UnsupportedModelError, match=r"changes model\.layers\.0\.\w*norm"):
        llm.add_lora("odd", folder)


def changed_tensors(folder: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    from safetensors.torch import load_file, save_file

    file = folder / "adapter_model.safetensors"
    save_file(change(load_file(file)), file)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("module", ["lm_head", "embed_tokens"])
def test_a_resized_vocabulary_is_refused_by_name(llm: LLM, tiny_kinds: Any, module: str) -> None:
    folder, _ = tiny_kinds(target_modules=["q_proj"], modules_to_save=[module])
    changed_tensors(
        folder,
        lambda tensors: {
            name: torch.cat([one, one[:3]]) if module in name else one for name, one in tensors.items()
        },
    )
    with pytest.raises(UnsupportedModelError, match=rf"resized vocabulary.*{module}"):
        llm.add_lora("odd", folder)


@pytest.mark.parametrize("prefix", ["", "diffusion_model.", "base_model.model.language_model."])
def test_a_refusal_of_foreign_names_says_which_the_file_has(
    llm: LLM, adapter_folders: dict[str, Path], tmp_path: Path, prefix: str
) -> None:
    folder = shutil.copytree(adapter_folders["narrow"], tmp_path / "l")
    start = "base_model.model."
    changed_tensors(
        folder, lambda tensors: {prefix + name.removeprefix(start): one for name, one in tensors.items()}
    )
    with pytest.raises(UnsupportedModelError) as refused:
        llm.add_lora("odd", folder)
    assert f"{prefix}model.layers.0.self_attn.q_proj.lora_A.weight" in str(refused.value)


def test_a_model_of_peft_is_refused_with_the_call_that_merges_it(
    adapter_folders: dict[str, Path], tiny_model_folder: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    model = PeftModel.from_pretrained(base, adapter_folders["wide"])
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_folder)
    with raises(ParameterError, parameter="model", match=r"merge_and_unload\(\)"):
        LLM(model=model, tokenizer=tokenizer)  # type: ignore[arg-type]
    with LLM(model=model.merge_and_unload(), tokenizer=tokenizer, kv_cache_memory_bytes=1 << 20) as llm:
        [row] = found(llm.generate([[5, 6, 7]], SamplingParams(max_tokens=1, prompt_logprobs=0)))
    np.testing.assert_allclose(row, expected(base, [5, 6, 7]), atol=TOLERANCE, rtol=0)
