from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from logprobe.errors import UnsupportedModelError
from logprobe.models.gguf.config import build_config
from logprobe.models.gguf.file import GgufFile
from logprobe.models.gguf.weights import read_weight, write_weights

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from logprobe.models import ModelFiles


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_weights_equal_those_of_transformers_own_reader(
    architecture: str, tmp_path: Path, write_gguf: Callable[..., Path]
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", architecture)
    gguf = GgufFile(path)
    config = build_config(gguf)
    write_weights(gguf, config, tmp_path / "model.safetensors")
    ours = load_file(tmp_path / "model.safetensors")
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config)
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=module)["tensors"]
    theirs = {name: tensor for name, tensor in theirs.items() if name in module.state_dict()}
    theirs.pop("lm_head.weight", None)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=0)


def test_a_missing_tensor_is_refused_by_name(tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
    gguf = GgufFile(write_gguf(tmp_path / "tiny.gguf", leave_out="blk.1.ffn_up.weight"))
    with pytest.raises(
        UnsupportedModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight: the file has none"
    ):
        write_weights(gguf, build_config(gguf), tmp_path / "model.safetensors")
    assert not (tmp_path / "model.safetensors").exists()


def test_a_tensor_without_a_place_is_refused_by_name(tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
    def add(writer: object) -> None:
        writer.add_tensor("rope_freqs.weight", np.ones(16, np.float32))  # type: ignore[attr-defined]

    gguf = GgufFile(write_gguf(tmp_path / "tiny.gguf", more=add))
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight"):
        write_weights(gguf, build_config(gguf), tmp_path / "model.safetensors")


@cache  # to read Gemma's 262,144 tokens takes ten seconds
def opened(path: Path) -> GgufFile:
    return GgufFile(path)


@pytest.mark.real_model
@pytest.mark.parametrize(("real_files", "real_gguf"), [("smollm2",) * 2, ("gemma3-270m",) * 2], indirect=True)
def test_real_weights_are_the_files_dequantised_ones(real_files: ModelFiles, real_gguf: Path) -> None:
    gguf = opened(real_gguf)
    config = build_config(gguf)
    pairs = {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.0.attn_v.weight": "model.layers.0.self_attn.v_proj.weight",
        "blk.7.ffn_down.weight": "model.layers.7.mlp.down_proj.weight",
    }
    with safe_open(real_files.folder / "model.safetensors", "np") as stored:  # one tensor at a time
        for source, name in pairs.items():
            assert np.array_equal(stored.get_tensor(name), gguf.tensor(source)), name
        query = stored.get_tensor("model.layers.3.self_attn.q_proj.weight")
    np.testing.assert_array_equal(query, read_weight(gguf, config, "blk.3.attn_q.weight"))
    np.testing.assert_array_equal(np.sort(query, axis=0), np.sort(gguf.tensor("blk.3.attn_q.weight"), axis=0))


@pytest.mark.real_model
@pytest.mark.parametrize("real_gguf", ["gemma3-270m"], indirect=True)
def test_gemma3_270m_has_the_published_shape(real_gguf: Path) -> None:
    config = build_config(opened(real_gguf))
    assert config.model_type == "gemma3_text"
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (18, 640, 2048)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 1, 256)
    assert (config.vocab_size, config.max_position_embeddings, config.rms_norm_eps) == (262_144, 32_768, 1e-6)
    assert (config.query_pre_attn_scalar, config.sliding_window) == (256, 512)
    assert [layer for layer, kind in enumerate(config.layer_types) if kind == "full_attention"] == [5, 11, 17]
    assert config.rope_parameters["full_attention"]["rope_theta"] == 1_000_000.0
    assert config.rope_parameters["sliding_attention"]["rope_theta"] == 10_000.0
    assert config.tie_word_embeddings
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (2, 1, 0)
