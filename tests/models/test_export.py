from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Literal

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from logprobe.errors import OutputError, UnsupportedModelError
from logprobe.models import ModelFiles, load_model, load_tokenizer, resolve
from logprobe.models.export import export_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def files(tmp_path: Path, home: Path, write_gguf: Callable[..., Path]) -> ModelFiles:
    assert not home.exists()
    return resolve(str(write_gguf(tmp_path / "tiny.gguf")))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shard_bytes", [1 << 14, 1 << 30])
def test_transformers_reads_what_was_exported(
    dtype: Literal["float32", "bfloat16"],
    shard_bytes: int,
    files: ModelFiles,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("logprobe.models.export.SHARD_BYTES", shard_bytes)
    folder = tmp_path / "new" / "folder"
    export_model(files, folder, dtype=dtype)
    shards = sorted(folder.glob("*.safetensors"))
    assert (len(shards) > 1) == (folder / "model.safetensors.index.json").exists() == (shard_bytes < 1 << 20)
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    kind = getattr(torch, dtype)
    assert theirs.dtype == kind
    want = load_model(files, dtype=kind).state_dict()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, want[name]), name
    text = "the abab 12"
    ids = load_tokenizer(files).encode(text)
    assert AutoTokenizer.from_pretrained(folder).encode(text, add_special_tokens=False) == ids
    assert resolve(str(folder)).folder == folder


def test_the_index_counts_every_byte(
    files: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("logprobe.models.export.SHARD_BYTES", 1)
    export_model(files, tmp_path / "out", dtype="float32")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    state = load_model(files, dtype=torch.float32).state_dict()
    state.pop("lm_head.weight")
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in state.values())
    assert len(set(index["weight_map"].values())) == len(state)


def test_a_folder_that_holds_something_is_left_alone(files: ModelFiles, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="is not empty"):
        export_model(files, tmp_path, dtype="float32")
    with pytest.raises(OutputError, match="cannot be written"):
        export_model(files, tmp_path / "file", dtype="float32")


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_files_have_the_mode_of_the_umask(
    umask: int, mode: int, files: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("logprobe.models.export.SHARD_BYTES", 1 << 14)
    before = os.umask(umask)
    try:
        export_model(files, tmp_path / "out", dtype="float32")
    finally:
        os.umask(before)
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "out").iterdir()}
    assert modes == dict.fromkeys(modes, mode)
    assert len(modes) > 4


def test_safetensors_are_not_written_again(files: ModelFiles, tmp_path: Path) -> None:
    export_model(files, tmp_path / "out", dtype="float32")
    with pytest.raises(UnsupportedModelError, match="is stored as safetensors already"):
        export_model(resolve(str(tmp_path / "out")), tmp_path / "again", dtype="float32")
