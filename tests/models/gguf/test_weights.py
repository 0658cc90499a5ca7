from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from gguf_blocks import FORMS, HALVES, random_blocks
from logprobe.errors import UnsupportedModelError
from logprobe.models.config_files import parse_config
from logprobe.models.gguf.config import build_config
from logprobe.models.gguf.file import GgufFile
from logprobe.models.gguf.weights import GgufSource, parameter_shapes
from logprobe.models.loading import source_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from logprobe.models import ModelFiles

NUM_ROWS, NUM_INPUTS, HEADS, KV_HEADS = 192, 512, 4, 2
QUERY, KEY, UP = "self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj"


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_weights_equal_those_of_transformers_own_reader(
    architecture: str, tmp_path: Path, write_gguf: Callable[..., Path]
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", architecture)
    config = build_config(GgufFile(path))
    ours = GgufSource(path, parse_config(config))
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    parameters = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    del parameters["lm_head.weight"]
    assert parameter_shapes(parse_config(config)) == parameters
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=module)["tensors"]
    theirs = {name: tensor for name, tensor in theirs.items() if name in module.state_dict()}
    theirs.pop("lm_head.weight", None)
    assert ours.shapes.keys() == theirs.keys()
    for name, shape in ours.shapes.items():
        assert shape == theirs[name].shape
        np.testing.assert_array_equal(ours.read(name), theirs[name].numpy())


@pytest.mark.parametrize(
    ("file_type", "expected"), [(0, None), (1, None), (32, None), (3, "Q4_1"), (7, "Q8_0"), (15, "Q4_K_M")]
)
def test_the_quantization_has_llama_cpps_name(
    file_type: int, expected: str | None, tmp_path: Path, write_gguf: Callable[..., Path]
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", more=lambda writer: writer.add_file_type(file_type))
    assert GgufFile(path).quantization == expected


@pytest.mark.parametrize("type_name", ["Q4_1", "Q8_0"])
def test_a_file_that_does_not_say_its_quantization_has_that_of_most_bytes(
    type_name: str, tmp_path: Path
) -> None:
    written(tmp_path / "blocks.gguf", type_name)
    assert GgufFile(tmp_path / "blocks.gguf").quantization == type_name


def test_a_file_of_floats_has_no_quantization(tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
    assert GgufFile(write_gguf(tmp_path / "tiny.gguf")).quantization is None


def written(path: Path, type_name: str, architecture: str = "llama") -> GgufSource:
    """Matrices of one type, of a layer."""
    writer = GGUFWriter(path, architecture)
    for part in ("attn_q", "attn_k", "ffn_up"):
        if type_name in HALVES:
            kind: Any = GGMLQuantizationType[type_name]
            writer.add_tensor(f"blk.0.{part}.weight", numbers(type_name), raw_dtype=kind)
        else:
            writer.add_tensor(f"blk.0.{part}.weight", numbers(type_name))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config: Any = SimpleNamespace(num_attention_heads=HEADS, num_key_value_heads=KV_HEADS)
    return GgufSource(path, config)


def numbers(type_name: str) -> Any:
    if type_name in HALVES:
        return random_blocks(type_name, NUM_ROWS, NUM_INPUTS)
    wide = np.random.default_rng(0).normal(size=(NUM_ROWS, NUM_INPUTS))
    return wide.astype({"F32": np.float32, "F16": np.float16}[type_name])


@pytest.mark.parametrize("part", [QUERY, KEY, UP])
@pytest.mark.parametrize("type_name", ["F32", "F16", *HALVES])
def test_some_rows_are_those_of_the_whole(type_name: str, part: str, tmp_path: Path) -> None:
    source, name = written(tmp_path / "x.gguf", type_name), f"model.layers.0.{part}.weight"
    whole = source.read(name)
    assert whole.shape == source.shapes[name] == (NUM_ROWS, NUM_INPUTS)
    assert whole.dtype == (np.float16 if type_name == "F16" else np.float32)
    for rows in (slice(5, 150), slice(191, 192), np.array([190, 3, 3, 0, 97])):
        assert np.array_equal(source.read(name, rows), whole[rows])
    panels = source.panels(name)
    assert (panels is not None) == (type_name in FORMS)
    if panels is not None:
        assert np.array_equal(panels.rows(np.arange(NUM_ROWS)), whole)


@pytest.mark.parametrize(("part", "heads"), [(QUERY, HEADS), (KEY, KV_HEADS), (UP, NUM_ROWS // 2)])
def test_rotary_rows_of_a_llama_come_apart(part: str, heads: int, tmp_path: Path) -> None:
    source = written(tmp_path / "x.gguf", "Q4_1")
    want = dequantize(numbers("Q4_1"), GGMLQuantizationType.Q4_1)
    pairs = want.reshape(heads, NUM_ROWS // heads // 2, 2, NUM_INPUTS)
    apart = pairs.swapaxes(1, 2).reshape(NUM_ROWS, NUM_INPUTS)
    assert np.array_equal(source.read(f"model.layers.0.{part}.weight"), apart)


def test_rows_of_other_families_stand_as_they_are(tmp_path: Path) -> None:
    source = written(tmp_path / "x.gguf", "Q4_1", "qwen2")
    want = dequantize(numbers("Q4_1"), GGMLQuantizationType.Q4_1)
    assert np.array_equal(source.read(f"model.layers.0.{QUERY}.weight"), want)


def test_brain_floats_are_read_as_such(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "x.gguf", "llama")
    want = torch.randn(6, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    kind: Any = GGMLQuantizationType.BF16
    writer.add_tensor("output.weight", want.view(torch.uint8).numpy(), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config: Any = SimpleNamespace(num_attention_heads=1, num_key_value_heads=1)
    read = GgufSource(tmp_path / "x.gguf", config).read("lm_head.weight")
    assert read.dtype == ml_dtypes.bfloat16
    assert np.array_equal(read.view(np.uint16), want.view(torch.uint16).numpy())


def test_what_is_read_can_be_written_and_the_file_stays(
    tmp_path: Path, write_gguf: Callable[..., Path]
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    before = path.read_bytes()
    source = GgufSource(path, parse_config(build_config(GgufFile(path))))
    for name in source.shapes:
        source.read(name)[:] = 0
    assert path.read_bytes() == before


def check(path: Path) -> None:
    GgufSource(path, parse_config(build_config(GgufFile(path)))).check()


def test_a_missing_tensor_is_refused_by_name(tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", leave_out="blk.1.ffn_up.weight")
    with pytest.raises(
        UnsupportedModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight: the shape is none in the file"
    ):
        check(path)


def test_a_tensor_without_a_place_is_refused_by_name(tmp_path: Path, write_gguf: Callable[..., Path]) -> None:
    def add(writer: Any) -> None:
        writer.add_tensor("blk.0.attn_sinks.weight", np.ones(16, np.float32))

    with pytest.raises(UnsupportedModelError, match=r"attn_sinks\.weight"):
        check(write_gguf(tmp_path / "tiny.gguf", more=add))


def test_factors_of_frequencies_that_no_configuration_holds_are_refused(
    tmp_path: Path, write_gguf: Callable[..., Path]
) -> None:
    def add(writer: Any) -> None:
        writer.add_tensor("rope_freqs.weight", np.full(8, 2.0, np.float32))

    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight"):
        check(write_gguf(tmp_path / "tiny.gguf", "qwen2", more=add))


def test_a_type_that_cannot_be_read_is_refused_by_name(
    tmp_path: Path, write_gguf: Callable[..., Path]
) -> None:
    def add(writer: Any) -> None:
        writer.add_tensor("output_norm.weight", np.ones(64, np.float64))

    path = write_gguf(tmp_path / "tiny.gguf", more=add, leave_out="output_norm.weight")
    with pytest.raises(UnsupportedModelError, match=r"model\.norm\.weight has the type F64"):
        check(path)


@cache  # to read Gemma's 262,144 tokens takes ten seconds
def config_of(path: Path) -> Any:
    return parse_config(build_config(GgufFile(path)))


@pytest.mark.real_model
@pytest.mark.parametrize("real_files", ["smollm2", "gemma3-270m"], indirect=True)
def test_real_weights_are_the_files_dequantised_ones(real_files: ModelFiles) -> None:
    source, gguf = source_of(real_files), GgufFile(real_files.folder / "model.gguf")
    assert source is not None
    pairs = {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.0.attn_v.weight": "model.layers.0.self_attn.v_proj.weight",
        "blk.7.ffn_down.weight": "model.layers.7.mlp.down_proj.weight",
        "blk.3.attn_q.weight": "model.layers.3.self_attn.q_proj.weight",
    }
    for own, name in pairs.items():
        want = dequantize(gguf.raw(own), GGMLQuantizationType[gguf.type_name(own)])
        read = source.read(name)
        if gguf.architecture == "llama" and "attn_q" in own:
            want, read = np.sort(want, axis=0), np.sort(read, axis=0)
        assert np.array_equal(read, want), name


@pytest.mark.real_model
@pytest.mark.parametrize("real_gguf", ["gemma3-270m"], indirect=True)
def test_gemma3_270m_has_the_published_shape(real_gguf: Path) -> None:
    config = config_of(real_gguf)
    assert config.model_type == "gemma3_text"
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (18, 640, 2048)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 1, 256)
    assert (config.vocab_size, config.max_position_embeddings, config.rms_norm_eps) == (262_144, 32_768, 1e-6)
    assert (config.query_pre_attn_scalar, config.sliding_window) == (256, 512)
    assert [layer for layer, kind in enumerate(config.layer_types) if kind == "full_attention"] == [5, 11, 17]
    assert config.rope_parameters["full_attention"]["rope_theta"] == 1_000_000.0
    assert config.rope_parameters["sliding_attention"]["rope_theta"] == 10_000.0
    assert config.tie_word_embeddings
    assert (config.bos_token_id, config.eos_token_id, config.content["pad_token_id"]) == (2, 1, 0)
