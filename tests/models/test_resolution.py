from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import pytest

from logprobe.errors import InputError, ModelNotFoundError, UnsupportedModelError
from logprobe.models import resolve

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_text("{}")
    return folder


def test_a_local_folder_is_itself(folder: Path) -> None:
    assert resolve(str(folder)).folder == folder


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_folder_without_one_of_its_files_says_which(missing: str, folder: Path) -> None:
    (folder / missing).unlink()
    with pytest.raises(ModelNotFoundError, match=missing.removeprefix("model")):
        resolve(str(folder))


def test_pickled_weights_are_refused_by_name(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UnsupportedModelError, match=r"pytorch_model\.bin is a pickle"):
        resolve(str(folder))


def test_a_missing_shard_is_named(folder: Path) -> None:
    shards = {"a": "model.safetensors", "b": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(ModelNotFoundError, match=r"model-2\.safetensors is missing \(1 of 2"):
        resolve(str(folder))


def test_a_near_name_is_proposed() -> None:
    with pytest.raises(
        ModelNotFoundError, match=r"did you mean 'smollm2'\? known names are smollm2, gemma3-270m"
    ):
        resolve("smolm2")


@pytest.mark.parametrize("name", ["", "qwerty", "./no/such/folder", "~/nowhere-at-all", "a/b/c"])
def test_an_unknown_name_lists_the_known(name: str) -> None:
    with pytest.raises(ModelNotFoundError, match="known names are smollm2, gemma3-270m"):
        resolve(name)


def test_a_known_model_that_is_not_here_is_not_fetched_unasked(home: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="logprobe models pull smollm2"):
        resolve("smollm2", download=False)
    assert not home.exists()


def test_a_gguf_file_is_converted_once(tmp_path: Path, home: Path, write_gguf: Callable[..., Path]) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    found = resolve(str(path))
    first = found.folder
    assert found.version == f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
    assert first.parent == home / "models"
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    moved = path.rename(tmp_path / "moved.gguf")
    assert resolve(str(moved), download=False).folder == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp


def test_a_broken_gguf_file_leaves_nothing(tmp_path: Path, home: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + b"\xff" * 64)
    with pytest.raises(InputError, match=r"broken\.gguf: not a readable GGUF file"):
        resolve(str(path))
    assert [found.name for found in (home / "models").iterdir() if found.suffix != ".lock"] == []


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.onnx"
    path.write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match=r"no \.gguf file"):
        resolve(str(path))
