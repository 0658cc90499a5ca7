import json
from dataclasses import replace
from pathlib import Path

import bench_real
import gguf
import make_model
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from transformers import AutoModelForCausalLM

from logprobe.models.config_files import parse_config
from logprobe.models.gguf.config import build_config
from logprobe.models.gguf.file import GgufFile
from logprobe.models.gguf.weights import GgufSource

pytest.importorskip("xllamacpp")

VOCABULARY_LEN = 640
TOKENS = {"Ġ": 0, "a": 1, "b": 2, "ab": 3}


@pytest.fixture
def shape(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> make_model.Shape:
    """A Llama of 8 layers whose rows hold a block of 256 weights, written in two shards."""
    published = tmp_path / "checkpoint"
    published.mkdir()
    added = [{"id": 4, "content": "<|end|>", "special": True}]
    tokenizer = {"model": {"vocab": TOKENS, "merges": [["a", "b"]]}, "added_tokens": added}
    for name in make_model.TOKENIZER_FILES:
        (published / name).write_text(json.dumps(tokenizer))
    special = {"bos_token_id": 4, "eos_token_id": 4, "pad_token_id": 4}
    (published / "config.json").write_text(json.dumps(special | {"hidden_size": 3}))
    monkeypatch.setattr(make_model, "published_folder", lambda: published)
    monkeypatch.setattr(make_model, "VOCABULARY_LEN", VOCABULARY_LEN)
    monkeypatch.setattr(make_model, "SHARD_BYTES", 3_000_000)
    monkeypatch.setattr(make_model, "CHUNK", 1 << 14)
    return replace(make_model.SHAPES["llama-1b"], hidden=256, layers=8, heads=4, kv_heads=2, feed_forward=512)


def test_a_made_folder_is_a_model_with_finite_logits_that_a_seed_gives_again(
    shape: make_model.Shape, tmp_path: Path
) -> None:
    for name, seed in (("one", 1), ("again", 1), ("other", 2)):
        make_model.make_folder(shape, tmp_path / name, seed)
    shards = sorted(file.name for file in (tmp_path / "one").glob("*.safetensors"))
    assert len(shards) > 1
    for shard in shards:
        one, again, other = (tmp_path / name / shard for name in ("one", "again", "other"))
        assert one.read_bytes() == again.read_bytes() != other.read_bytes()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "one", dtype=torch.float32)
    assert model.config.rope_parameters["rope_type"] == "llama3"
    with torch.inference_mode():
        logits = model(torch.arange(64)[None]).logits
    assert torch.isfinite(logits).all()
    assert 1.0 < logits.std() < 10.0
    assert (logits[0].argmax(-1) == torch.arange(64)).sum() < 8  # it does not repeat its input


@pytest.mark.parametrize(("mix", "largest_error"), [("bf16", 0.0), ("q8_0", 0.01), ("q4_k_m", 0.15)])
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_gguf_file_holds_the_folders_weights(
    shape: make_model.Shape, tmp_path: Path, mix: str, largest_error: float, *, is_tied: bool
) -> None:
    make_model.make_folder(replace(shape, is_tied=is_tied), tmp_path / "m")
    make_model.write_gguf(tmp_path / "m", tmp_path / "m.gguf", mix)
    wanted = {name: make_model.as_float32(bits) for name, bits in make_model.stored_bits(tmp_path / "m")}
    file = GgufFile(tmp_path / "m.gguf")
    config = parse_config(build_config(file))
    assert config.tie_word_embeddings == is_tied
    assert config.vocab_size == VOCABULARY_LEN
    source = GgufSource(tmp_path / "m.gguf", config)
    assert source.shapes.keys() == wanted.keys()
    for name, values in wanted.items():
        error = np.abs(source.read(name).astype(np.float32) - values).max()
        assert error <= largest_error * np.abs(values).max(), name


def test_the_mix_of_q4_k_m_is_llama_cpps(shape: make_model.Shape, tmp_path: Path) -> None:
    make_model.make_folder(replace(shape, is_tied=False), tmp_path / "m")
    make_model.write_gguf(tmp_path / "m", tmp_path / "m.gguf", "q4_k_m")
    tensors = gguf.GGUFReader(tmp_path / "m.gguf").tensors
    generous = {one.name for one in tensors if one.tensor_type == gguf.GGMLQuantizationType.Q6_K}
    layers = {0, 3, 6, 7}
    assert generous == {"output.weight"} | {
        f"blk.{layer}.{part}.weight" for layer in layers for part in ("attn_v", "ffn_down")
    }
    assert {one.tensor_type for one in tensors if one.data.ndim == 1} == {gguf.GGMLQuantizationType.F32}
    embedding = next(one for one in tensors if one.name == "token_embd.weight")
    assert dequantize(embedding.data, embedding.tensor_type).shape == (VOCABULARY_LEN, 256)


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_step_goes_through_all_weights_but_a_table_that_is_no_head(
    shape: make_model.Shape, tmp_path: Path, *, is_tied: bool
) -> None:
    shape = replace(shape, is_tied=is_tied)
    make_model.make_folder(shape, tmp_path / "m")
    make_model.write_gguf(tmp_path / "m", tmp_path / "m-bf16.gguf", "bf16")
    sizes = {name: int(np.prod(size)) for name, size in shape.tensors().items()}
    unread = 0 if is_tied else sizes["model.embed_tokens.weight"]
    wanted = sum(sizes.values()) - unread
    norms = sum(size for name, size in sizes.items() if "norm" in name)
    assert bench_real.of_a_step(tmp_path / "m") == (wanted, 2 * wanted)
    assert bench_real.of_a_step(tmp_path / "m-bf16.gguf") == (wanted, 2 * wanted + 2 * norms)
