from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from logprobe.errors import InputError, UnsupportedModelError
from logprobe.models.config_files import parse_config
from logprobe.models.gguf.config import build_config
from logprobe.models.gguf.file import GgufFile

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

HEAD_DIM = 32  # of the files that are written


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_every_size_in_the_file_reaches_the_config(
    architecture: str, tmp_path: Path, write_gguf: Callable[..., Path]
) -> None:
    gguf = GgufFile(write_gguf(tmp_path / "tiny.gguf", architecture))
    config = parse_config(build_config(gguf))
    assert config.hidden_size == gguf.value(".embedding_length")
    assert config.intermediate_size == gguf.value(".feed_forward_length")
    assert config.num_hidden_layers == gguf.value(".block_count")
    assert config.num_attention_heads == gguf.value(".attention.head_count")
    assert config.num_key_value_heads == gguf.value(".attention.head_count_kv")
    assert config.head_dim == gguf.value(".attention.key_length")
    assert config.max_position_embeddings == gguf.value(".context_length")
    assert config.vocab_size == len(gguf.value("tokenizer.ggml.tokens"))
    assert config.tie_word_embeddings
    assert config.bos_token_id == gguf.value("tokenizer.ggml.bos_token_id")
    assert config.eos_token_id == gguf.value("tokenizer.ggml.eos_token_id")


def test_a_float32_of_the_file_is_read_as_the_number_that_was_written(
    tmp_path: Path, write_gguf: Callable[..., Path]
) -> None:
    gguf = GgufFile(write_gguf(tmp_path / "tiny.gguf"))
    assert gguf.value(".attention.layer_norm_rms_epsilon") != 1e-5
    assert parse_config(build_config(gguf)).rms_norm_eps == 1e-5


def test_gemma3_layers_windows_and_thetas_follow_llama_cpp(
    tmp_path: Path, write_gguf: Callable[..., Path]
) -> None:
    def stretch(writer: Any) -> None:
        writer.add_rope_scaling_type(_linear())
        writer.add_rope_scaling_factor(8.0)
        writer.add_uint32("gemma3.attention.sliding_window_pattern", 2)

    config = parse_config(build_config(GgufFile(write_gguf(tmp_path / "tiny.gguf", "gemma3", more=stretch))))
    assert config.layer_types == ["sliding_attention", "full_attention"]
    assert config.sliding_window == 16
    assert config.query_pre_attn_scalar == 32
    assert config.rope_parameters == {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    }


def _linear() -> Any:
    from gguf import RopeScalingType

    return RopeScalingType.LINEAR


def test_rotary_scaling_of_a_llama_is_refused(tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", more=lambda writer: writer.add_rope_scaling_type(_linear()))
    with pytest.raises(UnsupportedModelError, match="rotary scaling 'linear'"):
        build_config(GgufFile(path))


def test_a_key_that_is_not_understood_is_refused_by_name(
    tmp_path: Path, write_gguf: Callable[..., Path]
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", more=lambda writer: writer.add_uint32("llama.expert_count", 8))
    with pytest.raises(UnsupportedModelError, match=r"unknown key llama\.expert_count"):
        build_config(GgufFile(path))


def test_heads_with_a_part_outside_the_rotation_are_refused(
    tmp_path: Path, write_gguf: Callable[..., Path]
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "qwen2", more=lambda writer: writer.add_rope_dimension_count(8))
    with pytest.raises(UnsupportedModelError, match=r"qwen2\.rope\.dimension_count is 8"):
        build_config(GgufFile(path))


def test_an_unknown_architecture_is_refused_with_the_known_ones(
    tmp_path: Path, write_gguf: Callable[..., Path]
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "mamba")
    with pytest.raises(
        UnsupportedModelError, match=r"'mamba' is not supported .supported: llama, qwen2, qwen3, gemma3"
    ):
        build_config(GgufFile(path))


def test_a_file_that_is_no_gguf_is_an_input_error(tmp_path: Path) -> None:
    path = tmp_path / "text.gguf"
    path.write_bytes(b"this is no model at all" * 10)
    with pytest.raises(InputError, match="not a valid GGUF file"):
        GgufFile(path)


def test_a_file_cut_off_is_an_input_error(tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(InputError, match="not a valid GGUF file"):
        GgufFile(path)


def llama3_factors(factor: float, num: int) -> Any:
    """As llama.cpp's converter writes them for frequencies of base 50,000."""
    factors = []
    for place in range(num):
        wave_length = 2 * math.pi * 50_000.0 ** (place / num)
        smooth = min(max((8192 / wave_length - 1) / 3, 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_factors_of_llama_3_are_those_of_its_module(
    tmp_path: Path, write_gguf: Callable[..., Path], factor: float
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    factors = llama3_factors(factor, HEAD_DIM // 2)
    path = write_gguf(
        tmp_path / "tiny.gguf", more=lambda writer: writer.add_tensor("rope_freqs.weight", factors)
    )
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**build_config(GgufFile(path))))  # type: ignore[no-untyped-call]
    plain = 50_000.0 ** (-np.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    np.testing.assert_allclose(model.model.rotary_emb.inv_freq.numpy(), plain / factors, rtol=1e-5)
    assert factors.max() == factor > factors.min()


@pytest.mark.parametrize("factors", [np.full(16, 3.0, np.float32), np.ones(8, np.float32)])
def test_other_factors_of_frequencies_are_refused_by_name(
    tmp_path: Path, write_gguf: Callable[..., Path], factors: Any
) -> None:
    path = write_gguf(
        tmp_path / "tiny.gguf", more=lambda writer: writer.add_tensor("rope_freqs.weight", factors)
    )
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight"):
        build_config(GgufFile(path))
